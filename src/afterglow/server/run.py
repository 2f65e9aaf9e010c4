"""Running a server: the socket, the start, and an end that lets answers finish."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from afterglow.errors import InvalidArgument
from afterglow.server.app import application
from afterglow.server.security import Guard
from afterglow.server.service import Service
from afterglow.server.settings import ServerSettings

LAST_WORDS = 2.0  # seconds for answers that were ended to say so
BACKLOG = 1024  # connections that the kernel keeps for us


class Server(uvicorn.Server):
    """uvicorn with an end in three steps: nothing new is begun, what runs may finish, then the engines go.

    A second signal skips the waiting.
    """

    def __init__(self, config: uvicorn.Config, service: Service, guard: Guard, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._guard = guard
        self._ready = ready
        self._signals = 0
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._end)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Before the loop runs, a signal just ends the start."""
        self.should_exit = True

    def _end(self) -> None:
        self._signals += 1
        self._guard.closing = True
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Wait for what runs; then end the engines, which ends what still does."""
        deadline = asyncio.get_running_loop().time() + self._service.settings.shutdown_seconds
        while self._guard.inside and self._signals < 2 and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._service.close)
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
    listener.listen(BACKLOG)
    return listener


def serve(service: Service, listener: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until told to end by a signal; then nothing is left running."""
    app, guard = application(service)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(LAST_WORDS),
        backlog=BACKLOG,
    )
    try:
        Server(config, service, guard, ready).run(sockets=[listener])
    finally:
        service.close()
        listener.close()
