"""What is computed does not depend on how noisy the machine is: the cost model ignores interrupted transfers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache import cost_model
from afterglow.engine.types.settings import EngineSettings
from afterglow.testing import FakeBackend
from support.play import ask, prompt

SECONDS_PER_ENTRY = 0.004
SECONDS_PER_BYTE = 0.5e-9
INTERRUPTION_SECONDS = 0.03
CELL_BYTES = 3_000
PARTIAL_STATE_BYTES = 4_200_000


class TimedBackend(FakeBackend):
    """Small hybrid model on a simulated machine. If it is busy, others take the cores during every second transfer."""

    is_busy = True

    def __init__(self, **options: object) -> None:
        super().__init__("hybrid", **options)  # type: ignore[arg-type]
        self.now = 0.0
        self.transfers = 0

    def decode(self, spans):
        self.now += SECONDS_PER_ENTRY * sum(len(span.entries) for span in spans)
        super().decode(spans)

    def get_state_size(self, sequence, scope):
        cells = len(self._kv_caches[sequence].cells)
        return PARTIAL_STATE_BYTES + (CELL_BYTES * cells if scope == "full" else 0)

    def save(self, sequence, scope, *, long_lived=False):
        state = super().save(sequence, scope, long_lived=long_lived)
        self._transfer(state.nbytes)
        return state

    def assemble_state(self, layout, blocks, partial, position):
        state = super().assemble_state(layout, blocks, partial, position)
        return replace(state, nbytes=PARTIAL_STATE_BYTES + CELL_BYTES * sum(map(len, blocks)))

    def load(self, sequence, state):
        self._transfer(state.nbytes)
        super().load(sequence, state)

    def _transfer(self, nbytes: int) -> None:
        self.transfers += 1
        self.now += nbytes * SECONDS_PER_BYTE + INTERRUPTION_SECONDS * (self.is_busy and self.transfers % 2 == 0)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch):
    backend = TimedBackend(sequences=4, cells_per_sequence=512, batch_cells=256)
    monkeypatch.setattr(time, "perf_counter", lambda: backend.now)
    monkeypatch.setattr(cost_model, "MIN_MEASURED_BYTES", 1)  # the blocks of a fake are small
    engine = Engine(backend, EngineSettings(block_size=16, ram_cache_bytes=10**9))
    yield engine
    engine.close()


def ask_eight(engine: Engine) -> list[list[int]]:
    """Start eight conversations with one system prompt; return their histories."""
    histories: list[list[int]] = []
    for number in range(8):
        entries = [*prompt(138, 0), *prompt(14, 1 + number)]
        answer = ask(engine, entries, max_tokens=2, boundaries=frozenset({138}), ignore_eos=True)
        assert len(entries) - answer.cached == (14 if number else len(entries))
        histories.append(entries + answer.tokens)
    return histories


def test_conversations_that_alternate_on_a_busy_machine_are_computed_once(engine):
    """More conversations than slots, with one system prompt. The second turn computes the new message only."""
    for number, history in enumerate(ask_eight(engine)):
        entries = [*history, *prompt(18, 100 + number)]
        answer = ask(engine, entries, max_tokens=2, boundaries=frozenset({138, len(history)}), ignore_eos=True)
        assert len(entries) - answer.cached == 18 + 1  # the last token of an answer is not in the KV cache


def test_a_transfer_is_measured_with_all_bytes_that_it_moves(engine, monkeypatch):
    """Loading cells with a checkpoint moves both. Measured by the cells alone, it seems ten times as slow."""
    engine.backend.is_busy = False
    measured: list[float] = []
    monkeypatch.setattr(
        engine.prefix_cache.cost_model,
        "record_transfer",
        lambda nbytes, seconds, entries: measured.append(seconds / nbytes),
    )
    ask_eight(engine)
    assert engine.prefix_cache.store.ram.counters.hits
    assert measured == pytest.approx([SECONDS_PER_BYTE] * len(measured))
