"""Laws of deterministic mode on a fake backend whose results depend on the batch shape, as floating point does."""

from __future__ import annotations

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from support.play import KINDS, ask, fake, play, prompt, request

every_kind = pytest.mark.parametrize("kind", KINDS)
SYSTEM, QUESTION, OTHER = prompt(40, 1), prompt(15, 2), prompt(17, 3)


def deterministic_engine(kind: str, **options: object) -> Engine:
    settings = EngineSettings(deterministic=True, grid=8, checkpoints=CheckpointSettings(min_gap=8, min_tokens=8))
    return fake(kind, settings, simulate_rounding=True, **options)


@every_kind
def test_the_batch_shape_changes_tokens_without_deterministic_mode(kind):
    shapes = [
        ask(fake(kind, simulate_rounding=True, batch_cells=size), SYSTEM, ignore_eos=True).tokens for size in (64, 7)
    ]
    assert shapes[0] != shapes[1]


@every_kind
def test_cold_warm_restored_forked_and_concurrent_runs_give_the_same_tokens(kind):
    boundaries = frozenset({13, 40, 50})
    first = ask(deterministic_engine(kind), SYSTEM + QUESTION, boundaries=boundaries, ignore_eos=True)
    prompts = {
        "again": SYSTEM + QUESTION,
        "second turn": SYSTEM + QUESTION + first.tokens + OTHER,
        "edited": SYSTEM + QUESTION[:11] + OTHER,
        "new": SYSTEM + OTHER,
        "short": SYSTEM[:9],
    }
    requests = [request(name, req, boundaries=boundaries, ignore_eos=True) for name, req in prompts.items()]
    cold = {req.id: ask(deterministic_engine(kind), req.entries, ignore_eos=True).tokens for req in requests}
    engine = deterministic_engine(kind)
    assert ask(engine, SYSTEM + QUESTION, boundaries=boundaries, ignore_eos=True).tokens == first.tokens
    for req in requests:
        assert play(engine, req)[req.id].tokens == cold[req.id], req.id
    together = play(engine, *requests)
    assert {id: answer.tokens for id, answer in together.items()} == cold
    assert engine.counters.max_batch_jobs == 1
    assert together["second turn"].cached > 0
    fresh = play(deterministic_engine(kind), *requests)
    assert {id: answer.tokens for id, answer in fresh.items()} == cold
    assert {answer.cached % 8 for answer in [*together.values(), *fresh.values()]} == {0}
