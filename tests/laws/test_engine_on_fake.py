"""Laws of the engine on the fake backend: prefix reuse, chunked prefill and concurrency change no token, a request ends
exactly once, and the recorded entries equal the KV cache."""

from __future__ import annotations

import pytest

from afterglow.engine.types.request import Failed
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import Cancelled, DecodeFailed, InvalidArgument, KVCacheFull, PromptTooLong
from afterglow.llama.sampling import Sampling
from support.play import GREEDY, KINDS, LAYOUTS, Answer, ask, check, collect, fake, play, prompt, reference, request
from support.truth import Damaged

pytestmark = pytest.mark.parametrize(
    ("kind", "kv_unified"), [(kind, kv_unified) for kind in KINDS for kv_unified in LAYOUTS]
)

SYSTEM, QUESTION, OTHER = prompt(40, 1), prompt(15, 2), prompt(17, 3)


def test_c1_a_second_turn_computes_only_new_entries(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    first = ask(engine, SYSTEM + QUESTION)
    turn = SYSTEM + QUESTION + first.tokens + OTHER
    second = ask(engine, turn)
    assert second.tokens == reference(lambda: fake(kind), turn)
    # The last generated token was never decoded; everything before it is cached.
    assert second.cached == len(SYSTEM + QUESTION + first.tokens) - 1


def test_c8_a_repeated_prompt_without_stored_logits_computes_at_least_its_last_entry(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    boundaries = frozenset({len(SYSTEM), len(SYSTEM + QUESTION) - 2})
    first = ask(engine, SYSTEM + QUESTION, boundaries=boundaries)
    for last_logits in engine.prefix_cache.store.ram.logits:
        engine.prefix_cache.store.ram.logits.drop(last_logits)
    again = ask(engine, SYSTEM + QUESTION, boundaries=boundaries)
    assert again.tokens == first.tokens
    assert again.cached == 54 if kind == "attention" else again.cached >= 53


def test_c3_an_edited_last_message_computes_from_the_last_shared_boundary(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    boundaries = frozenset({len(SYSTEM), len(SYSTEM) + 5})
    ask(engine, SYSTEM + QUESTION, boundaries=boundaries)
    edited = SYSTEM + QUESTION[:5] + OTHER
    answer = ask(engine, edited, boundaries=boundaries)
    assert answer.tokens == reference(lambda: fake(kind), edited)
    assert answer.cached >= len(SYSTEM) + 5


def test_c3_a_new_conversation_reuses_the_system_prompt(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    ask(engine, SYSTEM + QUESTION, boundaries=frozenset({len(SYSTEM)}))
    answer = ask(engine, SYSTEM + OTHER, boundaries=frozenset({len(SYSTEM)}))
    assert answer.tokens == reference(lambda: fake(kind), SYSTEM + OTHER)
    assert answer.cached == len(SYSTEM)


def test_c1_an_earlier_branch_is_still_cached(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    boundaries = frozenset({len(SYSTEM)})
    first = ask(engine, SYSTEM + QUESTION, boundaries=boundaries)
    ask(engine, SYSTEM + OTHER, boundaries=boundaries)
    branch = SYSTEM + QUESTION + first.tokens + prompt(9, 9)
    answer = ask(engine, branch)
    assert answer.tokens == reference(lambda: fake(kind), branch)
    assert answer.cached == len(SYSTEM + QUESTION + first.tokens) - 1


def test_tokens_sampled_together_are_those_of_a_request_alone(kind, kv_unified, monkeypatch):
    requests = [
        request(str(n), prompt(20 + n, n), max_tokens=12, sampling=Sampling(temperature=1.2, seed=n), ignore_eos=True)
        for n in range(6)
    ]
    engine = fake(kind, kv_unified=kv_unified)
    sample_rows, counts = engine.backend.sample_rows, []
    monkeypatch.setattr(engine.backend, "sample_rows", lambda draws: counts.append(len(draws)) or sample_rows(draws))
    answers = play(engine, *requests)
    for req in requests:
        alone = play(fake(kind), req)
        assert answers[req.id].tokens == alone[req.id].tokens
    assert max(counts) >= 4


def test_an_error_while_sampling_together_ends_one_request_only(kind, kv_unified):
    requests = [request(str(n), prompt(20, n), max_tokens=8, ignore_eos=True) for n in range(4)]
    engine = fake(kind, kv_unified=kv_unified)
    for req in requests:
        engine.submit(req)
    answers: dict[str, Answer] = {}
    while not all(answers.get(req.id, Answer()).tokens for req in requests):
        collect(answers, engine)

    def fail(logits, allowed=None):
        raise InvalidArgument("logits", "planted")

    engine.running_jobs[2].job.sampler.sample_and_accept = fail
    while engine.is_busy:
        collect(answers, engine)
        check(engine)
    failed = [req for req in requests if isinstance(answers[req.id].end, Failed)]
    assert len(failed) == 1
    for req in requests:
        if req not in failed:
            assert answers[req.id].tokens == reference(lambda: fake(kind), req.entries, max_tokens=8, ignore_eos=True)


def test_concurrency_changes_no_token(kind, kv_unified):
    requests = [request(str(n), prompt(20 + 7 * n, n), max_tokens=10 + n) for n in range(6)]
    engine = fake(kind, kv_unified=kv_unified)
    answers = play(engine, *requests)
    for req in requests:
        expected = reference(lambda: fake(kind), req.entries, max_tokens=req.max_tokens)
        assert answers[req.id].tokens == expected
    assert max(len(spans) for spans in engine.backend.decode_history) >= 4  # they shared decodes
    mixed = [spans for spans in engine.backend.decode_history if {1} < {rows for _, rows in spans}]
    assert mixed, "prefill rows share a decode with generated tokens"


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_chunking_changes_no_token(kind, kv_unified, batch):
    engine = fake(kind, kv_unified=kv_unified, batch_cells=batch, sequences=2)
    answer = ask(engine, prompt(50, 4))
    assert answer.tokens == reference(lambda: fake(kind), prompt(50, 4))
    assert len(engine.backend.decode_history) >= 50 / batch


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_a_seed_gives_the_same_tokens_cold_warm_and_concurrently(kind, kv_unified, temperature):
    sampling = Sampling(temperature=temperature, seed=11)
    expected = reference(lambda: fake(kind), SYSTEM, sampling=sampling)
    engine = fake(kind, kv_unified=kv_unified)
    ask(engine, SYSTEM, sampling=sampling)
    assert ask(engine, SYSTEM, sampling=sampling).tokens == expected
    answers = play(engine, request("a", SYSTEM, sampling=sampling), request("b", OTHER), request("c", QUESTION))
    assert answers["a"].tokens == expected


def test_concurrent_requests_prefill_a_common_prefix_once(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    requests = [request(str(n), SYSTEM + prompt(10 + n, 20 + n)) for n in range(4)]
    answers = play(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == reference(lambda: fake(kind), req.entries)
    needed = len(SYSTEM) + sum(10 + n for n in range(4))
    assert engine.counters.prompt_entries == needed
    assert engine.counters.coalesced == 3
    assert sorted(answer.cached for answer in answers.values()) == [0, 40, 40, 40]


def test_tokens_generated_beside_a_prefill_are_not_counted_as_prompt_entries(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, batch_cells=16)
    for number in range(3):
        engine.submit(request(str(number), prompt(4, number), max_tokens=60, ignore_eos=True))
    for _ in range(5):
        engine.step()
    play(engine, request("long", prompt(100, 9), max_tokens=1))
    assert max(len(spans) for spans in engine.backend.decode_history) == 4
    assert engine.counters.prompt_entries == 3 * 4 + 100


def test_several_completions_of_one_prompt_prefill_it_once(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    seeds = [request(str(n), SYSTEM, sampling=Sampling(temperature=1.0, seed=n)) for n in range(4)]
    answers = play(engine, *seeds)
    assert [answers[str(n)].cached for n in range(4)] == [0, 39, 39, 39]
    for req in seeds:
        assert answers[req.id].tokens == reference(lambda: fake(kind), SYSTEM, sampling=req.sampling)


def test_requests_beyond_the_number_of_slots_wait(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, sequences=2)
    requests = [request(str(n), prompt(12, 30 + n)) for n in range(7)]
    answers = play(engine, *requests)
    for req in requests:
        assert answers[req.id].tokens == reference(lambda: fake(kind), req.entries)


def test_a_cancelled_request_leaves_its_entries_cached(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, batch_cells=8)
    engine.submit(request("cancelled", SYSTEM + QUESTION))
    answers: dict[str, Answer] = {}
    for _ in range(4):
        collect(answers, engine)
    engine.cancel("cancelled")
    collect(answers, engine)
    assert isinstance(answers["cancelled"].end.error, Cancelled)
    check(engine)
    answer = ask(engine, SYSTEM + QUESTION)
    assert answer.cached == 32
    assert answer.tokens == reference(lambda: fake(kind), SYSTEM + QUESTION)


def test_a_request_cancelled_while_waiting_computes_nothing(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, sequences=1)
    engine.submit(request("first", SYSTEM))
    engine.submit(request("second", OTHER))
    engine.cancel("second")
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    assert isinstance(answers["second"].end.error, Cancelled)
    assert answers["second"].tokens == []
    assert answers["first"].tokens == reference(lambda: fake(kind), SYSTEM)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1, 3, 6])
@pytest.mark.parametrize("error", [DecodeFailed(-3, "planted"), Cancelled("planted"), KVCacheFull(1, 1)], ids=repr)
def test_a_failed_decode_changes_no_token(kind, kv_unified, error, step):
    engine = fake(kind, kv_unified=kv_unified, batch_cells=16)
    requests = [request(str(n), prompt(30 + n, 40 + n)) for n in range(3)]
    for req in requests:
        engine.submit(req)
    answers: dict[str, Answer] = {}
    for _ in range(step):
        collect(answers, engine)
    engine.backend.injected_errors.append(error)
    while engine.is_busy:
        collect(answers, engine)
        check(engine)
    for req in requests:
        assert answers[req.id].tokens == reference(lambda: fake(kind), req.entries), req.id


def test_repeated_decode_failures_end_the_request_and_not_the_engine(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    engine.backend.injected_errors += [DecodeFailed(-3, "planted")] * 3
    answer = ask(engine, SYSTEM)
    assert isinstance(answer.end.error, DecodeFailed)
    assert ask(engine, SYSTEM).tokens == reference(lambda: fake(kind), SYSTEM)


def test_a_checkpoint_that_does_not_load_is_a_prefix_miss(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, sequences=1)
    ask(engine, SYSTEM + QUESTION, boundaries=frozenset({len(SYSTEM)}))
    for checkpoint in engine.prefix_cache.all_checkpoints:
        checkpoint.state = Damaged(checkpoint.state.nbytes)
    answer = ask(engine, SYSTEM + OTHER)
    assert answer.tokens == reference(lambda: fake(kind), SYSTEM + OTHER)
    check(engine)


def test_checkpoints_stay_within_their_limits(kind, kv_unified):
    settings = EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=3, max_bytes=3000))
    engine = fake(kind, settings, kv_unified=kv_unified)
    boundaries = frozenset(range(5, 200, 5))
    answer = ask(engine, prompt(200, 5), boundaries=boundaries)
    assert answer.tokens == reference(lambda: fake(kind), prompt(200, 5))
    assert len(engine.prefix_cache.all_checkpoints) <= 3
    assert engine.prefix_cache.checkpoints.nbytes <= 3000
    assert bool(engine.prefix_cache.all_checkpoints) == (kind != "attention")


def test_a_deadline_ends_the_completion_with_the_tokens_so_far(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    engine.submit(request("late", SYSTEM, deadline=0.0001, max_tokens=1000, ignore_eos=True))
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
    assert answers["late"].reason == "deadline"


def test_c8_empty_and_too_long_prompts_are_rejected_on_submit(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, cells_per_sequence=50)
    with pytest.raises(InvalidArgument, match="at least one"):
        engine.submit(request("empty", []))
    with pytest.raises(PromptTooLong) as caught:
        engine.submit(request("long", prompt(51)))
    assert (caught.value.cells, caught.value.limit) == (51, 50)
    assert not engine.is_busy
    full = ask(engine, prompt(50))
    assert (len(full.tokens), full.reason) == (1, "length")


def test_a_request_can_bypass_the_prefix_cache(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    first = ask(engine, SYSTEM)
    again = ask(engine, SYSTEM, use_prefix_cache=False)
    assert again.cached == 0
    assert again.tokens == first.tokens


def test_a_request_can_name_its_slot(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    ask(engine, SYSTEM, sequence=2)
    assert [len(slot) > 0 for slot in engine.prefix_cache.slots] == [False, False, True, False]
    again = ask(engine, SYSTEM + OTHER, sequence=2)
    assert again.tokens == reference(lambda: fake(kind), SYSTEM + OTHER)
    with pytest.raises(InvalidArgument, match="sequence"):
        engine.submit(request("x", SYSTEM, sequence=9))


def test_stop_texts_and_stop_tokens_end_a_completion_exactly(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    tokens = reference(lambda: fake(kind), SYSTEM, max_tokens=12, ignore_eos=True)
    text = b"".join(engine.backend.token_to_piece(token) for token in tokens)
    stopped = ask(engine, SYSTEM, stop=(text[3:6], b"never"), ignore_eos=True)
    end = text.find(text[3:6]) + 3
    assert stopped.tokens == tokens[:end]
    assert stopped.end.stop_reason == text[3:6]
    single = ask(engine, SYSTEM, stop_tokens=frozenset({tokens[4]}), ignore_eos=True)
    assert single.tokens == tokens[: tokens.index(tokens[4]) + 1]
    assert single.end.stop_reason == tokens[4]


def test_max_tokens_zero_prefills_the_prompt_and_caches_it(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    assert ask(engine, SYSTEM, max_tokens=0).tokens == []
    assert ask(engine, SYSTEM + QUESTION).cached == len(SYSTEM)


def test_logprobs_come_with_their_alternatives(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    engine.submit(request("one", SYSTEM, logprobs=3))
    events = [event for _ in range(30) for event in engine.step()]
    tokens = [event for event in events if type(event).__name__ == "Token"]
    for event in tokens:
        assert len(event.alternatives) == 3
        assert event.alternatives[0] == (event.token, event.logprob)  # greedy sampling takes the most likely token
        assert [value for _, value in event.alternatives] == sorted((v for _, v in event.alternatives), reverse=True)
    assert GREEDY.is_greedy


def test_chosen_tokens_follow_the_alternatives(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    engine.submit(request("one", SYSTEM, logprobs=engine.backend.vocabulary_size, max_tokens=4))
    engine.submit(request("two", SYSTEM, logprob_tokens=(7, 3), max_tokens=4))
    events = [event for _ in range(30) for event in engine.step()]
    every, chosen = (
        [event for event in events if type(event).__name__ == "Token" and event.request_id == id]
        for id in ("one", "two")
    )
    assert len(every) == len(chosen) == 4
    for expected, event in zip(every, chosen, strict=True):
        logprobs = dict(expected.alternatives)
        assert event.alternatives == ((7, logprobs[7]), (3, logprobs[3]))
    with pytest.raises(InvalidArgument, match="logprob_tokens"):
        engine.submit(request("three", SYSTEM, logprob_tokens=(engine.backend.vocabulary_size,)))


def test_prefill_progress_is_reported(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified, batch_cells=16)
    answer = ask(engine, prompt(100))
    assert len(answer.progress) >= 5
    assert answer.progress == sorted(answer.progress)


def test_usage_adds_up(kind, kv_unified):
    engine = fake(kind, kv_unified=kv_unified)
    usage = ask(engine, SYSTEM).end.usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (40, 0)
    assert usage.generated_tokens > 0
    assert min(usage.queue_seconds, usage.prefill_seconds, usage.decode_seconds) >= 0
