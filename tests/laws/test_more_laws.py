"""Laws that take more to see: full memory, cancels inside a decode, snapshots, rollback, pictures, the grid."""

from __future__ import annotations

from contextlib import closing

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.inspect import snapshots
from afterglow.engine.kvcache.planner import Continue
from afterglow.engine.types.entries import Media
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import Cancelled, DecodeFailed, InvalidState, KVCacheFull, PromptTooLong
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support import truth
from support.play import KINDS, LAYOUTS, Answer, ask, collect, fake, play, prompt, request
from support.truth import Damaged, check_all

everywhere = pytest.mark.parametrize(("kind", "shared"), [(kind, shared) for kind in KINDS for shared in LAYOUTS])
every_kind = pytest.mark.parametrize("kind", KINDS)

SYSTEM, QUESTION, OTHER = prompt(40, 1), prompt(15, 2), prompt(17, 3)
# Twenty cells in four positions, as a picture with M-RoPE; and a clip the other way round.
CAT, DOG, CLIP = Media(b"cat", 20, 4), Media(b"dog", 20, 4), Media(b"clip", 3, 7)


def live(engine: Engine, *requests: Request, limit: int = 2000) -> dict[str, Answer]:
    """Play requests and look at everything after every step."""
    answers: dict[str, Answer] = {}
    for one in requests:
        engine.submit(one)
    for _ in range(limit):
        if not engine.is_busy:
            break
        collect(answers, engine)
        check_all(engine)
    assert not engine.is_busy, "it does not end"
    return answers


def expected(kind: str, one: Request, **options: object) -> list[int]:
    tokens, _, _ = truth.answer(
        kind, one.entries, sampling=one.sampling, max_tokens=one.max_tokens, ignore_ends=one.ignore_eos, **options
    )
    return tokens


@everywhere
def test_an_engine_says_what_its_backend_does(kind, shared):
    """The reference of the other laws, against one without an engine."""
    for number, options in enumerate([{}, {"max_tokens": 1}, {"ignore_ends": True, "max_tokens": 40}]):
        one = request("one", prompt(30, number), sampling=Sampling(temperature=0.9, seed=number), **options)
        assert live(fake(kind, shared=shared), one)["one"].tokens == expected(kind, one)


@everywhere
def test_an_answer_ends_where_its_sequence_does_and_pushes_nobody_out(kind, shared):
    engine = fake(kind, shared=shared, cells=60, total_cells=240, sequences=2)
    ask(engine, OTHER)
    answer = ask(engine, SYSTEM, max_tokens=None, ignore_ends=True)
    assert (len(answer.tokens), answer.reason) == (21, "length")  # twenty cells, and the token after the last
    assert ask(engine, OTHER, max_tokens=0).cached > 0 or kind in ("recurrent", "hybrid")


@everywhere
def test_a_prompt_is_computed_once_in_chunks_too(kind, shared):
    engine = fake(kind, shared=shared, batch_cells=16)
    requests = [request(str(n), SYSTEM + prompt(10 + n, 20 + n)) for n in range(3)]
    answers = live(engine, *requests)
    for one in requests:
        assert answers[one.id].tokens == expected(kind, one)
    assert sorted(answer.cached for answer in answers.values()) == [0, 40, 40]


@everywhere
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_prompt_is_asked_again_while_it_is_answered(kind, shared, steps):
    engine = fake(kind, shared=shared)
    answers: dict[str, Answer] = {}
    engine.submit(request("first", SYSTEM, max_tokens=30, ignore_ends=True))
    for _ in range(steps):
        collect(answers, engine)
    again = request("again", SYSTEM)
    engine.submit(again)
    live_on(engine, answers)
    assert answers["again"].tokens == expected(kind, again)


# --- failures


