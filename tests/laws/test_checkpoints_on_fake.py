"""Laws of checkpoints and recurrent rollback on the fake backend."""

from __future__ import annotations

import pytest

from afterglow.engine.kvcache.planner import Continue
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from support.play import KINDS, LAYOUTS, fake, prompt, request
from support.truth import compute_tokens, finish_checked, run_checked

pytestmark = pytest.mark.slow
everywhere = pytest.mark.parametrize(
    ("kind", "kv_unified"), [(kind, kv_unified) for kind in KINDS for kv_unified in LAYOUTS]
)
SYSTEM, QUESTION, OTHER = prompt(40, 1), prompt(15, 2), prompt(17, 3)


@everywhere
def test_thinning_keeps_the_first_and_the_newest_checkpoint(kind, kv_unified):
    settings = EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=2))
    engine = fake(kind, settings, kv_unified=kv_unified)
    whole, boundaries = prompt(100, 5), frozenset(range(20, 100, 10))
    run_checked(engine, request("whole", whole, boundaries=boundaries))
    edited = run_checked(engine, request("edited", whole[:92] + OTHER))["edited"]
    assert edited.cached == 92 if kind == "attention" else edited.cached >= 90
    other = run_checked(engine, request("other", whole[:25] + OTHER))["other"]
    assert other.cached >= 20


@everywhere
@pytest.mark.parametrize(("number", "nbytes"), [(3, 10**9), (100, 1500)])
def test_checkpoints_stay_within_their_number_and_bytes(kind, kv_unified, number, nbytes):
    settings = EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=number, max_bytes=nbytes))
    engine = fake(kind, settings, kv_unified=kv_unified)
    run_checked(engine, request("one", prompt(60, 5), boundaries=frozenset(range(5, 60, 5))))
    assert bool(engine.prefix_cache.all_checkpoints) == (kind != "attention")


@everywhere
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_checkpoint_after_an_edit_is_not_used(kind, kv_unified, sequences):
    engine = fake(kind, kv_unified=kv_unified, sequences=sequences)
    run_checked(engine, request("first", SYSTEM + QUESTION, boundaries=frozenset({50})))
    req = request("edited", SYSTEM + QUESTION[:5] + OTHER)
    assert run_checked(engine, req)["edited"].tokens == compute_tokens(kind, req)


@everywhere
def test_a_checkpoint_is_dropped_with_its_cells(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, sequences=1)
    run_checked(engine, request("first", SYSTEM + QUESTION, boundaries=frozenset({40})))
    assert len(engine.prefix_cache.all_checkpoints) == 2 * (kind != "attention")  # and at the end of the prompt
    run_checked(engine, request("second", OTHER))
    assert bool(engine.prefix_cache.all_checkpoints) == (kind != "attention")  # its cells are in the RAM tier
    engine.prefix_cache.clear_store()
    remaining = [checkpoint.position for checkpoint in engine.prefix_cache.all_checkpoints]
    assert remaining == [len(OTHER)] * (kind != "attention")  # of the prompt on the device


@everywhere
def test_a_checkpoint_is_restored_over_its_own_cells_only(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, sequences=2)
    run_checked(engine, request("first", SYSTEM + QUESTION, boundaries=frozenset({40}), sequence=0))
    run_checked(engine, request("another", SYSTEM[:5] + prompt(36, 8), sequence=1, max_tokens=0))
    req = request("second", SYSTEM + OTHER)
    assert run_checked(engine, req)["second"].tokens == compute_tokens(kind, req)


@everywhere
def test_recurrent_rollback_is_limited_to_the_last_decode(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, recurrent_snapshots=3, sequences=1)
    for back in (1, 2, 3):
        run_checked(engine, request("many rows", SYSTEM, use_prefix_cache=False, max_tokens=0))
        edited = request("edited", SYSTEM[:-back] + QUESTION, ignore_eos=True)
        answers = run_checked(engine, edited)
        assert answers["edited"].tokens == compute_tokens(kind, edited)
        assert answers["edited"].cached == 40 - back
        computed = [*edited.entries, *answers["edited"].tokens[: -1 - back]]  # decoded one row at a time
        again = request("again", computed + OTHER)
        assert run_checked(engine, again)["again"].tokens == compute_tokens(kind, again)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_recurrent_rollback_works_once_per_decode(kind):
    engine = fake(kind, recurrent_snapshots=3, sequences=1)
    run_checked(engine, request("first", SYSTEM, max_tokens=0))
    engine.submit(request("back", [*SYSTEM[:-1], 7]))
    engine.cancel("back")
    finish_checked(engine, {})
    slot = engine.prefix_cache.slots[0]
    engine.prefix_cache.acquire(Continue(slot, 39))
    assert not slot.can_resume_at(38)
    engine.prefix_cache.release(slot)
    req = request("further", [*SYSTEM[:-2], 7])
    assert run_checked(engine, req)["further"].tokens == compute_tokens(kind, req)
