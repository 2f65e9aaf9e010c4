"""Runs the server: listening socket, startup, and shutdown that lets running requests finish."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from afterglow.errors import InvalidArgument
from afterglow.server.app import build_application
from afterglow.server.auth import AuthMiddleware
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState

FINAL_EVENT_SECONDS = 2.0  # time for cancelled requests to send their last event
DRAIN_POLL_SECONDS = 0.05
SOCKET_BACKLOG = 1024  # pending connections


class Server(uvicorn.Server):
    """uvicorn with a graceful shutdown in three steps.

    After the first SIGTERM or SIGINT, new requests get 503. Running requests may finish within `shutdown_seconds`. Then
    the engines are closed. A second signal skips the wait.
    """

    def __init__(
        self, config: uvicorn.Config, state: ServerState, middleware: AuthMiddleware, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._state = state
        self._middleware = middleware
        self._on_ready = on_ready
        self._signal_count = 0
        self._drain_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections, install signal handlers and call `on_ready`."""
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_signal)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._on_signal)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal that arrives before startup is complete."""
        self.should_exit = True

    def _on_signal(self) -> None:
        self._signal_count += 1
        self._middleware.is_shutting_down = True
        if self._drain_task is None:
            self._drain_task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Wait for running requests, then close the engines, which ends the remaining requests."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._state.settings.shutdown_seconds
        while self._middleware.active_requests and self._signal_count < 2 and loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        await asyncio.to_thread(self._state.close)
        self.should_exit = True


def bind(settings: ServerSettings) -> socket.socket:
    """Return a listening socket. Raises `InvalidArgument` if the address is not available."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise InvalidArgument("port", f"cannot listen on {settings.host}:{settings.port}: {error}") from None
    listener.listen(SOCKET_BACKLOG)
    return listener


def serve(state: ServerState, listener: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serve until a signal ends the server, then release all resources."""
    app, middleware = build_application(state)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(FINAL_EVENT_SECONDS),
        backlog=SOCKET_BACKLOG,
    )
    try:
        Server(config, state, middleware, on_ready).run(sockets=[listener])
    finally:
        state.close()
        listener.close()