@everywhere
@pytest.mark.parametrize("at", [2, 5, 9])
@pytest.mark.parametrize("fault", [DecodeFailed(-3, "planted"), Cancelled("planted"), KVCacheFull(1, 1)], ids=repr)
def test_a_failed_decode_draws_no_token_twice(kind, shared, fault, at):
    engine = fake(kind, shared=shared, batch_cells=32)
    requests = [
        request(str(n), prompt(20 + n, 40 + n), sampling=Sampling(temperature=1.2, seed=n), ignore_ends=True)
        for n in range(3)
    ]
    for one in requests:
        engine.submit(one)
    answers: dict[str, Answer] = {}
    for _ in range(at):
        collect(answers, engine)
    engine.backend.faults.append(fault)
    live_on(engine, answers)
    for one in requests:
        assert answers[one.id].tokens == expected(kind, one)


def live_on(engine: Engine, answers: dict[str, Answer], limit: int = 2000) -> None:
    for _ in range(limit):
        if engine.is_busy:
            collect(answers, engine)
            check_all(engine)
    assert not engine.is_busy, "it does not end"


@every_kind
def test_full_memory_evicts_then_parks_and_changes_no_token(kind):
    engine = fake(kind, shared=True, cells=100, total_cells=100)
    live(engine, request("idle, in the way", prompt(20, 9)))
    seeds = [Sampling(temperature=1.0, seed=n) for n in range(3)]
    requests = [
        request(str(n), prompt(20, 10 + n), sampling=seed, max_tokens=30, ignore_ends=True)
        for n, seed in enumerate(seeds)
    ]
    answers = live(engine, *requests)
    for one in requests:
        assert answers[one.id].tokens == expected(kind, one)
    assert (engine.counters.preempted > 0) == (kind != "recurrent")  # its state does not grow


@every_kind
def test_parked_jobs_stay_within_their_bytes(kind):
    """Three have to step aside; the bytes are enough for one."""
    engine = fake(kind, EngineSettings(swap_bytes=6000), shared=True)
    engine.prefix_cache.cost_model.bytes_per_entry = 100.0
    requests = [request(str(n), prompt(30, 10 + n), max_tokens=20, ignore_ends=True) for n in range(4)]
    for one in requests:
        engine.submit(one)
    answers: dict[str, Answer] = {}
    for _ in range(6):
        collect(answers, engine)
    engine.backend.faults += [KVCacheFull(1, 1)] * 3
    live_on(engine, answers)
    assert engine.counters.preempted == 3
    for one in requests:
        assert answers[one.id].tokens == expected(kind, one)


@everywhere
def test_a_cancelled_job_is_gone(kind, shared):
    engine = fake(kind, shared=shared, sequences=1)
    stays = request("stays", SYSTEM)
    answers: dict[str, Answer] = {}
    for one in (stays, request("goes", OTHER)):
        engine.submit(one)
    collect(answers, engine)
    engine.cancel("goes")
    live_on(engine, answers)
    assert answers["stays"].tokens == expected(kind, stays)
    for _ in range(3):
        assert engine.step() == []
    assert sum(rows for spans in engine.backend.history for _, rows in spans) == 40 + len(answers["stays"].tokens) - 1


# --- cancels inside a decode


def cancelling(engine: Engine, id: str, *, late: bool = False) -> None:
    """Have the next decode meet a cancel, as if from another thread: while it runs, or when it is just done."""
    original = engine.backend.decode

    def decode(spans):
        del engine.backend.decode
        if late:
            original(spans)
        engine.cancel(id)
        if not late:
            original(spans)

    engine.backend.decode = decode


@everywhere
def test_a_cancel_inside_a_decode_stops_it_only_where_nobody_else_loses_memory(kind, shared):
    engine = fake(kind, shared=shared)
    stays = request("stays", prompt(30, 1), max_tokens=30, ignore_ends=True)
    engine.submit(stays)
    answers: dict[str, Answer] = {}
    collect(answers, engine)
    engine.submit(request("goes", prompt(40, 2)))
    cancelling(engine, "goes")
    collect(answers, engine)
    survives = kind in ("attention", "window")
    assert engine.counters.interrupted == survives
    live_on(engine, answers)
    assert isinstance(answers["goes"].end.error, Cancelled)
    assert answers["stays"].tokens == expected(kind, stays)
    computed = sum(rows for spans in engine.backend.history for slot, rows in spans if slot == 0)
    assert computed == 30 + 29  # each entry once, but for the last token


