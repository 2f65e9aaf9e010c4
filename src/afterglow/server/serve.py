"""Running a server: the socket, the start, and an end that lets answers finish."""

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

FINAL_EVENT_SECONDS = 2.0  # seconds for answers that were ended to say so
SOCKET_BACKLOG = 1024  # connections that the kernel keeps for us


class Server(uvicorn.Server):
    """uvicorn with an end in three steps: nothing new is begun, what runs may finish, then the engines go.

    A second signal skips the waiting.
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
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_signal)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._on_signal)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Before the loop runs, a signal just ends the start."""
        self.should_exit = True

    def _on_signal(self) -> None:
        self._signal_count += 1
        self._middleware.is_shutting_down = True
        if self._drain_task is None:
            self._drain_task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Wait for what runs; then end the engines, which ends what still does."""
        deadline = asyncio.get_running_loop().time() + self._state.settings.shutdown_seconds
        while (
            self._middleware.active_requests and self._signal_count < 2 and asyncio.get_running_loop().time() < deadline
        ):
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._state.close)
        self.should_exit = True


def bind(settings: ServerSettings) -> socket.socket:
    """The socket to listen on; `InvalidArgument` where it cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise InvalidArgument("port", f"{settings.host}:{settings.port} cannot be listened on: {error}") from None
    listener.listen(SOCKET_BACKLOG)
    return listener


def serve(state: ServerState, listener: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serve until told to end by a signal; then nothing is left running."""
    app, guard = build_application(state)
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
        Server(config, state, guard, on_ready).run(sockets=[listener])
    finally:
        state.close()
        listener.close()
