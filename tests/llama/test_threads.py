"""Compute threads follow the cores that other processes leave free."""

from __future__ import annotations

import pytest

from afterglow.errors import InvalidArgument
from afterglow.llama import threads
from afterglow.llama.settings import ContextSettings
from afterglow.llama.threads import AdaptiveThreads, CpuSample, choose_threads

START = CpuSample(100.0, 50.0, 10.0)


def sample(*, idle: float, own: float, seconds: float = 1.0) -> CpuSample:
    """CPU times after `seconds`, with so many cores idle and so many used by this process."""
    return CpuSample(
        START.wall_seconds + seconds, START.idle_seconds + idle * seconds, START.own_seconds + own * seconds
    )


@pytest.mark.parametrize(
    ("idle", "own", "expected"),
    [
        (0.0, 2.0, 2),  # this process uses both cores
        (2.0, 0.0, 2),  # nothing runs
        (1.0, 1.0, 2),  # a thread waits, its core is idle
        (0.0, 1.6, 2),  # a client needs less than half a core
        (0.0, 1.3, 1),  # one busy process takes its share of two cores
        (0.0, 1.0, 1),  # two busy processes
        (0.0, 0.1, 1),  # at least one thread
    ],
)
def test_threads_are_the_cores_that_others_do_not_use(idle: float, own: float, expected: int) -> None:
    assert choose_threads(2, START, sample(idle=idle, own=own)) == expected


def test_idle_cores_beyond_the_maximum_are_not_used() -> None:
    assert choose_threads(4, START, sample(idle=14.0, own=1.0)) == 4


def test_the_length_of_the_window_does_not_matter() -> None:
    assert choose_threads(8, START, sample(idle=0.0, own=6.0, seconds=0.25)) == 6


def test_threads_go_down_beside_a_busy_process_and_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [START]
    monkeypatch.setattr(threads, "read_cpu_sample", lambda: now[0])
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0].wall_seconds)
    adaptive = AdaptiveThreads(2)

    now[0] = sample(idle=0.0, own=1.2)
    assert adaptive.poll() == 1
    assert adaptive.poll() is None, "within the interval nothing is measured"

    busy = now[0]
    now[0] = CpuSample(busy.wall_seconds + 1, busy.idle_seconds, busy.own_seconds + 1)
    assert adaptive.poll() is None, "one core is left: nothing changes"

    free = now[0]
    now[0] = CpuSample(free.wall_seconds + 1, free.idle_seconds + 1, free.own_seconds + 1)
    assert adaptive.poll() == 2


@pytest.mark.native
def test_a_context_computes_with_the_chosen_threads(open_context, monkeypatch: pytest.MonkeyPatch) -> None:
    context = open_context("attention", threads=2, adaptive_threads=True)
    used: list[tuple[int, int]] = []
    monkeypatch.setattr(type(context), "set_threads", lambda self, *counts: used.append(counts))
    monkeypatch.setattr(AdaptiveThreads, "poll", lambda self: 1)
    context.batch.add([1], position=0, sequence=0, outputs=1)
    context.decode()
    assert used == [(1, 1)]


def test_adaptive_threads_need_a_maximum() -> None:
    with pytest.raises(InvalidArgument, match="needs `threads`"):
        ContextSettings(adaptive_threads=True)
