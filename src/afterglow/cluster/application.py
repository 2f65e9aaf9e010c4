"""The application for Ray Serve: an ingress with the whole HTTP API, and replicas with engines."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from afterglow import registry
from afterglow.api.load import build_engine_settings, read_chat_template
from afterglow.api.model import Model
from afterglow.api.options import LoadOptions, SamplingOptions, check_options
from afterglow.cluster.host import MAX_ATTEMPTS, RayHost
from afterglow.cluster.replica import EngineReplica
from afterglow.engine.host import remote_calls
from afterglow.engine.host.base import EngineHost
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.host.lifecycle import Lifecycle
from afterglow.engine.host.remote_calls import EngineInfo
from afterglow.engine.types.counters import StoreReport
from afterglow.llama.model import LlamaModel, ModelInfo, ModelSettings, ProgressCallback
from afterglow.server.app import build_application
from afterglow.server.models import ModelRegistry, ServedModel
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState

if TYPE_CHECKING:
    from ray.serve import Application

ENGINE_DEPLOYMENT = "engine"
ROUTER = "afterglow.cluster.router:PrefixRouter"
STATS_PERIOD_SECONDS = 1.0  # between the reports of a replica
DEFAULT_REPLICAS = 2
INGRESS_EXTRA_SECONDS = 30.0  # for requests after the last replica of theirs was stopped
MAX_ONGOING_REQUESTS = 1000  # the engine has a queue of its own, which the router takes into account


class ClusterLifecycle(Lifecycle):
    """Vocabulary in this process, engines on a Ray cluster."""

    def __init__(self, spec: EngineSpec, handle: Any) -> None:
        super().__init__(spec)
        self._handle = handle

    @property
    def info(self) -> EngineInfo:
        """Limits of the engines: the sequences are those of all replicas that run now."""
        info, host = super().info, cast(RayHost | None, self._host)
        replicas = 0 if host is None else len(host.replicas)
        return replace(info, sequences=info.sequences * max(1, replicas))

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the model."""
        return self.info.model

    def _load_warm(self, progress: ProgressCallback | None) -> LlamaModel:
        return LlamaModel.load(self.spec.path, ModelSettings(vocab_only=True), progress=progress)

    def _activate(self, progress: ProgressCallback | None) -> None:
        host = RayHost(self._handle, ENGINE_DEPLOYMENT)
        self._info = host.call(remote_calls.get_engine_info)
        self._model = self._model or self._load_warm(progress)
        self._host = host

    def _restart(self, crashed: EngineHost) -> None: ...

    def _deactivate(self, store_timeout: float) -> StoreReport | None:
        self._stop_engine()
        return None

    def _stop_engine(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()


def deployment(
    model: str,
    *,
    name: str | None = None,
    server: ServerSettings | None = None,
    policy: Literal["prefix", "round_robin"] = "prefix",
    replica_options: Mapping[str, Any] | None = None,
    sampling_defaults: SamplingOptions | None = None,
    **options: Unpack[LoadOptions],
) -> Application:
    """Build the Ray Serve application of a model: an ingress with the HTTP API, and replicas with engines.

    Args:
        model: Name or path of the model. Every machine needs the file.
        name: Name under which the model is served. None: `model`, or the name of its file.
        server: Settings of the server. `host` and `port` are those of Ray Serve's proxy instead.
        policy: How requests are routed: by `prefix`, or in turn (`round_robin`), for comparisons.
        replica_options: Further options of the deployment of the replicas, e.g. `autoscaling_config` and
            `num_replicas="auto"`, or `ray_actor_options`. By default a replica needs `threads` CPUs, or one.
        sampling_defaults: Sampling options of requests that do not set them, as in `afterglow.load`.
        options: Options of `afterglow.load` for each replica. `replicas` is their number, by default 2.

    Run it with `ray.serve.run(deployment("smollm2", replicas=2, shared_cache="/mnt/prefixes"))`.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    check_options(LoadOptions, options)
    check_options(SamplingOptions, sampling_defaults or {})
    engine_options: LoadOptions = {**options, "replicas": 1}
    settings = server or ServerSettings()  # type: ignore[call-arg]

    router = RequestRouterConfig(
        request_router_class=ROUTER,
        request_router_kwargs={"policy": policy},
        request_routing_stats_period_s=STATS_PERIOD_SECONDS,
    )
    engine = serve.deployment(
        EngineReplica,
        name=ENGINE_DEPLOYMENT,
        **{
            "num_replicas": options.get("replicas", DEFAULT_REPLICAS),
            "max_ongoing_requests": MAX_ONGOING_REQUESTS,
            "request_router_config": router,
            "graceful_shutdown_timeout_s": settings.shutdown_seconds,
            "ray_actor_options": {"num_cpus": options.get("threads") or 1},
            **(replica_options or {}),
        },
    )
    served_name = name or (Path(model).stem if model.endswith(".gguf") else model)

    def build_app() -> Any:  # Serve calls functions, and takes other callables for applications
        return build_ingress(model, served_name, settings, engine_options, sampling_defaults)

    ingress = serve.deployment(
        serve.ingress(build_app)(),
        name="ingress",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        # A request that waits in a replica until that is stopped is sent to another one: the ingress outlives them.
        graceful_shutdown_timeout_s=MAX_ATTEMPTS * settings.shutdown_seconds + INGRESS_EXTRA_SECONDS,
        ray_actor_options={"num_cpus": 0},  # it waits for replicas most of the time
    )
    return ingress.bind(engine.bind(model, engine_options))


def build(arguments: dict[str, Any]) -> Application:
    """Build the application from the `args` of a Serve config file: the arguments of `deployment`.

    `server` is a table of server settings.
    """
    arguments = dict(arguments)
    if "server" in arguments:
        arguments["server"] = ServerSettings(**arguments["server"])
    return deployment(**arguments)


def build_ingress(
    model: str,
    name: str,
    settings: ServerSettings,
    options: LoadOptions,
    sampling_defaults: SamplingOptions | None = None,
) -> Any:
    """Build the ASGI application of an ingress replica. The model is opened by its first request."""
    from ray import serve

    app_name = serve.get_replica_context().app_name
    handle = serve.get_deployment_handle(ENGINE_DEPLOYMENT, app_name=app_name)
    served = ServedModel(
        functools.partial(open_model, model, name, settings, options, handle, sampling_defaults),
        adapters=tuple(check_options(LoadOptions, options)["adapters"]),
    )
    state = ServerState(ModelRegistry({name: served}, aliases=settings.aliases), settings)
    application, _ = build_application(state)
    return application


def open_model(
    model: str,
    name: str,
    settings: ServerSettings,
    options: LoadOptions,
    handle: Any,
    sampling_defaults: SamplingOptions | None = None,
) -> Model:
    """Open a model whose engines are on the cluster."""
    checked = check_options(LoadOptions, options)
    path = registry.resolve(model)
    engine_settings = build_engine_settings(None, checked, options, label=str(path))
    lifecycle = ClusterLifecycle(EngineSpec(path=path, engine_settings=engine_settings), handle)
    with contextlib.ExitStack() as stack:
        stack.callback(lifecycle.close)
        lifecycle.activate()
        stack.pop_all()
    return Model(
        lifecycle,
        name,
        chat_template=read_chat_template(checked["chat_template"]),
        media_policy=settings.media_policy,
        sampling_defaults=check_options(SamplingOptions, sampling_defaults or {}),
        strip_media=checked["strip_media"],
        replay=checked["replay"],
        shorten_embeddings=checked["shorten_embeddings"],
        reranker=checked["reranker"],
    )
