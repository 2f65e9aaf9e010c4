"""Engine loop: idle tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host import loop
from afterglow.engine.host.loop import EngineLoop
from afterglow.engine.types.request import EngineEvent, Finished, Request
from afterglow.testing import FakeBackend


class RunningLoop:
    """An engine loop in a thread, and the times at which its requests ended."""

    def __init__(self) -> None:
        self.backend = FakeBackend("attention", sequences=4, cells_per_sequence=4096)
        self.engine = Engine(self.backend)
        self.ended: dict[str, float] = {}
        self.loop = EngineLoop(self._record_ends)
        self._thread = threading.Thread(target=self.loop.run, args=(self.engine,))

    def _record_ends(self, events: list[EngineEvent]) -> None:
        self.ended |= {event.request_id: time.monotonic() for event in events if isinstance(event, Finished)}

    def submit(self, id: str, max_tokens: int = 3) -> None:
        self.loop.submit(
            Request(id=id, entries=[5, 6, 7], max_tokens=max_tokens, ignore_eos=True, use_prefix_cache=False)
        )

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
def running() -> Iterator[RunningLoop]:
    running = RunningLoop()
    running.start()
    yield running
    running.close()


@pytest.mark.parametrize(("idle_seconds", "runs"), [(60.0, False), (0.0, True)])
def test_idle_tasks_run_after_an_idle_period(running, monkeypatch, idle_seconds, runs):
    monkeypatch.setattr(loop, "IDLE_AFTER_SECONDS", idle_seconds)
    has_run = threading.Event()
    monkeypatch.setattr(running.engine, "run_idle_task", lambda: has_run.set())
    running.submit("first")
    running.wait_for("first")
    assert has_run.wait(60.0 if runs else 0.1) == runs
    running.submit("second")
    running.wait_for("second")
