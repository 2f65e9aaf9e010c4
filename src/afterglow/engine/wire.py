"""Messages between a process and its child, over a socket: each pickled, after its length."""

from __future__ import annotations

import pickle
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("<Q")
PIECE = 64 * 1024  # bytes that are read at once: one system call for most of what comes


class Wire:
    """One end. One thread may send while another receives.

    >>> here, there = socket.socketpair()
    >>> with here, there:
    ...     Wire(here).send(("ping", 1))
    ...     Wire(there).receive()
    [('ping', 1)]
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._arrived = bytearray()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send one; `OSError` where nobody is there."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        rest = memoryview(LENGTH.pack(len(data)) + data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:  # event loops make the sockets that they read from ones that do not wait
                self._writable.poll()

    def wait(self, seconds: float) -> bool:
        """Wait so long for something to come; whether it did."""
        return bool(self._readable.poll(1000 * seconds))

    def receive(self, *, wait: bool = True) -> list[Any]:
        """The messages that are complete by now; waits at most for something to come. `EOFError` at the end."""
        try:
            piece = self._socket.recv(PIECE, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not piece:
            raise EOFError
        self._arrived += piece
        messages, at = [], 0
        while at + LENGTH.size <= len(self._arrived):
            end = at + LENGTH.size + LENGTH.unpack_from(self._arrived, at)[0]
            if end > len(self._arrived):
                break
            messages.append(pickle.loads(memoryview(self._arrived)[at + LENGTH.size : end]))
            at = end
        del self._arrived[:at]
        return messages


class Outbox:
    """Sends messages on a thread of its own, in order: whoever has one to send never waits.

    >>> here, there = socket.socketpair()
    >>> with here, there:
    ...     outbox = Outbox(Wire(here), lambda: None)
    ...     outbox.put(("ping", 1))
    ...     outbox.close()
    ...     outbox.join()
    ...     Wire(there).receive()
    [('ping', 1)]
    """

    def __init__(self, wire: Wire, gone: Callable[[], None]) -> None:
        """`gone` is called, on that thread, where nobody is there any more; then it ends."""
        self._wire, self._gone = wire, gone
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="afterglow-writer", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Have something sent."""
        self._messages.put(message)

    def close(self) -> None:
        """This was all."""
        self._messages.put(None)

    def join(self) -> None:
        """Wait until everything is sent, or nobody is there."""
        self._thread.join()

    def _send(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._wire.send(message)
            except OSError:
                return self._gone()
