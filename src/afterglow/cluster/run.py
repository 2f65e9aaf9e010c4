"""`afterglow serve --ray`: runs the application of one model on a Ray cluster until a signal."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from importlib.util import find_spec

from afterglow.api.options import LoadOptions, SamplingOptions
from afterglow.cluster.application import deployment
from afterglow.errors import InvalidArgument
from afterglow.server.settings import ServerSettings

APPLICATION = "afterglow"
CONNECT_TIMEOUT_SECONDS = 5.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve_on_ray(
    model: str,
    name: str,
    address: str,
    settings: ServerSettings,
    options: LoadOptions,
    sampling_defaults: SamplingOptions,
    on_ready: Callable[[str], None],
) -> None:
    """Serve a model on the cluster at `address` until SIGINT or SIGTERM; a second signal does not wait for requests.

    `auto` is the cluster that this machine belongs to, `local` a new one, and the empty text the first of both that is
    possible. `on_ready` gets the URL of the proxy on this machine.
    """
    if find_spec("ray") is None:
        raise InvalidArgument("--ray", "needs Ray Serve: pip install 'afterglow-llm[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    stopped = threading.Event()
    is_own = connect(address)
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        application = deployment(model, name=name, server=settings, sampling_defaults=sampling_defaults, **options)
        serve.run(application, name=APPLICATION)
        handlers = {number: signal.signal(number, lambda *_: stopped.set()) for number in STOP_SIGNALS}
        on_ready(f"http://{settings.host}:{settings.port}")
        stopped.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        serve.delete(APPLICATION)
        if is_own:
            serve.shutdown()
    finally:
        ray.shutdown()


def connect(address: str) -> bool:
    """Connect to the cluster at an address; return whether it was started for this, and ends with this process."""
    import ray

    is_found = address != "local" and is_reachable(address or "auto")
    if address not in ("", "local") and not is_found:
        raise InvalidArgument("--ray", f"there is no Ray cluster at {address!r}")
    if is_found:
        ray.init(address=address or "auto", log_to_driver=False)
    else:
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    return not is_found


def is_reachable(address: str) -> bool:
    """Whether a cluster accepts connections. If it does not, e.g. one that has stopped, Ray would end this process."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        host, _, port = (canonicalize_bootstrap_address(address) or "").rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True
