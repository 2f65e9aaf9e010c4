"""Ctrl-C during an iteration: never in the work on an item, always before the next one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from afterglow.cli.keyboard import InterruptGuard, exit_on_signals, hold_keys


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