@everywhere
def test_an_interruption_that_comes_too_late_stops_nobody(kind, shared):
    engine = fake(kind, shared=shared)
    engine.submit(request("goes", prompt(30, 1)))
    cancelling(engine, "goes", late=True)
    answers: dict[str, Answer] = {}
    collect(answers, engine)
    one = request("next", prompt(30, 2))
    engine.submit(one)
    live_on(engine, answers)
    assert engine.counters.interrupted == 0
    assert answers["next"].tokens == expected(kind, one)


# --- checkpoints


@everywhere
def test_the_first_and_the_newest_checkpoint_stay(kind, shared):
    settings = EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=2))
    engine = fake(kind, settings, shared=shared)
    whole, boundaries = prompt(100, 5), frozenset(range(20, 100, 10))
    live(engine, request("whole", whole, boundaries=boundaries))
    edited = live(engine, request("edited", whole[:92] + OTHER))["edited"]
    assert edited.cached == 92 if kind == "attention" else edited.cached >= 90
    other = live(engine, request("other", whole[:25] + OTHER))["other"]
    assert other.cached >= 20


@everywhere
@pytest.mark.parametrize(("number", "nbytes"), [(3, 10**9), (100, 1500)])
def test_checkpoints_have_a_number_and_a_size(kind, shared, number, nbytes):
    settings = EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=number, max_bytes=nbytes))
    engine = fake(kind, settings, shared=shared)
    live(engine, request("one", prompt(60, 5), boundaries=frozenset(range(5, 60, 5))))
    assert bool(engine.prefix_cache.all_checkpoints) == (kind != "attention")


@everywhere
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_checkpoint_behind_an_edit_is_of_no_use(kind, shared, sequences):
    engine = fake(kind, shared=shared, sequences=sequences)
    live(engine, request("first", SYSTEM + QUESTION, boundaries=frozenset({50})))
    one = request("edited", SYSTEM + QUESTION[:5] + OTHER)
    assert live(engine, one)["edited"].tokens == expected(kind, one)


@everywhere
def test_a_checkpoint_goes_when_its_cells_do(kind, shared):
    engine = fake(kind, shared=shared, sequences=1)
    live(engine, request("first", SYSTEM + QUESTION, boundaries=frozenset({40})))
    assert len(engine.prefix_cache.all_checkpoints) == (kind != "attention")
    live(engine, request("second", OTHER))
    assert bool(engine.prefix_cache.all_checkpoints) == (kind != "attention")  # its cells are stored
    engine.prefix_cache.clear_store()
    assert not engine.prefix_cache.all_checkpoints


@everywhere
def test_a_checkpoint_is_restored_over_its_own_cells_only(kind, shared):
    engine = fake(kind, shared=shared, sequences=2)
    live(engine, request("first", SYSTEM + QUESTION, boundaries=frozenset({40}), sequence=0))
    live(engine, request("another", SYSTEM[:5] + prompt(36, 8), sequence=1, max_tokens=0))
    one = request("second", SYSTEM + OTHER)
    assert live(engine, one)["second"].tokens == expected(kind, one)


@everywhere
def test_a_conversation_goes_on_in_a_copy_while_its_source_is_busy(kind, shared):
    """A copy, and a checkpoint over it: a copy that came later would undo it."""
    engine = fake(kind, shared=shared)
    settings = {"boundaries": frozenset({40}), "max_tokens": 40, "ignore_ends": True}
    answers: dict[str, Answer] = {}
    engine.submit(request("first", SYSTEM + QUESTION, **settings))
    for _ in range(6):
        collect(answers, engine)
    one = request("second", SYSTEM + OTHER, **settings)
    engine.submit(one)
    live_on(engine, answers)
    assert answers["second"].tokens == expected(kind, one)
    assert answers["second"].cached == 40


# --- slots and snapshots


@everywhere
def test_a_certain_slot_is_used_though_another_holds_the_prompt(kind, shared):
    engine = fake(kind, shared=shared)
    live(engine, request("first", SYSTEM, sequence=2))
    one = request("second", SYSTEM + OTHER, sequence=1)
    assert live(engine, one)["second"].tokens == expected(kind, one)
    assert [len(slot) > 0 for slot in engine.prefix_cache.slots] == [False, True, True, False]


