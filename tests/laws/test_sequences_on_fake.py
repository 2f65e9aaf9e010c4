"""Laws of sequences on the fake backend: forks, prefix coalescing, named slots and snapshots."""

from __future__ import annotations

import pytest

from afterglow.engine.inspect import snapshots
from afterglow.errors import InvalidState, KVCacheFull
from afterglow.llama.sampling import Sampling
from support.play import KINDS, LAYOUTS, Answer, ask, collect, fake, prompt, request
from support.truth import Damaged, check_all, compute_completion, compute_tokens, finish_checked, run_checked

pytestmark = pytest.mark.slow

everywhere = pytest.mark.parametrize(
    ("kind", "kv_unified"), [(kind, kv_unified) for kind in KINDS for kv_unified in LAYOUTS]
)
SYSTEM, QUESTION, OTHER = prompt(40, 1), prompt(15, 2), prompt(17, 3)


@everywhere
def test_engine_tokens_equal_backend_tokens(kind, kv_unified):
    """Compares the reference of the other laws with a backend without an engine."""
    for number, options in enumerate([{}, {"max_tokens": 1}, {"ignore_eos": True, "max_tokens": 40}]):
        req = request("one", prompt(30, number), sampling=Sampling(temperature=0.9, seed=number), **options)
        assert run_checked(fake(kind, kv_unified=kv_unified), req)["one"].tokens == compute_tokens(kind, req)


@everywhere
def test_a_common_prefix_is_prefilled_once_in_chunks(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, batch_cells=16)
    requests = [request(str(n), SYSTEM + prompt(10 + n, 20 + n)) for n in range(3)]
    answers = run_checked(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == compute_tokens(kind, req)
    assert sorted(answer.cached for answer in answers.values()) == [0, 40, 40]


@everywhere
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_prompt_is_repeated_while_its_completion_runs(kind, kv_unified, steps):
    engine = fake(kind, kv_unified=kv_unified)
    answers: dict[str, Answer] = {}
    engine.submit(request("first", SYSTEM, max_tokens=30, ignore_eos=True))
    for _ in range(steps):
        collect(answers, engine)
    again = request("again", SYSTEM)
    engine.submit(again)
    finish_checked(engine, answers)
    assert answers["again"].tokens == compute_tokens(kind, again)


@everywhere
def test_a_busy_sequence_is_forked_at_a_checkpoint(kind, kv_unified):
    """Fork, then restore a checkpoint over the fork: a copy that is applied later would undo the restore."""
    engine = fake(kind, kv_unified=kv_unified)
    settings = {"boundaries": frozenset({40}), "max_tokens": 40, "ignore_eos": True}
    answers: dict[str, Answer] = {}
    engine.submit(request("first", SYSTEM + QUESTION, **settings))
    for _ in range(6):
        collect(answers, engine)
    req = request("second", SYSTEM + OTHER, **settings)
    engine.submit(req)
    finish_checked(engine, answers)
    assert answers["second"].tokens == compute_tokens(kind, req)
    assert answers["second"].cached == 40


@everywhere
def test_a_named_slot_is_used_although_another_holds_the_prompt(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    run_checked(engine, request("first", SYSTEM, sequence=2))
    req = request("second", SYSTEM + OTHER, sequence=1)
    assert run_checked(engine, req)["second"].tokens == compute_tokens(kind, req)
    assert [len(slot) > 0 for slot in engine.prefix_cache.slots] == [False, True, True, False]


@everywhere
def test_a_sequence_is_restored_from_a_snapshot_and_from_a_fork(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, sequences=2)
    first = run_checked(engine, request("first", SYSTEM + QUESTION))["first"]
    snapshot = snapshots.save(engine, snapshots.find_latest(engine))
    snapshots.fork(engine, snapshots.find_latest(engine))
    check_all(engine)
    assert [len(slot) for slot in engine.prefix_cache.slots] == [len(snapshot.entries)] * 2
    snapshots.clear(engine)
    check_all(engine)
    assert ask(engine, OTHER, sequence=0).cached == 0
    snapshots.load(engine, snapshot)
    check_all(engine)
    req = request("second", [*SYSTEM, *QUESTION, *first.tokens, 7])
    second = run_checked(engine, req)["second"]
    assert (second.cached, second.tokens) == (len(snapshot.entries), compute_tokens(kind, req))


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_loaded_into_a_unified_kv_cache_that_idle_sequences_fill(kind):
    engine = fake(kind, kv_unified=True, cells_per_sequence=200, total_cells=200)
    first = run_checked(engine, request("first", prompt(80, 4)))["first"]
    snapshot = snapshots.save(engine)
    run_checked(engine, request("second", prompt(70, 5)))
    number = snapshots.load(engine, snapshot)
    check_all(engine)
    assert len(engine.prefix_cache.slots[number]) == len(snapshot.entries)
    again = request("again", [*prompt(80, 4), *first.tokens, 7])
    answer = run_checked(engine, again)["again"]
    assert (answer.cached, answer.tokens) == (len(snapshot.entries), compute_tokens(kind, again))


def test_a_snapshot_that_never_fits_evicts_nothing():
    large, small = (fake(kv_unified=True, cells_per_sequence=cells, total_cells=cells) for cells in (200, 100))
    run_checked(large, request("large", prompt(150, 4)))
    run_checked(small, request("small", prompt(50, 5)))
    before = [len(slot) for slot in small.prefix_cache.slots]
    with pytest.raises(KVCacheFull):
        snapshots.load(small, snapshots.save(large))
    assert [len(slot) for slot in small.prefix_cache.slots] == before


@everywhere
def test_a_damaged_snapshot_is_rejected_and_leaves_the_entries_correct(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, sequences=1)
    run_checked(engine, request("first", SYSTEM))
    damaged = snapshots.SavedSequence(snapshots.save(engine, 0).entries, Damaged())
    with pytest.raises(InvalidState):
        snapshots.load(engine, damaged)
    check_all(engine)
    assert ask(engine, SYSTEM).tokens == compute_completion(kind, SYSTEM)[0]
