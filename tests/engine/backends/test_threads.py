"""Threads follow the load of the cores: on simulated machines, and on the real context."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from afterglow.engine.backends import threads
from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.backends.threads import CoreMeter, DecodeTimes, ThreadGovernor
from afterglow.engine.host.build import build_engine
from afterglow.engine.types.backend import DecodeSpan
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models


@dataclass
class Machine:
    """Decodes on simulated cores. If a thread shares its core, the others wait for it, `stall` times as long."""

    cores: int
    threads: int
    stall: float = 2.0
    loops: int = 0
    now: float = 0.0
    used: list[int] = field(default_factory=list)  # threads of each decode

    def __post_init__(self) -> None:
        self.governor = ThreadGovernor(self.threads, self.cores)
        self._observed_at = 0.0

    def decode(self, rows: int = 1) -> None:
        count = self.governor.choose(rows)
        runnable = count + self.loops
        seconds = 0.02 * rows / count * max(1.0, runnable / self.cores)
        if runnable > self.cores and count > 1:
            seconds *= self.stall
        self.now += seconds
        self.used.append(count)
        self.governor.record(rows, seconds, self.now)
        if self.now - self._observed_at >= threads.SAMPLE_SECONDS:
            self._observed_at = self.now
            self.governor.observe(self.loops * min(1.0, self.cores / runnable), self.now)

    def run(self, seconds: float, *, loops: int, rows: int = 1) -> list[int]:
        """Decode beside loops and return the threads of each decode."""
        self.loops, self.used, end = loops, [], self.now + seconds
        while self.now < end:
            self.decode(rows)
        return self.used


@pytest.mark.parametrize("cores", [2, 4, 8, 16])
def test_all_threads_are_used_on_quiet_cores_and_no_trial_runs(cores):
    machine = Machine(cores=cores, threads=cores)
    assert set(machine.run(60, loops=0)) == {cores}
    assert machine.governor.trials == 0


@pytest.mark.parametrize(("cores", "loops"), [(2, 1), (8, 1), (8, 3), (16, 6)])
def test_busy_programs_keep_their_cores_within_two_seconds(cores, loops):
    machine = Machine(cores=cores, threads=cores)
    machine.run(1, loops=0)
    machine.run(2, loops=loops)
    used = machine.run(30, loops=loops)
    assert sum(count == cores - loops for count in used) >= 0.9 * len(used)


def test_all_threads_are_used_again_when_the_busy_program_ends():
    machine = Machine(cores=2, threads=2)
    machine.run(5, loops=1)
    assert machine.used[-1] == 1
    machine.run(1, loops=0)
    assert machine.used[-1] == 2


def test_fewer_threads_are_only_tried_if_they_are_slower():
    machine = Machine(cores=2, threads=2, stall=1.2)
    used = machine.run(120, loops=1)
    assert sum(count == 2 for count in used) >= 0.95 * len(used)
    assert machine.governor.trials >= 3


def test_a_change_of_the_load_is_tried_at_once():
    machine = Machine(cores=2, threads=2, stall=1.2)
    machine.run(60, loops=1)
    machine.stall = 5.0
    machine.run(1.5, loops=2)
    assert machine.used[-1] == 1


def test_cores_beyond_the_threads_are_left_to_other_programs_first():
    machine = Machine(cores=16, threads=8)
    assert set(machine.run(10, loops=8)) == {8}
    assert machine.governor.trials == 0


def test_prefill_uses_all_threads_beside_busy_programs():
    machine = Machine(cores=2, threads=2)
    machine.run(5, loops=1)
    assert machine.governor.choose(rows=1) == 1
    assert machine.governor.choose(rows=256) == 2


def test_decodes_of_different_sizes_are_compared_size_by_size():
    fewer = DecodeTimes(deque([(1, 0.01), (8, 0.04), (8, 0.04)]))
    all_threads = DecodeTimes(deque([(8, 0.08), (2, 0.01)]))
    assert fewer.compare(all_threads) == pytest.approx(0.5)
    assert fewer.compare(DecodeTimes()) is None


def test_one_thread_stays_one_thread():
    machine = Machine(cores=2, threads=1)
    assert set(machine.run(10, loops=2)) == {1}


@pytest.fixture
def backend() -> Iterator[LlamaBackend]:
    settings = ContextSettings(cells=256, threads=2)
    with LlamaModel.load(models.get_path("attention"), trust=True) as model, LlamaContext(model, settings) as context:
        yield LlamaBackend(context)


@pytest.fixture
def busy_cores(monkeypatch):
    """Other programs use one core, and every trial finds that it saves half of the time."""
    monkeypatch.setattr(CoreMeter, "measure", lambda meter: meter.cores - 1.0)
    monkeypatch.setattr(DecodeTimes, "compare", lambda times, other: 0.5)
    monkeypatch.setattr(threads, "SAMPLE_SECONDS", 0.0)


def count_threads_after_decodes(backend: LlamaBackend) -> int:
    for position in range(40):
        backend.decode([DecodeSpan(0, [5], position, 1)])
    return int(get_library().symbols.llama_n_threads(backend.context.pointer))


@pytest.mark.native
def test_a_backend_sets_the_threads_of_its_context(backend, busy_cores):
    backend.adapt_threads()
    assert count_threads_after_decodes(backend) == 1


@pytest.mark.native
def test_threads_are_fixed_unless_the_backend_adapts_them(backend, busy_cores):
    assert count_threads_after_decodes(backend) == 2


@pytest.mark.native
def test_threads_are_fixed_if_openmp_is_told_so(backend, busy_cores, monkeypatch):
    monkeypatch.setenv("OMP_DYNAMIC", "false")
    backend.adapt_threads()
    assert count_threads_after_decodes(backend) == 2


@pytest.mark.native
@pytest.mark.parametrize("deterministic", [False, True])
def test_only_deterministic_engines_fix_their_threads(backend, deterministic):
    engine = build_engine(backend.context, EngineSettings(deterministic=deterministic, speculation="off"))
    assert isinstance(engine.backend, LlamaBackend)
    assert engine.backend.adapts_threads is not deterministic
    engine.close()


def test_own_computing_is_no_load_of_other_programs(monkeypatch):
    readings = iter([(0.0, 10.0, 5.0), (1.0, 10.5, 5.5)])  # time, idle and own seconds
    monkeypatch.setattr(CoreMeter, "_read", lambda meter: next(readings))
    meter = CoreMeter()
    assert meter.measure() == pytest.approx(meter.cores - 1.0)
