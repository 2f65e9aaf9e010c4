"""Keyboard while a response is written: typed keys wait for the next prompt, and Ctrl-C stops the response."""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

ItemT = TypeVar("ItemT")
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
SignalHandler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def restore_terminal_mode() -> Iterator[list[Any] | None]:
    """Restore the mode of the terminal on exit. Yields a copy of the mode; None without a terminal."""
    if sys.stdin is None:  # it is closed
        yield None
        return
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (termios.error, OSError, ValueError):
        yield None
        return
    try:
        yield [*before]
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


@contextlib.contextmanager
def hold_keys() -> Iterator[None]:
    """Do not echo typed keys, because they would break the drawing. The next prompt reads them.

    Ctrl-C still sends SIGINT. Does nothing without a terminal.
    """
    with restore_terminal_mode() as mode:
        if mode is not None:
            mode[0] &= ~termios.ICRNL  # Enter stays a carriage return, as the line editor expects it
            mode[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, mode)
        yield


class InterruptGuard:
    """Context manager in which Ctrl-C stops an iteration, but never interrupts the work on its items.

    >>> with InterruptGuard() as guard:
    ...     list(guard.iterate([1, 2]))
    [1, 2]
    """

    def __init__(self) -> None:
        self._is_requested = False
        self._is_waiting = False

    def __enter__(self) -> InterruptGuard:
        self._previous_handler = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def iterate(self, items: Iterable[ItemT]) -> Iterator[ItemT]:
        """Yield the items. After Ctrl-C, raise `KeyboardInterrupt` instead of the next item, also while waiting."""
        iterator = iter(items)
        while True:
            self._is_waiting = True
            try:
                if self._is_requested:
                    raise KeyboardInterrupt
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._is_waiting = False
            yield item

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_waiting or self._is_requested:  # a second Ctrl-C does not wait for anything
            raise KeyboardInterrupt
        self._is_requested = True


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit`, and restore the mode of the terminal on exit."""

    def exit_process(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    with handle_signals(exit_process), restore_terminal_mode():
        yield


@contextlib.contextmanager
def defer_signals(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Call `stop` when SIGTERM or SIGHUP arrives, and deliver the signal at the end of the block.

    For code that an exception may not interrupt at any place: `stop`, called in the middle of it, asks it to end.
    Yields the signals that have arrived.
    """
    received: list[int] = []

    def record_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        stop()

    try:
        with handle_signals(record_signal):
            yield received
    finally:
        if received:
            signal.raise_signal(received[0])


@contextlib.contextmanager
def handle_signals(handler: SignalHandler) -> Iterator[None]:
    """Call a handler for SIGTERM and SIGHUP."""
    previous = {number: signal.signal(number, handler) for number in EXIT_SIGNALS}
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)
