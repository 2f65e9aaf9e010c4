"""The laws: reuse, chunking and company change no token; a request ends once; the record equals memory."""

from __future__ import annotations

import pytest

from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import Cancelled, DecodeFailed, InvalidArgument, KVCacheFull, PromptTooLong
from afterglow.llama.sampling import Sampling
from support.play import GREEDY, KINDS, LAYOUTS, Answer, ask, check, collect, fake, play, prompt, reference, request

pytestmark = pytest.mark.parametrize(("kind", "shared"), [(kind, shared) for kind in KINDS for shared in LAYOUTS])

SYSTEM, QUESTION, OTHER = prompt(40, 1), prompt(15, 2), prompt(17, 3)


def test_c1_a_second_turn_computes_only_what_is_new(kind, shared):
    engine = fake(kind, shared=shared)
    first = ask(engine, SYSTEM + QUESTION)
    turn = SYSTEM + QUESTION + first.tokens + OTHER
    second = ask(engine, turn)
    assert second.tokens == reference(lambda: fake(kind), turn)
    # The last generated token was never decoded; everything else is there.
    assert second.cached == len(SYSTEM + QUESTION + first.tokens) - 1


def test_c8_the_same_prompt_again_computes_at_least_its_last_entry(kind, shared):
    engine = fake(kind, shared=shared)
    boundaries = frozenset({len(SYSTEM), len(SYSTEM + QUESTION) - 2})
    first = ask(engine, SYSTEM + QUESTION, boundaries=boundaries)
    again = ask(engine, SYSTEM + QUESTION, boundaries=boundaries)
    assert again.tokens == first.tokens
    assert again.cached == 54 if kind == "attention" else again.cached >= 53


def test_c3_an_edited_last_message_computes_from_the_last_shared_boundary(kind, shared):
    engine = fake(kind, shared=shared)
    boundaries = frozenset({len(SYSTEM), len(SYSTEM) + 5})
    ask(engine, SYSTEM + QUESTION, boundaries=boundaries)
    edited = SYSTEM + QUESTION[:5] + OTHER
    answer = ask(engine, edited, boundaries=boundaries)
    assert answer.tokens == reference(lambda: fake(kind), edited)
    assert answer.cached >= len(SYSTEM) + 5


def test_c3_a_new_conversation_shares_the_system_prompt(kind, shared):
    engine = fake(kind, shared=shared)
    ask(engine, SYSTEM + QUESTION, boundaries=frozenset({len(SYSTEM)}))
    answer = ask(engine, SYSTEM + OTHER, boundaries=frozenset({len(SYSTEM)}))
    assert answer.tokens == reference(lambda: fake(kind), SYSTEM + OTHER)
    assert answer.cached == len(SYSTEM)


def test_c1_going_back_to_an_earlier_branch_finds_it_still_there(kind, shared):
    engine = fake(kind, shared=shared)
    boundaries = frozenset({len(SYSTEM)})
    first = ask(engine, SYSTEM + QUESTION, boundaries=boundaries)
    ask(engine, SYSTEM + OTHER, boundaries=boundaries)
    back = SYSTEM + QUESTION + first.tokens + prompt(9, 9)
    answer = ask(engine, back)
    assert answer.tokens == reference(lambda: fake(kind), back)
    assert answer.cached == len(SYSTEM + QUESTION + first.tokens) - 1


def test_company_changes_no_token(kind, shared):
    requests = [request(str(n), prompt(20 + 7 * n, n), max_tokens=10 + n) for n in range(6)]
    engine = fake(kind, shared=shared)
    answers = play(engine, *requests)
    for one in requests:
        alone = reference(lambda: fake(kind), one.entries, max_tokens=one.max_tokens)
        assert answers[one.id].tokens == alone
    assert max(len(spans) for spans in engine.backend.history) >= 4  # and they really shared decodes
    mixed = [spans for spans in engine.backend.history if {1} < {rows for _, rows in spans}]
    assert mixed, "prompt rows ride with generating rows"


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_chunking_changes_no_token(kind, shared, batch):
    engine = fake(kind, shared=shared, batch_cells=batch, sequences=2)
    answer = ask(engine, prompt(50, 4))
    assert answer.tokens == reference(lambda: fake(kind), prompt(50, 4))
    assert len(engine.backend.history) >= 50 / batch


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_a_seed_gives_the_same_tokens_cold_warm_and_in_company(kind, shared, temperature):
    sampling = Sampling(temperature=temperature, seed=11)
    expected = reference(lambda: fake(kind), SYSTEM, sampling=sampling)
    engine = fake(kind, shared=shared)
    ask(engine, SYSTEM, sampling=sampling)
    assert ask(engine, SYSTEM, sampling=sampling).tokens == expected
    answers = play(engine, request("a", SYSTEM, sampling=sampling), request("b", OTHER), request("c", QUESTION))
    assert answers["a"].tokens == expected


