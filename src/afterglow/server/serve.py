"""Runs the server: listening socket, startup, and shutdown that lets running requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import gc
import signal
import socket
import struct
import sys
import termios
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from afterglow.errors import InvalidArgument
from afterglow.server.app import build_application
from afterglow.server.auth import AuthMiddleware
from afterglow.server.logs import logger
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState

FINAL_EVENT_SECONDS = 2.0  # time for cancelled requests to send their last event
DRAIN_POLL_SECONDS = 0.05
SOCKET_BACKLOG = 1024  # pending connections
STALL_CHECKS = 8  # within `stall_seconds`
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, 0 seconds


class Connection(HttpToolsProtocol):
    """HTTP connection that is aborted if its client accepts no data for `stall_seconds`.

    uvicorn stops writing while a client does not read, but it waits without limit. Aborting looks like a disconnect to
    the routes, so the request is cancelled.
    """

    def __init__(self, *, stall_seconds: float, on_stall: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._unsent_bytes = 0  # at the last progress
        self._last_progress = 0.0
        self._stall_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Called when too many bytes wait for the client."""
        super().pause_writing()
        self._watch_progress()

    def resume_writing(self) -> None:
        """Called when the client has read enough."""
        super().resume_writing()
        self._stop_watching()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; the rest of its last response must make progress."""
        super().timeout_keep_alive_handler()
        self._watch_progress()

    def on_response_complete(self) -> None:
        """Called when a response is complete; if the connection ends with it, the rest must make progress."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_progress()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed. uvicorn's timer of idle connections survives a reset by the client."""
        self._stop_watching()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _watch_progress(self) -> None:
        self._stop_watching()
        self._unsent_bytes, self._last_progress = count_unsent_bytes(self.transport), self.loop.time()
        self._check_later()

    def _check_later(self) -> None:
        self._stall_timer = self.loop.call_later(self._stall_seconds / STALL_CHECKS, self._check_progress)

    def _check_progress(self) -> None:
        unsent, now = count_unsent_bytes(self.transport), self.loop.time()
        if unsent < self._unsent_bytes:
            self._unsent_bytes, self._last_progress = unsent, now
        if not unsent:
            self._stop_watching()
        elif now - self._last_progress >= self._stall_seconds:
            self._on_stall()
            self._reset()
        else:
            self._check_later()

    def _reset(self) -> None:
        """Close the connection and drop what the operating system has buffered for it."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.transport.abort()

    def _stop_watching(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        self._stall_timer = None


def count_unsent_bytes(transport: asyncio.Transport) -> int:
    """Count the bytes that the client has not received: in the transport and, on Linux, in the operating system."""
    unsent = transport.get_write_buffer_size()
    if sys.platform == "linux":
        descriptor = transport.get_extra_info("socket").fileno()
        unsent += int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return unsent


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
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        gc.freeze()  # the application lives as long as the process: collections beside streams need not visit it
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal that arrives before startup is complete."""
        self.should_exit = True

    def _on_signal(self, number: signal.Signals) -> None:
        self._signal_count += 1
        self._middleware.is_shutting_down = True
        self._state.events.close()
        active = self._middleware.active_requests
        if self._signal_count == 1:
            seconds = self._state.settings.shutdown_seconds
            running = f"; {active} running requests may take {seconds:g} s more" if active else ""
            logger.info("%s: stopping%s", number.name, running)
        else:
            logger.info("%s again: ending %d running requests", number.name, active)
        if self._drain_task is None:
            self._drain_task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Wait for running requests, then close the engines, which ends the remaining requests."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._state.settings.shutdown_seconds
        while self._middleware.active_requests and self._signal_count < 2 and loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        await asyncio.to_thread(self._state.close)
        logger.info("stopped")
        self.should_exit = True


def bind(settings: ServerSettings) -> socket.socket:
    """Return a listening socket. Raises `InvalidArgument` if the address is not available."""
    return _bind(settings.host, settings.port, "port", "")


def bind_ollama(settings: ServerSettings) -> socket.socket | None:
    """Return a second listening socket on Ollama's port if the settings ask for it.

    Raises `InvalidArgument` if the address is not available.
    """
    if not settings.ollama:
        return None
    return _bind(settings.host, settings.ollama_port, "ollama_port", "; if Ollama is running, stop it first")


def _bind(host: str, port: int, setting: str, advice: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(SOCKET_BACKLOG)
            stack.pop_all()
            return listener
    except OSError as error:
        raise InvalidArgument(setting, f"cannot listen on {host}:{port}: {error}{advice}") from None


def serve(
    state: ServerState,
    listener: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
    *,
    ollama_listener: socket.socket | None = None,
) -> None:
    """Serve until a signal ends the server, then release all resources."""
    listeners = [listener] if ollama_listener is None else [listener, ollama_listener]
    if ollama_listener is not None:
        state.ollama_port = ollama_listener.getsockname()[1]
    app, middleware = build_application(state)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=int(FINAL_EVENT_SECONDS),
        backlog=SOCKET_BACKLOG,
        http=functools.partial(  # type: ignore[arg-type]
            Connection,
            stall_seconds=state.settings.stall_seconds,
            on_stall=state.metrics.stalled_connections.inc,
        ),
    )
    try:
        Server(config, state, middleware, on_ready).run(sockets=listeners)
    finally:
        state.close()
        for opened in listeners:
            opened.close()