@everywhere
def test_a_sequence_comes_back_from_a_snapshot_and_from_a_fork(kind, shared):
    engine = fake(kind, shared=shared, sequences=2)
    first = live(engine, request("first", SYSTEM + QUESTION))["first"]
    kept = snapshots.save(engine, snapshots.find_latest(engine))
    snapshots.fork(engine, snapshots.find_latest(engine))
    check_all(engine)
    assert [len(slot) for slot in engine.prefix_cache.slots] == [len(kept.entries)] * 2
    snapshots.clear(engine)
    check_all(engine)
    assert ask(engine, OTHER, sequence=0).cached == 0
    snapshots.load(engine, kept)
    check_all(engine)
    one = request("second", [*SYSTEM, *QUESTION, *first.tokens, 7])
    second = live(engine, one)["second"]
    assert (second.cached, second.tokens) == (len(kept.entries), expected(kind, one))


@everywhere
def test_a_damaged_snapshot_is_refused_and_leaves_the_record_true(kind, shared):
    engine = fake(kind, shared=shared, sequences=1)
    live(engine, request("first", SYSTEM))
    broken = snapshots.SavedSequence(snapshots.save(engine, 0).entries, Damaged(), 0)
    with pytest.raises(InvalidState):
        snapshots.load(engine, broken)
    check_all(engine)
    assert ask(engine, SYSTEM).tokens == truth.answer(kind, SYSTEM)[0]


# --- rollback


@everywhere
def test_a_recurrent_memory_goes_back_less_than_its_last_decode_and_no_further(kind, shared):
    engine = fake(kind, shared=shared, rollback=3, sequences=1)
    for back in (1, 2, 3):
        live(engine, request("many rows", SYSTEM, reuse=False, max_tokens=0))
        edited = request("edited", SYSTEM[:-back] + QUESTION, ignore_ends=True)
        answers = live(engine, edited)
        assert answers["edited"].tokens == expected(kind, edited)
        assert answers["edited"].cached == 40 - back
        said = [*edited.entries, *answers["edited"].tokens[: -1 - back]]  # computed one row at a time
        again = request("again", said + OTHER)
        assert live(engine, again)["again"].tokens == expected(kind, again)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_recurrent_memory_goes_back_once_for_each_decode(kind):
    engine = fake(kind, rollback=3, sequences=1)
    live(engine, request("first", SYSTEM, max_tokens=0))
    engine.submit(request("back", [*SYSTEM[:-1], 7]))
    engine.cancel("back")
    live_on(engine, {})
    slot = engine.prefix_cache.slots[0]
    engine.prefix_cache.acquire(Continue(slot, 39))
    assert not slot.can_resume_at(38)
    engine.prefix_cache.release(slot)
    one = request("further", [*SYSTEM[:-2], 7])
    assert live(engine, one)["further"].tokens == expected(kind, one)


@pytest.mark.parametrize("unified", LAYOUTS)
def test_rollback_changes_no_token_on_llama(unified):
    """As above; llama.cpp itself says yes to more, and is wrong."""
    make = EngineSpec(
        path=models.get_path("hybrid"),
        context_settings=ContextSettings(
            cells=2048, sequences=1, batch=64, threads=1, recurrent_snapshots=3, kv_unified=unified
        ),
    )
    with closing(make()) as engine, closing(make()) as cold:
        for back in (3, 2, 1):
            ask(engine, SYSTEM, reuse=False, max_tokens=3, ignore_ends=True)
            for entries in (SYSTEM[:-back] + OTHER, SYSTEM[:-back] + OTHER[:-back] + QUESTION):
                warm = ask(engine, entries, max_tokens=1, logprobs=1)
                plain = ask(cold, entries, max_tokens=1, logprobs=1, reuse=False)
                assert warm.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
            assert warm.cached == len(SYSTEM) + len(OTHER) - 2 * back


# --- pictures


def seeing(kind: str, **options: object) -> Engine:
    engine = fake(kind, **options)
    engine.backend.ledger = engine.interner
    return engine


