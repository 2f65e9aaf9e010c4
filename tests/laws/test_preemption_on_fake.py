"""Laws of a full KV cache, failed decodes and cancels on the fake backend."""

from __future__ import annotations

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import Cancelled, DecodeFailed, KVCacheFull
from afterglow.llama.sampling import Sampling
from support.play import KINDS, LAYOUTS, Answer, ask, collect, fake, prompt, request
from support.truth import compute_tokens, finish_checked, run_checked

pytestmark = pytest.mark.slow
everywhere = pytest.mark.parametrize(
    ("kind", "kv_unified"), [(kind, kv_unified) for kind in KINDS for kv_unified in LAYOUTS]
)
every_kind = pytest.mark.parametrize("kind", KINDS)
SYSTEM, OTHER = prompt(40, 1), prompt(17, 3)


@everywhere
def test_a_completion_ends_when_its_sequence_is_full_and_evicts_nothing(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, cells_per_sequence=60, total_cells=240, sequences=2)
    ask(engine, OTHER)
    answer = ask(engine, SYSTEM, max_tokens=None, ignore_eos=True)
    assert (len(answer.tokens), answer.reason) == (21, "length")  # 20 cells, and the token after the last cell
    assert ask(engine, OTHER, max_tokens=0).cached > 0 or kind in ("recurrent", "hybrid")


