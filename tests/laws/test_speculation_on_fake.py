"""The law: speculation changes no token. Guesses are known here, so it is also known that they were used."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.types.constraints import GrammarConstraint
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import Cancelled, DecodeFailed, KVCacheFull, UnsupportedOption
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend
from support import truth
from support.drafting import PLAIN, ROLLBACK, Oracle, guessing, plain, requests
from support.play import GREEDY, KINDS, LAYOUTS, Answer, ask, check, collect, play, prompt

pytestmark = pytest.mark.parametrize(("kind", "shared"), [(kind, shared) for kind in KINDS for shared in LAYOUTS])

SAMPLINGS = (GREEDY, Sampling(temperature=0.8, seed=3), Sampling(temperature=2.0, seed=11))


def several(count: int = 3, **options: object) -> dict[str, tuple[list[int], dict]]:
    return {
        str(n): (prompt(20 + 9 * n, n), {"sampling": SAMPLINGS[n % 3], "max_tokens": 24, "ignore_ends": True} | options)
        for n in range(count)
    }


def finish(engine: Engine) -> dict[str, Answer]:
    """Step to the end, and compare memory with one computed from scratch after every step."""
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
        truth.check_all(engine)
    return answers


@pytest.mark.parametrize("wrong", [0, 1, 2, 5])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_speculation_changes_no_token(kind, shared, wrong, length):
    prompts = several()
    engine, expected, _ = guessing(kind, prompts, wrong=wrong, length=length, shared=shared)
    for one in requests(prompts):
        engine.submit(one)
    answers = finish(engine)
    for id, tokens in expected.items():
        assert answers[id].tokens == tokens, id
        usage = answers[id].end.usage
        assert usage.draft_tokens > 0
        assert (usage.accepted_tokens > 0) == (wrong != 1), usage
        assert usage.accepted_tokens <= min(usage.draft_tokens, usage.generated_tokens)
    # Every entry is computed once, but for the last token, and beside them only wrong guesses.
    needed = [len(prompts[id][0]) + len(tokens) - 1 for id, tokens in expected.items()]
    assert engine.counters.rows == sum(needed) + engine.counters.draft_tokens - engine.counters.accepted_tokens
    assert engine.counters.draft_tokens == sum(answer.end.usage.draft_tokens for answer in answers.values())
    assert engine.counters.accepted_tokens == sum(answer.end.usage.accepted_tokens for answer in answers.values())


def test_right_guesses_save_decodes(kind, shared):
    prompts = several(1)
    engine, expected, _ = guessing(kind, prompts, wrong=0, length=5, shared=shared)
    (answer,) = play(engine, *requests(prompts)).values()
    assert answer.tokens == expected["0"]
    # The prompt gives the first token, then six come with each decode.
    assert len([rows for rows in engine.backend.history if rows == [(rows[0][0], 6)]]) == 3
    assert answer.end.usage.accepted_tokens >= 19


def test_speculation_and_reuse_together_change_no_token(kind, shared):
    first, more = prompt(40, 1), {"ignore_ends": True, "max_tokens": 20}
    tokens = ask(plain(kind), first, **more).tokens
    second = first + tokens + prompt(15, 2)
    prompts = {"a": (first, more), "b": (second, more)}
    engine, expected, _ = guessing(kind, prompts, wrong=3, shared=shared)
    one, two = requests(prompts)
    assert play(engine, one)["a"].tokens == expected["a"]
    truth.check_all(engine)
    after = play(engine, two)["b"]
    assert after.tokens == expected["b"]
    assert after.cached == len(first + tokens) - 1
    assert after.end.usage.accepted_tokens > 0
    truth.check_all(engine)


def test_stops_and_limits_hold_in_the_middle_of_right_guesses(kind, shared):
    entries = prompt(30, 4)
    tokens = ask(plain(kind), entries, max_tokens=20, ignore_ends=True).tokens
    text = b"".join(FakeBackend().token_to_piece(token) for token in tokens)
    for options in (
        {"stop": (text[5:8],)},
        {"stop_tokens": frozenset({tokens[6]})},
        {"max_tokens": 7},
        {"max_tokens": 1},
        {"max_tokens": 0},
    ):
        options = {"ignore_ends": True, "max_tokens": 20} | options
        prompts = {"a": (entries, options)}
        engine, expected, _ = guessing(kind, prompts, wrong=0, length=6, shared=shared)
        (one,) = requests(prompts)
        engine.submit(one)
        answer = finish(engine).get("a", Answer())
        assert answer.tokens == expected["a"], options
        right = ask(plain(kind), entries, **options)
        assert (answer.end.finish_reason, answer.end.stop_reason) == (right.end.finish_reason, right.end.stop_reason)


def test_an_end_of_the_model_ends_in_the_middle_of_guesses(kind, shared):
    ended = 0
    for seed in range(12):
        prompts = {"a": (prompt(20, seed), {"max_tokens": 60, "sampling": Sampling(temperature=3.0, seed=seed)})}
        engine, expected, _ = guessing(kind, prompts, wrong=0, length=6, shared=shared)
        answer = play(engine, *requests(prompts))["a"]
        assert answer.tokens == expected["a"]
        ended += answer.end.finish_reason == "stop" and answer.end.usage.accepted_tokens > 0
    assert ended > 2


def test_a_stream_that_is_full_ends_where_it_does_without_guesses(kind, shared):
    entries = prompt(40, 5)
    options = {"max_tokens": None, "ignore_ends": True}
    right = ask(plain(kind, cells=60, sequences=1), entries, **options)
    oracle = Oracle({"one": ask(plain(kind), entries, max_tokens=60, ignore_ends=True).tokens})
    backend = FakeBackend(kind, cells_per_sequence=60, sequences=1, recurrent_snapshots=ROLLBACK, kv_unified=shared)
    engine = Engine(backend, EngineSettings(speculation=5, drafters=("oracle",)), [oracle])
    answer = ask(engine, entries, **options)
    assert (answer.tokens, answer.reason) == (right.tokens, right.reason)
    assert answer.end.usage.accepted_tokens > 0


def test_logprobs_are_those_of_plain_decoding(kind, shared):
    prompts = several(2, logprobs=3)
    engine, _, _ = guessing(kind, prompts, wrong=3, shared=shared)
    answers = play(engine, *requests(prompts))
    for id, (entries, more) in prompts.items():
        right = ask(plain(kind), entries, **more)
        assert answers[id].logprobs == right.logprobs
        assert len(right.logprobs) == 24


def test_company_that_cannot_be_guessed_is_not_disturbed(kind, shared):
    prompts = several(3)
    engine, expected, oracle = guessing(kind, prompts, wrong=4, shared=shared, batch_cells=24)
    del oracle.answers["1"]
    answers = play(engine, *requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert answers["1"].end.usage.draft_tokens == 0
    assert answers["0"].end.usage.accepted_tokens > 0
    assert any(len({rows for _, rows in spans}) > 1 for spans in engine.backend.history)


@pytest.mark.parametrize("fault", [Cancelled("planted"), DecodeFailed(-3, "planted"), KVCacheFull(9, 9)], ids=repr)
def test_a_decode_with_guesses_that_fails_costs_time_and_no_token(kind, shared, fault):
    prompts = several()
    engine, expected, _ = guessing(kind, prompts, wrong=3, shared=shared)
    for one in requests(prompts):
        engine.submit(one)
    answers: dict[str, Answer] = {}
    for _ in range(6):
        collect(answers, engine)
    engine.backend.faults.append(fault)
    while engine.is_busy:
        collect(answers, engine)
        truth.check_all(engine)
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert engine.counters.accepted_tokens > 0


def test_guesses_never_push_anybody_out_of_full_memory(kind, shared):
    prompts = several(4)
    engine, expected, _ = guessing(kind, prompts, wrong=0, length=6, shared=shared, total_cells=240, cells=240)
    answers = play(engine, *requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected


def test_cancel_and_deadlines_leave_the_record_true(kind, shared):
    prompts = several(3, max_tokens=60)
    engine, expected, _ = guessing(kind, prompts, wrong=4, shared=shared)
    for one in requests(prompts):
        engine.submit(one)
    answers: dict[str, Answer] = {}
    for _ in range(7):
        collect(answers, engine)
        truth.check_all(engine)
    engine.cancel("1")
    while engine.is_busy:
        collect(answers, engine)
        truth.check_all(engine)
    assert isinstance(answers["1"].end.error, Cancelled)
    assert answers["1"].tokens == expected["1"][: len(answers["1"].tokens)]
    assert answers["1"].end.usage.accepted_tokens > 0
    assert answers["0"].tokens == expected["0"]


def test_a_grammar_is_kept_and_what_it_forbids_is_never_computed(kind, shared):
    constraint = GrammarConstraint(grammar="start: /[a-m]{20}/")
    entries, more = prompt(20, 6), {"constraint": constraint, "max_tokens": 30}
    prompts = {"a": (entries, more)}
    engine, expected, oracle = guessing(kind, prompts, wrong=0, length=5, shared=shared)
    oracle.answers["a"] = expected["a"]
    answer = play(engine, *requests(prompts))["a"]
    assert answer.tokens == expected["a"]
    assert answer.end.usage.accepted_tokens > 5
    forbidden = [token for token in range(1, 64) if not b"a" <= FakeBackend().token_to_piece(token) <= b"m"]
    engine, _, oracle = guessing(kind, prompts, wrong=0, length=5, shared=shared)
    oracle.answers["a"] = [token if n % 2 else forbidden[0] for n, token in enumerate(expected["a"])]
    answer = play(engine, *requests(prompts))["a"]
    assert answer.tokens == expected["a"]
    computed = {int(token) for slot in engine.prefix_cache.slots for token in slot.entries[len(entries) :]}
    assert not computed & set(forbidden)
    assert answer.end.usage.draft_tokens == answer.end.usage.accepted_tokens  # one right guess, and nothing behind it


def test_the_deterministic_mode_does_not_guess(kind, shared):
    prompts = several(2)
    settings = EngineSettings(deterministic=True, grid=8, speculation=4, drafters=("oracle",))
    engine, expected, oracle = guessing(kind, prompts, settings=settings, shared=shared)
    answers = play(engine, *requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert not oracle.calls
    assert engine.counters.draft_tokens == 0


def test_off_is_off_and_a_drafter_that_is_not_there_is_refused(kind, shared):
    prompts = several(1)
    engine, expected, oracle = guessing(kind, prompts, settings=PLAIN, shared=shared)
    assert play(engine, *requests(prompts))["0"].tokens == expected["0"]
    assert not oracle.calls
    with pytest.raises(UnsupportedOption, match="mtp"):
        Engine(FakeBackend(kind), EngineSettings(drafters=("mtp",)))


def test_memory_that_cannot_go_back_is_never_asked_to(kind, shared):
    prompts = several(2)
    if kind in ("recurrent", "hybrid"):
        with pytest.raises(UnsupportedOption, match="neither drop wrong guesses nor go back"):
            guessing(kind, prompts, shared=shared, rollback=0, replays=False)
        engine, expected, oracle = guessing(
            kind, prompts, wrong=2, length="auto", shared=shared, rollback=0, replays=False
        )
        answers = play(engine, *requests(prompts))
        assert {id: answer.tokens for id, answer in answers.items()} == expected
        assert not oracle.calls
    deep, expected, _ = guessing(kind, prompts, wrong=1, length=16, shared=shared, rollback=3)
    for one in requests(prompts):
        deep.submit(one)
    assert {id: answer.tokens for id, answer in finish(deep).items()} == expected
    longest = {"attention": 16, "window": 8}.get(kind, 3)
    widest = max(rows for spans in deep.backend.history[6:] for _, rows in spans)
    assert widest <= longest + 1


@pytest.mark.parametrize("wrong", [0, 1, 2, 5])
@pytest.mark.parametrize("length", [1, 4, 16])
def test_replay_changes_no_token(kind, shared, wrong, length):
    """Memory without snapshots goes back to the state before its guesses, and the right ones are computed again."""
    prompts = several()
    engine, expected, _ = guessing(kind, prompts, wrong=wrong, length=length, shared=shared, rollback=0)
    for one in requests(prompts):
        engine.submit(one)
    answers = finish(engine)
    for id, tokens in expected.items():
        assert answers[id].tokens == tokens, id
        usage = answers[id].end.usage
        assert usage.draft_tokens > 0
        assert (usage.accepted_tokens > 0) == (wrong != 1), usage
    counters = engine.counters
    needed = [len(prompts[id][0]) + len(tokens) - 1 for id, tokens in expected.items()]
    assert counters.rows == sum(needed) + counters.draft_tokens - counters.accepted_tokens + counters.replayed_entries
    assert (counters.replayed_entries > 0) == (
        kind in ("recurrent", "hybrid") and counters.draft_tokens > counters.accepted_tokens
    )
    assert counters.draft_tokens > counters.accepted_tokens or wrong in (0, 2, 5)


@pytest.mark.parametrize("batch", [4, 24])
def test_replay_beside_prompts_and_in_small_batches_changes_no_token(kind, shared, batch):
    prompts = several(4, max_tokens=40)
    engine, expected, _ = guessing(
        kind, prompts, wrong=3, length=6, shared=shared, rollback=0, batch_cells=batch, sequences=3
    )
    for one in requests(prompts):
        engine.submit(one)
    answers = finish(engine)
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert engine.counters.accepted_tokens > 0


@pytest.mark.parametrize("fault", [Cancelled("planted"), DecodeFailed(-3, "planted"), KVCacheFull(9, 9)], ids=repr)
@pytest.mark.parametrize("steps", [6, 7, 8])
def test_a_replay_that_fails_costs_time_and_no_token(kind, shared, fault, steps):
    prompts = several()
    engine, expected, _ = guessing(kind, prompts, wrong=3, shared=shared, rollback=0)
    for one in requests(prompts):
        engine.submit(one)
    answers: dict[str, Answer] = {}
    for _ in range(steps):
        collect(answers, engine)
    engine.backend.faults.append(fault)
    while engine.is_busy:
        collect(answers, engine)
        truth.check_all(engine)
    assert {id: answer.tokens for id, answer in answers.items()} == expected


def test_a_saved_state_that_does_not_load_costs_time_and_no_token(kind, shared, monkeypatch):
    prompts = several(2)
    engine, expected, _ = guessing(kind, prompts, wrong=3, shared=shared, rollback=0)
    replay = engine.speculator.rollback
    if replay is not None:
        monkeypatch.setattr(replay._backend, "save", lambda sequence, scope: truth.Damaged())
    answers = play(engine, *requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert engine.counters.replayed_entries == 0


def test_a_drafter_hears_the_end_of_every_job(kind, shared):
    prompts = several(3)
    engine, _, oracle = guessing(kind, prompts, shared=shared)
    play(engine, *requests(prompts))
    assert sorted(oracle.forgotten) == ["0", "1", "2"]
    check(engine)


def test_what_is_drawn_is_distributed_as_without_guesses(kind, shared):
    draw(kind, shared, draws=1000)


@pytest.mark.full
def test_twenty_thousand_draws_are_distributed_as_without_guesses(kind, shared):
    draw(kind, shared, draws=20_000)


def draw(kind: str, shared: bool, draws: int) -> None:
    entries, size = prompt(12, 8), 6
    entries = [token % size for token in entries]
    backend = FakeBackend(kind, vocabulary_size=size, recurrent_snapshots=ROLLBACK, kv_unified=shared)
    likeliest = ask(
        Engine(FakeBackend(kind, vocabulary_size=size), PLAIN), entries, max_tokens=4, ignore_ends=True
    ).tokens
    oracle = Oracle({"one": likeliest}, vocabulary=size)
    engine = Engine(backend, EngineSettings(speculation=3, drafters=("oracle",)), [oracle])
    counts = np.zeros((size,) * 3)
    for seed in range(draws):
        sampling = Sampling(temperature=1.0, seed=seed)
        tokens = ask(engine, entries, sampling=sampling, max_tokens=3, ignore_ends=True).tokens
        counts[tuple(tokens)] += 1
    assert engine.counters.accepted_tokens > draws / 20
    expected = draws * exact(kind, entries, size)
    common = expected > 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum()
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), f"chi-square {statistic:.0f} over {freedom} cells"


def exact(kind: str, entries: list[int], size: int) -> np.ndarray:
    """The probability of every three tokens after a prompt."""
    table = np.zeros((size,) * 3)
    for first in range(size):
        for second in range(size):
            backend = FakeBackend(kind, vocabulary_size=size)
            from_prompt = [*entries, first, second]
            backend.decode([truth.DecodeSpan(0, from_prompt, 0, 3)])
            rows = [softmax(backend.get_logits(0, len(entries) - 1 + row)) for row in range(3)]
            table[first, second] = rows[0][first] * rows[1][second] * rows[2]
    return table


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64))
    return weights / weights.sum()


def test_requests_of_many_answers_guess_for_each(kind, shared):
    entries = prompt(30, 9)
    prompts = {
        str(n): (entries, {"sampling": Sampling(temperature=1.0, seed=n), "max_tokens": 16, "ignore_ends": True})
        for n in range(4)
    }
    engine, expected, _ = guessing(kind, prompts, wrong=3, length=3, shared=shared)
    answers = play(engine, *requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert len({tuple(tokens) for tokens in expected.values()}) > 1
    assert all(answer.end.usage.accepted_tokens > 0 for answer in answers.values())


def test_auto_changes_no_token_whatever_it_tries(kind, shared):
    prompts = several(4, max_tokens=60)
    engine, expected, oracle = guessing(kind, prompts, wrong=7, length="auto", shared=shared)
    answers = play(engine, *requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert oracle.forgotten


def test_the_sampler_s_state_moves_with_kept_tokens_only(kind, shared):
    prompts = several(2)
    engine, expected, _ = guessing(kind, prompts, wrong=3, shared=shared)
    samplers = {}
    for one in requests(prompts):
        engine.submit(one)
        samplers[one.id] = engine._jobs[one.id].sampler
    finish(engine)
    for id, tokens in expected.items():
        assert samplers[id].accepted == tokens
        assert samplers[id].drawn == (0 if samplers[id].sampling.is_greedy else len(tokens))
