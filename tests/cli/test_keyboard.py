"""Signals and the mode of the terminal while a response is written."""

from __future__ import annotations

import os
import pty
import signal
import termios
import time
import tty
from collections.abc import Iterator

import pytest

from afterglow.cli.keyboard import InterruptGuard, exit_on_signals, hold_keys


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Both ends of a pseudo-terminal that is the standard input."""
    keyboard, descriptor = pty.openpty()
    with os.fdopen(descriptor) as stdin, os.fdopen(keyboard, "wb", 0) as keys:
        monkeypatch.setattr("sys.stdin", stdin)
        yield keys.fileno(), descriptor


def test_an_interrupt_does_not_interrupt_the_work_on_an_item() -> None:
    finished = []

    def work() -> None:
        with InterruptGuard() as guard:
            for item in guard.iterate([1, 2, 3]):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0)
                finished.append(item)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert finished == [1]


def test_an_interrupt_ends_the_wait_for_an_item() -> None:
    def wait() -> Iterator[int]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        yield 1

    with pytest.raises(KeyboardInterrupt), InterruptGuard() as guard:
        list(guard.iterate(wait()))


def test_a_second_interrupt_does_not_wait_for_the_work() -> None:
    def work() -> None:
        with InterruptGuard() as guard:
            for _ in guard.iterate([1]):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        work()


def test_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with InterruptGuard(), exit_on_signals(), hold_keys():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_termination_runs_the_cleanup() -> None:
    def work() -> None:
        with exit_on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    with pytest.raises(SystemExit) as caught:
        work()
    assert caught.value.code == 143


def test_a_termination_in_the_change_of_the_terminal_mode_restores_it(terminal: tuple[int, int]) -> None:
    before = termios.tcgetattr(terminal[1])

    def work() -> None:
        with exit_on_signals():
            tty.setraw(terminal[1])  # the line editor restores it only if it is not interrupted here
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    with pytest.raises(SystemExit):
        work()
    assert termios.tcgetattr(terminal[1]) == before


def test_keys_are_not_echoed_while_they_are_held(terminal: tuple[int, int]) -> None:
    before = termios.tcgetattr(terminal[1])
    with hold_keys():
        os.write(terminal[0], b"\r")
        assert os.read(terminal[1], 1) == b"\r"  # at once, and not a newline
        assert not termios.tcgetattr(terminal[1])[3] & termios.ECHO
    assert termios.tcgetattr(terminal[1]) == before


def test_a_terminal_that_was_closed_cannot_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, descriptor = pty.openpty()
    with os.fdopen(descriptor) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with hold_keys():
            os.close(keyboard)