@every_kind
def test_a_full_kv_cache_evicts_then_preempts_and_changes_no_token(kind):
    engine = fake(kind, kv_unified=True, cells_per_sequence=100, total_cells=100)
    run_checked(engine, request("idle", prompt(20, 9)))
    seeds = [Sampling(temperature=1.0, seed=n) for n in range(3)]
    requests = [
        request(str(n), prompt(20, 10 + n), sampling=seed, max_tokens=30, ignore_eos=True)
        for n, seed in enumerate(seeds)
    ]
    answers = run_checked(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == compute_tokens(kind, req)
    assert (engine.counters.preempted > 0) == (kind != "recurrent")  # a recurrent state does not grow


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "recurrent"])  # a recurrent state does not grow
def test_a_preempted_request_computes_nothing_again_although_an_idle_sequence_has_its_cells(kind):
    engine = fake(kind, EngineSettings(speculation="off"), kv_unified=True, cells_per_sequence=200, total_cells=200)
    requests = [request(str(n), prompt(80, 10 + n), max_tokens=60, ignore_eos=True) for n in range(2)]
    answers = run_checked(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == compute_tokens(kind, req)
    assert engine.counters.preempted == 1
    assert engine.counters.rows == 2 * (80 + 59)


def start_requests(engine: Engine, count: int) -> tuple[list[Request], dict[str, Answer]]:
    """Submit requests and make six steps; return the requests and their answers so far."""
    requests = [request(str(n), prompt(30, 10 + n), max_tokens=20, ignore_eos=True) for n in range(count)]
    for req in requests:
        engine.submit(req)
    answers: dict[str, Answer] = {}
    for _ in range(6):
        collect(answers, engine)
    return requests, answers


@every_kind
def test_a_request_that_resumes_is_no_second_prefix_miss(kind):
    engine = fake(kind, kv_unified=True)
    _, answers = start_requests(engine, 3)
    engine.backend.injected_errors.append(KVCacheFull(1, 1))
    finish_checked(engine, answers)
    assert engine.counters.preempted == 1
    assert engine.prefix_cache.store.ram.counters.misses == 3


@every_kind
def test_swapped_out_sequences_stay_within_swap_bytes(kind):
    """Three requests are preempted; the bytes suffice for one."""
    engine = fake(kind, EngineSettings(swap_bytes=6000), kv_unified=True)
    engine.prefix_cache.cost_model._bytes_per_entry.value = 100.0
    requests, answers = start_requests(engine, 4)
    engine.backend.injected_errors += [KVCacheFull(1, 1)] * 3
    finish_checked(engine, answers)
    assert engine.counters.preempted == 3
    for req in requests:
        assert answers[req.id].tokens == compute_tokens(kind, req)


@everywhere
@pytest.mark.parametrize("step", [2, 5, 9])
@pytest.mark.parametrize("error", [DecodeFailed(-3, "planted"), Cancelled("planted"), KVCacheFull(1, 1)], ids=repr)
def test_a_failed_decode_samples_no_token_twice(kind, kv_unified, error, step):
    engine = fake(kind, kv_unified=kv_unified, batch_cells=32)
    requests = [
        request(str(n), prompt(20 + n, 40 + n), sampling=Sampling(temperature=1.2, seed=n), ignore_eos=True)
        for n in range(3)
    ]
    for req in requests:
        engine.submit(req)
    answers: dict[str, Answer] = {}
    for _ in range(step):
        collect(answers, engine)
    engine.backend.injected_errors.append(error)
    finish_checked(engine, answers)
    for req in requests:
        assert answers[req.id].tokens == compute_tokens(kind, req)


@everywhere
@pytest.mark.parametrize("error", [DecodeFailed(-3, "planted"), Cancelled("planted")], ids=repr)
def test_a_failed_decode_changes_no_token_of_idle_sequences(kind, kv_unified, error):
    engine = fake(kind, kv_unified=kv_unified)
    idle = request("idle", prompt(30, 50), max_tokens=3, ignore_eos=True)
    answers = run_checked(engine, idle)
    for number in range(2):
        engine.submit(request(str(number), prompt(20, 60 + number)))
    collect(answers, engine)
    engine.backend.injected_errors.append(error)
    finish_checked(engine, answers)
    again = request("again", [*idle.entries, *answers["idle"].tokens, 5])
    answers |= run_checked(engine, again)
    assert answers["again"].tokens == compute_tokens(kind, again)
    assert (answers["again"].cached > 0) == (kind != "hybrid")  # its checkpoint needs the cells, which are lost


@everywhere
def test_a_cancelled_request_is_removed(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, sequences=1)
    stays = request("other", SYSTEM)
    answers: dict[str, Answer] = {}
    for req in (stays, request("cancelled", OTHER)):
        engine.submit(req)
    collect(answers, engine)
    engine.cancel("cancelled")
    finish_checked(engine, answers)
    assert answers["other"].tokens == compute_tokens(kind, stays)
    for _ in range(3):
        assert engine.step() == []
    assert (
        sum(rows for spans in engine.backend.decode_history for _, rows in spans)
        == 40 + len(answers["other"].tokens) - 1
    )


def cancel_during_next_decode(engine: Engine, id: str, *, late: bool = False) -> None:
    """Cancel a request as if from another thread while the next decode runs, or with `late` right after it."""
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
def test_a_cancel_interrupts_a_decode_only_if_no_other_request_loses_its_state(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    stays = request("other", prompt(30, 1), max_tokens=30, ignore_eos=True)
    engine.submit(stays)
    answers: dict[str, Answer] = {}
    collect(answers, engine)
    engine.submit(request("cancelled", prompt(40, 2)))
    cancel_during_next_decode(engine, "cancelled")
    collect(answers, engine)
    survives = kind in ("attention", "window")
    assert engine.counters.interrupted == survives
    finish_checked(engine, answers)
    assert isinstance(answers["cancelled"].end.error, Cancelled)
    assert answers["other"].tokens == compute_tokens(kind, stays)
    computed = sum(rows for spans in engine.backend.decode_history for slot, rows in spans if slot == 0)
    assert computed == 30 + 29  # each entry once, except the last token


@everywhere
def test_a_late_interrupt_stops_no_later_decode(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    engine.submit(request("cancelled", prompt(30, 1)))
    cancel_during_next_decode(engine, "cancelled", late=True)
    answers: dict[str, Answer] = {}
    collect(answers, engine)
    req = request("next", prompt(30, 2))
    engine.submit(req)
    finish_checked(engine, answers)
    assert engine.counters.interrupted == 0
    assert answers["next"].tokens == compute_tokens(kind, req)