@everywhere
def test_reuse_and_company_change_no_token_with_pictures(kind, shared):
    engine = seeing(kind, shared=shared)
    boundaries = frozenset({6, 12})
    about = [*SYSTEM[:5], CAT, *QUESTION[:6], CLIP, *QUESTION[6:]]
    first = live(engine, request("first", about, boundaries=boundaries))["first"]
    requests = [
        request("on", [*about, *first.tokens, *OTHER]),
        request("edited", [*about[:12], *OTHER], boundaries=boundaries),
        request("again", about),
        request("new", [*OTHER, DOG, CAT, *QUESTION]),
    ]
    answers = live(engine, *requests)
    for one in requests:
        assert answers[one.id].tokens == expected(kind, one), one.id
    assert answers["on"].cached == len(about) - 2 + CAT.cells + CLIP.cells + len(first.tokens) - 1
    assert answers["on"].end.usage.cached_media_tokens == CAT.cells + CLIP.cells
    assert answers["edited"].cached == 11 + CAT.cells


@everywhere
def test_another_picture_of_the_same_size_is_another_picture(kind, shared):
    engine = seeing(kind, shared=shared)
    cat = live(engine, request("cat", [*SYSTEM, CAT, *QUESTION]))["cat"]
    dog = live(engine, request("dog", [*SYSTEM, DOG, *QUESTION]))["dog"]
    assert dog.cached <= len(SYSTEM)
    assert cat.tokens != dog.tokens == expected(kind, request("dog", [*SYSTEM, DOG, *QUESTION]))


@everywhere
def test_a_prompt_is_measured_in_cells(kind, shared):
    engine = seeing(kind, shared=shared, cells=60)
    with pytest.raises(PromptTooLong) as caught:
        engine.submit(request("long", [*SYSTEM, CAT, 1]))
    assert (caught.value.cells, caught.value.limit) == (61, 60)
    fits = request("fits", [*SYSTEM[:39], CAT, 1], max_tokens=1)
    assert live(engine, fits)["fits"].tokens == expected(kind, fits)


# --- deterministic mode: exact where the shape of a decode moves the numbers


def grid(kind: str, **options: object) -> Engine:
    settings = EngineSettings(deterministic=True, grid=8, checkpoints=CheckpointSettings(min_gap=8, min_tokens=8))
    return fake(kind, settings, rounding=True, **options)


@every_kind
def test_the_shape_of_a_decode_moves_numbers_without_deterministic_mode(kind):
    shapes = [ask(fake(kind, rounding=True, batch_cells=size), SYSTEM, ignore_ends=True).tokens for size in (64, 7)]
    assert shapes[0] != shapes[1]


@every_kind
def test_deterministic_cold_warm_restored_forked_and_concurrent_give_the_same_tokens(kind):
    boundaries = frozenset({13, 40, 50})
    first = ask(grid(kind), SYSTEM + QUESTION, boundaries=boundaries, ignore_ends=True)
    prompts = {
        "again": SYSTEM + QUESTION,
        "second turn": SYSTEM + QUESTION + first.tokens + OTHER,
        "edited": SYSTEM + QUESTION[:11] + OTHER,
        "new": SYSTEM + OTHER,
        "short": SYSTEM[:9],
    }
    requests = [request(name, one, boundaries=boundaries, ignore_ends=True) for name, one in prompts.items()]
    cold = {one.id: ask(grid(kind), one.entries, ignore_ends=True).tokens for one in requests}
    engine = grid(kind)
    assert ask(engine, SYSTEM + QUESTION, boundaries=boundaries, ignore_ends=True).tokens == first.tokens
    for one in requests:
        assert play(engine, one)[one.id].tokens == cold[one.id], one.id
    together = play(engine, *requests)
    assert {id: answer.tokens for id, answer in together.items()} == cold
    assert engine.counters.max_batch_jobs == 1
    assert together["second turn"].cached > 0
    fresh = play(grid(kind), *requests)
    assert {id: answer.tokens for id, answer in fresh.items()} == cold
    assert {answer.cached % 8 for answer in [*together.values(), *fresh.values()]} == {0}