def test_requests_on_one_new_prefix_compute_it_once(kind, shared):
    engine = fake(kind, shared=shared)
    requests = [request(str(n), SYSTEM + prompt(10 + n, 20 + n)) for n in range(4)]
    answers = play(engine, *requests)
    for one in requests:
        assert answers[one.id].tokens == reference(lambda: fake(kind), one.entries)
    needed = len(SYSTEM) + sum(10 + n for n in range(4))
    assert engine.counters.prompt_entries <= needed + sum(len(answer.tokens) for answer in answers.values())
    assert engine.counters.coalesced == 3
    assert sorted(answer.cached for answer in answers.values()) == [0, 40, 40, 40]


def test_several_answers_to_one_prompt_share_it(kind, shared):
    engine = fake(kind, shared=shared)
    seeds = [request(str(n), SYSTEM, sampling=Sampling(temperature=1.0, seed=n)) for n in range(4)]
    answers = play(engine, *seeds)
    assert [answers[str(n)].cached for n in range(4)] == [0, 39, 39, 39]
    for one in seeds:
        assert answers[one.id].tokens == reference(lambda: fake(kind), SYSTEM, sampling=one.sampling)


def test_more_jobs_than_slots_wait_their_turn(kind, shared):
    engine = fake(kind, shared=shared, sequences=2)
    requests = [request(str(n), prompt(12, 30 + n)) for n in range(7)]
    answers = play(engine, *requests)
    for one in requests:
        assert answers[one.id].tokens == reference(lambda: fake(kind), one.entries)


def test_a_cancelled_job_leaves_what_it_computed(kind, shared):
    engine = fake(kind, shared=shared, batch_cells=8)
    engine.submit(request("gone", SYSTEM + QUESTION))
    answers: dict[str, Answer] = {}
    for _ in range(4):
        collect(answers, engine)
    engine.cancel("gone")
    collect(answers, engine)
    assert isinstance(answers["gone"].end.error, Cancelled)
    check(engine)
    answer = ask(engine, SYSTEM + QUESTION)
    assert answer.cached == 32
    assert answer.tokens == reference(lambda: fake(kind), SYSTEM + QUESTION)


def test_a_job_cancelled_while_it_waits_takes_nothing(kind, shared):
    engine = fake(kind, shared=shared, sequences=1)
    engine.submit(request("first", SYSTEM))
    engine.submit(request("second", OTHER))
    engine.cancel("second")
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    assert isinstance(answers["second"].end.error, Cancelled)
    assert answers["second"].tokens == []
    assert answers["first"].tokens == reference(lambda: fake(kind), SYSTEM)


@pytest.mark.parametrize("at", [0, 1, 3, 6])
@pytest.mark.parametrize("fault", [DecodeFailed(-3, "planted"), Cancelled("planted"), KVCacheFull(1, 1)], ids=repr)
def test_a_decode_that_fails_once_costs_time_and_no_token(kind, shared, fault, at):
    engine = fake(kind, shared=shared, batch_cells=16)
    requests = [request(str(n), prompt(30 + n, 40 + n)) for n in range(3)]
    for one in requests:
        engine.submit(one)
    answers: dict[str, Answer] = {}
    for _ in range(at):
        collect(answers, engine)
    engine.backend.faults.append(fault)
    while engine.is_busy:
        collect(answers, engine)
        check(engine)
    for one in requests:
        assert answers[one.id].tokens == reference(lambda: fake(kind), one.entries), one.id


def test_a_decode_that_keeps_failing_ends_the_job_and_not_the_engine(kind, shared):
    engine = fake(kind, shared=shared)
    engine.backend.faults += [DecodeFailed(-3, "planted")] * 3
    answer = ask(engine, SYSTEM)
    assert isinstance(answer.end.error, DecodeFailed)
    assert ask(engine, SYSTEM).tokens == reference(lambda: fake(kind), SYSTEM)


class Broken:
    nbytes = 1


def test_a_bad_checkpoint_is_a_miss(kind, shared):
    engine = fake(kind, shared=shared, sequences=1)
    ask(engine, SYSTEM + QUESTION, boundaries=frozenset({len(SYSTEM)}))
    for checkpoint in engine.prefix_cache.all_checkpoints:
        checkpoint.state = Broken()
    answer = ask(engine, SYSTEM + OTHER)
    assert answer.tokens == reference(lambda: fake(kind), SYSTEM + OTHER)
    check(engine)


