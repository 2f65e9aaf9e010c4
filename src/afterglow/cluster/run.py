"""`afterglow serve --ray`: runs the application of one model on a Ray cluster until a signal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from importlib.util import find_spec

from afterglow.api.options import LoadOptions
from afterglow.cluster.application import deployment
from afterglow.errors import InvalidArgument
from afterglow.server.settings import ServerSettings

APPLICATION = "afterglow"


def serve_on_ray(
    model: str,
    name: str,
    address: str,
    settings: ServerSettings,
    options: LoadOptions,
    on_ready: Callable[[str], None],
) -> None:
    """Serve a model on the cluster at `address` until SIGINT or SIGTERM; `local` starts one on this machine.

    `auto` is the cluster that this machine belongs to. `on_ready` gets the URL of the proxy on this machine.
    """
    if find_spec("ray") is None:
        raise InvalidArgument("--ray", "needs Ray Serve: pip install 'afterglow-llm[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    stopped = threading.Event()
    ray.init(address=None if address == "local" else address, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        serve.run(deployment(model, name=name, server=settings, **options), name=APPLICATION)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        on_ready(f"http://{settings.host}:{settings.port}")
        stopped.wait()
        serve.delete(APPLICATION)
        if address == "local":
            serve.shutdown()
    finally:
        ray.shutdown()
