"""When an engine begins: at once, unless others are on their way; and when it does what can wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host import thread
from afterglow.engine.host.thread import EngineLoop
from afterglow.engine.types.request import EngineEvent, Finished, Request
from afterglow.testing import FakeBackend


class Running:
    """A loop in a thread, and what came of it."""

    def __init__(self) -> None:
        self.backend = FakeBackend("attention", sequences=4, cells_per_sequence=4096)
        self.engine = Engine(self.backend)
        self.ended: dict[str, float] = {}
        self.loop = EngineLoop(self._take)
        self._thread = threading.Thread(target=self.loop.run, args=(self.engine,))

    def _take(self, events: list[EngineEvent]) -> None:
        self.ended |= {event.request_id: time.monotonic() for event in events if isinstance(event, Finished)}

    def ask(self, id: str, length: int = 3) -> None:
        self.loop.submit(Request(id=id, entries=[5, 6, 7], max_tokens=length, ignore_eos=True, use_prefix_cache=False))

    def start(self) -> None:
        self._thread.start()

    def wait_for(self, *ids: str, seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not set(ids) <= self.ended.keys():
            assert time.monotonic() < deadline, f"only {list(self.ended)} ended"
            time.sleep(0.002)

    def close(self) -> None:
        self.loop.close()
        self._thread.join()
        self.engine.close()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    made.start()
    yield made
    made.close()


def test_a_prompt_waits_for_those_that_are_on_their_way(running, monkeypatch):
    monkeypatch.setattr(thread, "MAX_COALESCE_WAIT_SECONDS", 60.0)
    running.loop.expect_requests(1)
    running.loop.expect_requests(1)
    running.loop.expect_requests(-1)
    running.ask("first")
    time.sleep(0.05)
    assert not running.backend.decode_history
    running.loop.expect_requests(-1)
    running.ask("second")
    running.wait_for("first", "second")
    assert len(running.backend.decode_history[0]) == 2


def test_it_is_given_memory_meanwhile(running, monkeypatch):
    """Storing what a sequence held before takes a while, too."""
    monkeypatch.setattr(thread, "MAX_COALESCE_WAIT_SECONDS", 60.0)
    running.loop.expect_requests(1)
    running.ask("first")
    running.loop.expect_requests(1)
    deadline = time.monotonic() + 5
    while not any(slot.busy for slot in running.engine.memory.slots):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not running.backend.decode_history
    running.loop.expect_requests(-2)
    running.wait_for("first")


def test_one_that_does_not_come_is_not_waited_for(running, monkeypatch):
    monkeypatch.setattr(thread, "MAX_COALESCE_WAIT_SECONDS", 60.0)
    running.loop.expect_requests(1)
    running.ask("first")
    running.loop.expect_requests(-1)
    running.wait_for("first")


def test_nobody_waits_for_long(running):
    running.loop.expect_requests(1)
    running.ask("first")
    running.wait_for("first", seconds=2.0)


def test_nobody_waits_beside_an_answer_that_is_being_written(running, monkeypatch):
    monkeypatch.setattr(thread, "MAX_COALESCE_WAIT_SECONDS", 60.0)
    running.ask("long", 1000)
    while not running.backend.decode_history:
        time.sleep(0.001)
    running.loop.expect_requests(1)
    running.ask("short")
    running.wait_for("long", "short")


def test_more_arrivals_than_announcements_are_none(running, monkeypatch):
    """An engine that was started again has not heard of those that the one before was told of."""
    monkeypatch.setattr(thread, "MAX_COALESCE_WAIT_SECONDS", 60.0)
    running.loop.expect_requests(-1)
    running.ask("first")
    running.wait_for("first")


@pytest.mark.parametrize(("quiet", "tidied"), [(60.0, False), (0.0, True)])
def test_what_can_wait_is_done_once_it_was_quiet(running, monkeypatch, quiet, tidied):
    monkeypatch.setattr(thread, "IDLE_AFTER_SECONDS", quiet)
    tidying = threading.Event()
    monkeypatch.setattr(running.engine, "run_idle_task", lambda: tidying.set())
    running.ask("first")
    running.wait_for("first")
    assert tidying.wait(5.0 if tidied else 0.1) == tidied
    running.ask("second")
    running.wait_for("second")
