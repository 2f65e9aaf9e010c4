"""Message pipe between a process and its child, over a socket: framing, a sender thread, and a listener.

Each message is pickled and preceded by its length. The pipe does not know what the messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

MESSAGE_LENGTH = struct.Struct("<Q")
MAX_READ_BYTES = 64 * 1024  # one system call reads most messages


class MessagePipe:
    """One end of the pipe. One thread may send while another receives.

    >>> parent, child = socket.socketpair()
    >>> with parent, child:
    ...     MessagePipe(parent).send(("ping", 1))
    ...     MessagePipe(child).receive()
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
        """Send one message. Raises `OSError` if the other end is closed."""
        self.send_bytes(encode_message(message))

    def send_bytes(self, unsent: memoryview) -> None:
        """Send an encoded message or the rest of one. Raises `OSError` if the other end is closed."""
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent) :]
            except BlockingIOError:  # event loops make the sockets that they read from non-blocking
                self._write_poll.poll()

    def send_available(self, unsent: memoryview) -> memoryview:
        """Send what the socket accepts now, and return the rest. Never blocks or raises."""
        try:
            return unsent[self._socket.send(unsent, socket.MSG_DONTWAIT) :]
        except OSError:  # it is full, or the other end is closed
            return unsent

    def wait(self, seconds: float) -> bool:
        """Wait for data; return whether any arrived in time."""
        return bool(self._read_poll.poll(1000 * seconds))

    def receive(self, *, blocking: bool = True) -> list[Any]:
        """Return the messages that are complete, after at most one read. Raises `EOFError` at the end of the stream."""
        try:
            data = self._socket.recv(MAX_READ_BYTES, 0 if blocking else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        self._buffer += data
        messages, start = [], 0
        while start + MESSAGE_LENGTH.size <= len(self._buffer):
            end = start + MESSAGE_LENGTH.size + MESSAGE_LENGTH.unpack_from(self._buffer, start)[0]
            if end > len(self._buffer):
                break
            messages.append(pickle.loads(memoryview(self._buffer)[start + MESSAGE_LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages


def encode_message(message: object) -> memoryview:
    """Return a message as it is sent: its length and its pickle."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return memoryview(MESSAGE_LENGTH.pack(len(data)) + data)


class Outbox:
    """Sends messages in order and never blocks its caller: what cannot be sent at once waits for its own thread.

    >>> parent, child = socket.socketpair()
    >>> with parent, child:
    ...     outbox = Outbox(MessagePipe(parent), on_disconnect=lambda: None)
    ...     outbox.put(("ping", 1))
    ...     outbox.close()
    ...     outbox.join()
    ...     MessagePipe(child).receive()
    [('ping', 1)]
    """

    def __init__(self, pipe: MessagePipe, on_disconnect: Callable[[], None]) -> None:
        """`on_disconnect` is called once on the sender thread if the other end is closed; the thread then ends."""
        self._pipe, self._on_disconnect = pipe, on_disconnect
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()  # a memoryview is encoded, None ends the thread
        self._lock = threading.Lock()
        self._unsent_messages = 0  # in the queue, or being sent by the thread
        self._thread = threading.Thread(target=self._run, name="afterglow-writer", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Queue a message for the thread."""
        with self._lock:
            self._unsent_messages += 1
            self._messages.put(message)

    def send(self, message: object) -> None:
        """Send a message on the thread of the caller. It is queued if others wait or the socket is full."""
        with self._lock:
            unsent = encode_message(message)
            if not self._unsent_messages:
                unsent = self._pipe.send_available(unsent)
            if unsent:
                self._unsent_messages += 1
                self._messages.put(unsent)

    def close(self) -> None:
        """End the thread after the queued messages."""
        self._messages.put(None)

    def join(self) -> None:
        """Wait until all messages are sent or the other end is closed."""
        self._thread.join()

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._pipe.send_bytes(message if isinstance(message, memoryview) else encode_message(message))
            except OSError:
                return self._on_disconnect()
            with self._lock:
                self._unsent_messages -= 1


class MessageListener:
    """Passes each received message to `on_message`, in order. One thread calls `wait` repeatedly.

    If an event loop is attached, messages are read there, where their consumers are. That wakes one thread less per
    token: on two busy cores it saved 1 ms of 10. If the loop is blocked or closed, the waiting thread reads.
    """

    def __init__(self, pipe: MessagePipe, on_message: Callable[..., None]) -> None:
        self._pipe, self._on_message = pipe, on_message
        self._read_lock = threading.Lock()  # held while reading and passing messages on
        self._event_loop: asyncio.AbstractEventLoop | None = None
        # Duplicates of the pipe that event loops watch. A loop must not watch the descriptor of the pipe itself: when
        # that is closed, its number may become that of a client's connection before the loop has noticed.
        self._watched: dict[int, asyncio.AbstractEventLoop] = {}
        self._has_read = False  # whether the event loop has read since the last `wait`
        self._errors: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Read in this event loop from now on; None reads on the waiting thread. May be called from any thread."""
        self._event_loop = loop
        if loop is not None:
            with contextlib.suppress(OSError):  # the pipe is closed; the waiting thread notices
                self._watch(loop, os.dup(self._pipe.fileno()))
        self.release_closed_loops()
        self._errors.put(None)

    def release_closed_loops(self) -> None:
        """Close the descriptors of event loops that have ended. An open loop closes its own when the pipe ends."""
        for descriptor, loop in list(self._watched.items()):
            if loop.is_closed():
                self._release(descriptor)

    def wait(self, seconds: float) -> bool:
        """Wait for messages and pass them on; return whether any arrived in time. Raises read errors."""
        if self._event_loop is None:
            return self._pipe.wait(seconds) and self._read()
        try:
            error = self._errors.get(timeout=seconds)
        except queue.Empty:
            has_read, self._has_read = self._has_read, False
            return has_read or self._read()
        if error is not None:
            raise error
        return False

    def _watch(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._watched[descriptor] = loop
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(loop.add_reader, descriptor, self._on_readable, loop, descriptor)

    def _release(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            os.close(descriptor)

    def _read(self) -> bool:
        """Pass on the available messages without blocking; return whether there were any."""
        with self._read_lock:
            messages = self._pipe.receive(blocking=False)
            for message in messages:
                self._on_message(*message)
        return bool(messages)

    def _on_readable(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        """Read in the event loop; stop watching if the pipe has ended or another loop reads."""
        try:
            if self._event_loop is loop:
                self._has_read = self._read() or self._has_read
                return
        except BaseException as error:  # raised again in `wait`
            self._errors.put(error)
        loop.remove_reader(descriptor)
        self._release(descriptor)
