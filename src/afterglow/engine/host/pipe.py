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

MESSAGE_LENGTH = struct.Struct("<Q")
MAX_READ_BYTES = 64 * 1024  # bytes that are read at once: one system call for most of what comes


class MessagePipe:
    """One end. One thread may send while another receives.

    >>> here, there = socket.socketpair()
    >>> with here, there:
    ...     Wire(here).send(("ping", 1))
    ...     Wire(there).receive()
    [('ping', 1)]
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._read_poll, self._write_poll = select.poll(), select.poll()
        self._read_poll.register(connection, select.POLLIN)
        self._write_poll.register(connection, select.POLLOUT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send one; `OSError` where nobody is there."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        rest = memoryview(MESSAGE_LENGTH.pack(len(data)) + data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:  # event loops make the sockets that they read from ones that do not wait
                self._write_poll.poll()

    def wait(self, seconds: float) -> bool:
        """Wait so long for something to come; whether it did."""
        return bool(self._read_poll.poll(1000 * seconds))

    def receive(self, *, blocking: bool = True) -> list[Any]:
        """The messages that are complete by now; waits at most for something to come. `EOFError` at the end."""
        try:
            piece = self._socket.recv(MAX_READ_BYTES, 0 if blocking else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not piece:
            raise EOFError
        self._buffer += piece
        messages, at = [], 0
        while at + MESSAGE_LENGTH.size <= len(self._buffer):
            end = at + MESSAGE_LENGTH.size + MESSAGE_LENGTH.unpack_from(self._buffer, at)[0]
            if end > len(self._buffer):
                break
            messages.append(pickle.loads(memoryview(self._buffer)[at + MESSAGE_LENGTH.size : end]))
            at = end
        del self._buffer[:at]
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

    def __init__(self, pipe: MessagePipe, on_disconnect: Callable[[], None]) -> None:
        """`gone` is called, on that thread, where nobody is there any more; then it ends."""
        self._pipe, self._on_disconnect = pipe, on_disconnect
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="afterglow-writer", daemon=True)
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

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._pipe.send(message)
            except OSError:
                return self._on_disconnect()
