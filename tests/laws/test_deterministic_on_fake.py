"""Laws of deterministic mode on a fake backend whose results depend on the batch shape, as floating point does."""

from __future__ import annotations

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.inspect import snapshots
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import InvalidArgument, InvalidState
from support.play import KINDS, Answer, ask, collect, fake, play, prompt, request
from support.truth import run_checked

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


@every_kind
def test_a_job_that_loses_its_kv_cache_does_not_reuse_its_tokens_from_another_prompt(kind):
    """Another prompt has computed the same tokens in chunks, the job computed them one by one."""
    options = {"max_tokens": 30, "ignore_eos": True}
    cold = ask(deterministic_engine(kind), SYSTEM, **options).tokens
    engine = deterministic_engine(kind, sequences=3)
    ask(engine, SYSTEM + cold + OTHER, boundaries=frozenset({48, 56, 64}), ignore_eos=True)
    engine.submit(request("one", SYSTEM, **options))
    answers = {"one": Answer()}
    while len(answers["one"].tokens) < 25:
        collect(answers, engine)
    (running,) = engine._running
    running.sequence.clear()
    engine._requeue(running)
    while engine.is_busy:
        collect(answers, engine)
    assert answers["one"].tokens == cold


@every_kind
def test_an_idle_sequence_and_all_checkpoints_end_on_the_grid(kind):
    engine = deterministic_engine(kind, sequences=2)
    for number in range(6):
        entries = SYSTEM[: 20 + 3 * number] + prompt(9 * number, number)
        run_checked(engine, request("one", entries, boundaries=frozenset({13, 19, 30}), ignore_eos=True))
        assert all(len(slot) % 8 == 0 for slot in engine.prefix_cache.slots)
        assert all(checkpoint.position % 8 == 0 for checkpoint in engine.prefix_cache.all_checkpoints)
    assert max(len(slot) for slot in engine.prefix_cache.slots) >= 48


@every_kind
def test_a_snapshot_is_reused_with_the_same_grid_only(kind):
    engine = deterministic_engine(kind)
    cold = ask(engine, SYSTEM + QUESTION, boundaries=frozenset({50}), ignore_eos=True).tokens
    snapshot = snapshots.save(engine)
    other = deterministic_engine(kind)
    snapshots.load(other, snapshot)
    answer = ask(other, SYSTEM + QUESTION, ignore_eos=True)
    assert (answer.tokens, answer.cached) == (cold, 48)
    with pytest.raises(InvalidState, match=r"grid 8: .* grid 16"):
        snapshots.load(fake(kind, EngineSettings(deterministic=True, grid=16)), snapshot)
    plain = fake(kind)
    snapshots.load(plain, snapshot)
    assert ask(plain, SYSTEM + QUESTION).cached == 48
    with pytest.raises(InvalidState, match=r"deterministic mode off: .* grid 8"):
        snapshots.load(engine, snapshots.save(plain))


def test_a_snapshot_of_less_than_a_chunk_is_rejected():
    engine = deterministic_engine("attention")
    ask(engine, SYSTEM[:7])
    with pytest.raises(InvalidArgument, match="full chunks of 8 entries"):
        snapshots.save(engine)