def test_checkpoints_stay_within_their_bytes_and_their_number(kind, shared):
    settings = EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=3, max_bytes=3000))
    engine = fake(kind, settings, shared=shared)
    boundaries = frozenset(range(5, 200, 5))
    answer = ask(engine, prompt(200, 5), boundaries=boundaries)
    assert answer.tokens == reference(lambda: fake(kind), prompt(200, 5))
    assert len(engine.prefix_cache.all_checkpoints) <= 3
    assert engine.prefix_cache.checkpoints.nbytes <= 3000
    assert bool(engine.prefix_cache.all_checkpoints) == (kind != "attention")


def test_the_deadline_s_answer_is_what_there_is(kind, shared):
    engine = fake(kind, shared=shared)
    engine.submit(request("late", SYSTEM, deadline=0.0001, max_tokens=1000, ignore_ends=True))
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    assert answers["late"].reason == "deadline"


def test_c8_an_empty_prompt_and_one_that_can_never_fit_are_refused_at_once(kind, shared):
    engine = fake(kind, shared=shared, cells=50)
    with pytest.raises(InvalidArgument, match="at least one"):
        engine.submit(request("empty", []))
    with pytest.raises(PromptTooLong) as caught:
        engine.submit(request("long", prompt(51)))
    assert (caught.value.cells, caught.value.limit) == (51, 50)
    assert not engine.is_busy
    full = ask(engine, prompt(50))
    assert (len(full.tokens), full.reason) == (1, "length")


def test_reuse_can_be_refused(kind, shared):
    engine = fake(kind, shared=shared)
    first = ask(engine, SYSTEM)
    again = ask(engine, SYSTEM, reuse=False)
    assert again.cached == 0
    assert again.tokens == first.tokens


def test_a_certain_slot_is_used_where_one_is_named(kind, shared):
    engine = fake(kind, shared=shared)
    ask(engine, SYSTEM, sequence=2)
    assert [len(slot) > 0 for slot in engine.prefix_cache.slots] == [False, False, True, False]
    again = ask(engine, SYSTEM + OTHER, sequence=2)
    assert again.tokens == reference(lambda: fake(kind), SYSTEM + OTHER)
    with pytest.raises(InvalidArgument, match="sequence"):
        engine.submit(request("x", SYSTEM, sequence=9))


def test_stop_texts_and_stop_tokens_end_an_answer_exactly(kind, shared):
    engine = fake(kind, shared=shared)
    tokens = reference(lambda: fake(kind), SYSTEM, max_tokens=12, ignore_ends=True)
    text = b"".join(engine.backend.token_to_piece(token) for token in tokens)
    stopped = ask(engine, SYSTEM, stop=(text[3:6], b"never"), ignore_ends=True)
    end = text.find(text[3:6]) + 3
    assert stopped.tokens == tokens[:end]
    assert stopped.end.stop_reason == text[3:6]
    single = ask(engine, SYSTEM, stop_tokens=frozenset({tokens[4]}), ignore_ends=True)
    assert single.tokens == tokens[: tokens.index(tokens[4]) + 1]
    assert single.end.stop_reason == tokens[4]


def test_no_tokens_asked_for_is_a_prompt_kept_in_memory(kind, shared):
    engine = fake(kind, shared=shared)
    assert ask(engine, SYSTEM, max_tokens=0).tokens == []
    assert ask(engine, SYSTEM + QUESTION).cached == len(SYSTEM)


def test_logprobs_come_with_their_alternatives(kind, shared):
    engine = fake(kind, shared=shared)
    engine.submit(request("one", SYSTEM, logprobs=3))
    events = [event for _ in range(30) for event in engine.step()]
    tokens = [event for event in events if type(event).__name__ == "Token"]
    for event in tokens:
        assert len(event.alternatives) == 3
        assert event.alternatives[0] == (event.token, event.logprob)  # greedy takes the likeliest
        assert [value for _, value in event.alternatives] == sorted((v for _, v in event.alternatives), reverse=True)
    assert GREEDY.is_greedy


def test_progress_is_reported_while_a_long_prompt_is_computed(kind, shared):
    engine = fake(kind, shared=shared, batch_cells=16)
    answer = ask(engine, prompt(100))
    assert len(answer.progress) >= 5
    assert answer.progress == sorted(answer.progress)


def test_usage_adds_up(kind, shared):
    engine = fake(kind, shared=shared)
    usage = ask(engine, SYSTEM).end.usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (40, 0)
    assert usage.generated_tokens > 0
    assert min(usage.queue_seconds, usage.prefill_seconds, usage.decode_seconds) >= 0
