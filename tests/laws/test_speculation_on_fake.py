"""Laws of speculative decoding on the fake backend: drafts change no token.

The draft tokens are known, so the tests also check that they were used.
"""

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
from support.drafting import PLAIN, ROLLBACK, Oracle, build_requests, plain, speculating
from support.play import GREEDY, KINDS, LAYOUTS, Answer, ask, check, collect, play, prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize(("kind", "kv_unified"), [(kind, kv_unified) for kind in KINDS for kv_unified in LAYOUTS]),
]

SAMPLINGS = (GREEDY, Sampling(temperature=0.8, seed=3), Sampling(temperature=2.0, seed=11))


def build_prompts(count: int = 3, **options: object) -> dict[str, tuple[list[int], dict]]:
    return {
        str(n): (prompt(20 + 9 * n, n), {"sampling": SAMPLINGS[n % 3], "max_tokens": 24, "ignore_eos": True} | options)
        for n in range(count)
    }


def finish(engine: Engine) -> dict[str, Answer]:
    """Step until the engine is idle and check all invariants after every step."""
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        collect(answers, engine)
        truth.check_all(engine)
    return answers


@pytest.mark.parametrize("wrong", [0, 1, 2, 5])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_speculation_changes_no_token(kind, kv_unified, wrong, length):
    prompts = build_prompts()
    engine, expected, _ = speculating(kind, prompts, wrong=wrong, length=length, kv_unified=kv_unified)
    for req in build_requests(prompts):
        engine.submit(req)
    answers = finish(engine)
    for id, tokens in expected.items():
        assert answers[id].tokens == tokens, id
        usage = answers[id].end.usage
        assert usage.draft_tokens > 0
        assert (usage.accepted_tokens > 0) == (wrong != 1), usage
        assert usage.accepted_tokens <= min(usage.draft_tokens, usage.generated_tokens)
    # Every entry except the last token is computed once, and in addition only the rejected draft tokens.
    needed = [len(prompts[id][0]) + len(tokens) - 1 for id, tokens in expected.items()]
    assert engine.counters.rows == sum(needed) + engine.counters.draft_tokens - engine.counters.accepted_tokens
    assert engine.counters.draft_tokens == sum(answer.end.usage.draft_tokens for answer in answers.values())
    assert engine.counters.accepted_tokens == sum(answer.end.usage.accepted_tokens for answer in answers.values())


def test_accepted_drafts_save_decodes(kind, kv_unified):
    prompts = build_prompts(1)
    engine, expected, _ = speculating(kind, prompts, wrong=0, length=5, kv_unified=kv_unified)
    (answer,) = play(engine, *build_requests(prompts)).values()
    assert answer.tokens == expected["0"]
    # The prefill yields the first token, then each decode yields six.
    assert len([rows for rows in engine.backend.decode_history if rows == [(rows[0][0], 6)]]) == 3
    assert answer.end.usage.accepted_tokens >= 19


def test_speculation_and_prefix_reuse_together_change_no_token(kind, kv_unified):
    first, more = prompt(40, 1), {"ignore_eos": True, "max_tokens": 20}
    tokens = ask(plain(kind), first, **more).tokens
    second = first + tokens + prompt(15, 2)
    prompts = {"a": (first, more), "b": (second, more)}
    engine, expected, _ = speculating(kind, prompts, wrong=3, kv_unified=kv_unified)
    req, two = build_requests(prompts)
    assert play(engine, req)["a"].tokens == expected["a"]
    truth.check_all(engine)
    after = play(engine, two)["b"]
    assert after.tokens == expected["b"]
    assert after.cached == len(first + tokens) - 1
    assert after.end.usage.accepted_tokens > 0
    truth.check_all(engine)


def test_stops_and_limits_apply_inside_accepted_drafts(kind, kv_unified):
    entries = prompt(30, 4)
    tokens = ask(plain(kind), entries, max_tokens=20, ignore_eos=True).tokens
    text = b"".join(FakeBackend().token_to_piece(token) for token in tokens)
    for options in (
        {"stop": (text[5:8],)},
        {"stop_tokens": frozenset({tokens[6]})},
        {"max_tokens": 7},
        {"max_tokens": 1},
        {"max_tokens": 0},
    ):
        options = {"ignore_eos": True, "max_tokens": 20} | options
        prompts = {"a": (entries, options)}
        engine, expected, _ = speculating(kind, prompts, wrong=0, length=6, kv_unified=kv_unified)
        (req,) = build_requests(prompts)
        engine.submit(req)
        answer = finish(engine).get("a", Answer())
        assert answer.tokens == expected["a"], options
        right = ask(plain(kind), entries, **options)
        assert (answer.end.finish_reason, answer.end.stop_reason) == (right.end.finish_reason, right.end.stop_reason)


def test_an_end_token_inside_a_draft_ends_the_completion(kind, kv_unified):
    ended = 0
    for seed in range(12):
        prompts = {"a": (prompt(20, seed), {"max_tokens": 60, "sampling": Sampling(temperature=3.0, seed=seed)})}
        engine, expected, _ = speculating(kind, prompts, wrong=0, length=6, kv_unified=kv_unified)
        answer = play(engine, *build_requests(prompts))["a"]
        assert answer.tokens == expected["a"]
        ended += answer.end.finish_reason == "stop" and answer.end.usage.accepted_tokens > 0
    assert ended > 2


def test_a_full_sequence_ends_at_the_same_token_as_without_speculation(kind, kv_unified):
    entries = prompt(40, 5)
    options = {"max_tokens": None, "ignore_eos": True}
    right = ask(plain(kind, cells_per_sequence=60, sequences=1), entries, **options)
    oracle = Oracle({"one": ask(plain(kind), entries, max_tokens=60, ignore_eos=True).tokens})
    backend = FakeBackend(kind, cells_per_sequence=60, sequences=1, recurrent_snapshots=ROLLBACK, kv_unified=kv_unified)
    engine = Engine(backend, EngineSettings(speculation=5, drafters=("oracle",)), [oracle])
    answer = ask(engine, entries, **options)
    assert (answer.tokens, answer.reason) == (right.tokens, right.reason)
    assert answer.end.usage.accepted_tokens > 0


def test_logprobs_equal_those_of_plain_decoding(kind, kv_unified):
    prompts = build_prompts(2, logprobs=3)
    engine, _, _ = speculating(kind, prompts, wrong=3, kv_unified=kv_unified)
    answers = play(engine, *build_requests(prompts))
    for id, (entries, more) in prompts.items():
        right = ask(plain(kind), entries, **more)
        assert answers[id].logprobs == right.logprobs
        assert len(right.logprobs) == 24


def test_requests_without_drafts_are_not_affected(kind, kv_unified):
    prompts = build_prompts(3)
    engine, expected, oracle = speculating(kind, prompts, wrong=4, kv_unified=kv_unified, batch_cells=24)
    del oracle.answers["1"]
    answers = play(engine, *build_requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert answers["1"].end.usage.draft_tokens == 0
    assert answers["0"].end.usage.accepted_tokens > 0
    assert any(len({rows for _, rows in spans}) > 1 for spans in engine.backend.decode_history)


@pytest.mark.parametrize("error", [Cancelled("planted"), DecodeFailed(-3, "planted"), KVCacheFull(9, 9)], ids=repr)
def test_a_failed_decode_with_drafts_changes_no_token(kind, kv_unified, error):
    prompts = build_prompts()
    engine, expected, _ = speculating(kind, prompts, wrong=3, kv_unified=kv_unified)
    for req in build_requests(prompts):
        engine.submit(req)
    answers: dict[str, Answer] = {}
    for _ in range(6):
        collect(answers, engine)
    engine.backend.injected_errors.append(error)
    while engine.is_busy:
        collect(answers, engine)
        truth.check_all(engine)
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert engine.counters.accepted_tokens > 0


def test_drafts_in_a_full_kv_cache_change_no_token(kind, kv_unified):
    prompts = build_prompts(4)
    engine, expected, _ = speculating(
        kind, prompts, wrong=0, length=6, kv_unified=kv_unified, total_cells=240, cells_per_sequence=240
    )
    answers = play(engine, *build_requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected


def test_a_cancel_during_speculation_leaves_the_entries_correct(kind, kv_unified):
    prompts = build_prompts(3, max_tokens=60)
    engine, expected, _ = speculating(kind, prompts, wrong=4, kv_unified=kv_unified)
    for req in build_requests(prompts):
        engine.submit(req)
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


def test_a_grammar_holds_and_forbidden_draft_tokens_are_not_computed(kind, kv_unified):
    constraint = GrammarConstraint(grammar="start: /[a-m]{20}/")
    entries, more = prompt(20, 6), {"constraint": constraint, "max_tokens": 30}
    prompts = {"a": (entries, more)}
    engine, expected, oracle = speculating(kind, prompts, wrong=0, length=5, kv_unified=kv_unified)
    oracle.answers["a"] = expected["a"]
    answer = play(engine, *build_requests(prompts))["a"]
    assert answer.tokens == expected["a"]
    assert answer.end.usage.accepted_tokens > 5
    forbidden = [token for token in range(1, 64) if not b"a" <= FakeBackend().token_to_piece(token) <= b"m"]
    engine, _, oracle = speculating(kind, prompts, wrong=0, length=5, kv_unified=kv_unified)
    oracle.answers["a"] = [token if n % 2 else forbidden[0] for n, token in enumerate(expected["a"])]
    answer = play(engine, *build_requests(prompts))["a"]
    assert answer.tokens == expected["a"]
    computed = {int(token) for slot in engine.prefix_cache.slots for token in slot.entries[len(entries) :]}
    assert not computed & set(forbidden)
    # One token is accepted; the forbidden one after it is not computed.
    assert answer.end.usage.draft_tokens == answer.end.usage.accepted_tokens


def test_deterministic_mode_does_not_speculate(kind, kv_unified):
    prompts = build_prompts(2)
    settings = EngineSettings(deterministic=True, grid=8, drafters=("oracle",))
    engine, expected, oracle = speculating(kind, prompts, settings=settings, kv_unified=kv_unified)
    answers = play(engine, *build_requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert not oracle.calls
    assert engine.counters.draft_tokens == 0


def test_speculation_off_drafts_nothing_and_a_missing_drafter_is_rejected(kind, kv_unified):
    prompts = build_prompts(1)
    engine, expected, oracle = speculating(kind, prompts, settings=PLAIN, kv_unified=kv_unified)
    assert play(engine, *build_requests(prompts))["0"].tokens == expected["0"]
    assert not oracle.calls
    with pytest.raises(UnsupportedOption, match="mtp"):
        Engine(FakeBackend(kind), EngineSettings(drafters=("mtp",)))


def test_drafts_are_limited_to_what_can_be_rolled_back(kind, kv_unified):
    prompts = build_prompts(2)
    if kind in ("recurrent", "hybrid"):
        with pytest.raises(UnsupportedOption, match="neither drop rejected draft tokens nor restore a state"):
            speculating(kind, prompts, kv_unified=kv_unified, recurrent_snapshots=0, can_replay=False)
        engine, expected, oracle = speculating(
            kind, prompts, wrong=2, length="auto", kv_unified=kv_unified, recurrent_snapshots=0, can_replay=False
        )
        answers = play(engine, *build_requests(prompts))
        assert {id: answer.tokens for id, answer in answers.items()} == expected
        assert not oracle.calls
    deep, expected, _ = speculating(kind, prompts, wrong=1, length=16, kv_unified=kv_unified, recurrent_snapshots=3)
    for req in build_requests(prompts):
        deep.submit(req)
    assert {id: answer.tokens for id, answer in finish(deep).items()} == expected
    max_draft = {"attention": 16, "window": 8}.get(kind, 3)
    max_rows = max(rows for spans in deep.backend.decode_history[6:] for _, rows in spans)
    assert max_rows <= max_draft + 1


@pytest.mark.parametrize("wrong", [0, 1, 2, 5])
@pytest.mark.parametrize("length", [1, 4, 16])
def test_replay_changes_no_token(kind, kv_unified, wrong, length):
    """Without recurrent snapshots the state before the draft is restored and accepted tokens are computed again."""
    prompts = build_prompts()
    engine, expected, _ = speculating(
        kind, prompts, wrong=wrong, length=length, kv_unified=kv_unified, recurrent_snapshots=0
    )
    for req in build_requests(prompts):
        engine.submit(req)
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
def test_replay_with_prefill_and_small_batches_changes_no_token(kind, kv_unified, batch):
    prompts = build_prompts(4, max_tokens=40)
    engine, expected, _ = speculating(
        kind, prompts, wrong=3, length=6, kv_unified=kv_unified, recurrent_snapshots=0, batch_cells=batch, sequences=3
    )
    for req in build_requests(prompts):
        engine.submit(req)
    answers = finish(engine)
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert engine.counters.accepted_tokens > 0


@pytest.mark.parametrize("error", [Cancelled("planted"), DecodeFailed(-3, "planted"), KVCacheFull(9, 9)], ids=repr)
@pytest.mark.parametrize("steps", [6, 7, 8])
def test_a_failed_replay_changes_no_token(kind, kv_unified, error, steps):
    prompts = build_prompts()
    engine, expected, _ = speculating(kind, prompts, wrong=3, kv_unified=kv_unified, recurrent_snapshots=0)
    for req in build_requests(prompts):
        engine.submit(req)
    answers: dict[str, Answer] = {}
    for _ in range(steps):
        collect(answers, engine)
    engine.backend.injected_errors.append(error)
    while engine.is_busy:
        collect(answers, engine)
        truth.check_all(engine)
    assert {id: answer.tokens for id, answer in answers.items()} == expected


def test_a_rollback_state_that_does_not_load_changes_no_token(kind, kv_unified, monkeypatch):
    prompts = build_prompts(2)
    engine, expected, _ = speculating(kind, prompts, wrong=3, kv_unified=kv_unified, recurrent_snapshots=0)
    rollback = engine.speculator.rollback
    if rollback is not None:
        monkeypatch.setattr(rollback._backend, "save", lambda sequence, scope, **options: truth.Damaged())
    answers = play(engine, *build_requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert engine.counters.replayed_entries == 0


def test_a_drafter_releases_every_job(kind, kv_unified):
    prompts = build_prompts(3)
    engine, _, oracle = speculating(kind, prompts, kv_unified=kv_unified)
    play(engine, *build_requests(prompts))
    assert sorted(oracle.released) == ["0", "1", "2"]
    check(engine)


def test_speculation_preserves_the_sampling_distribution(kind, kv_unified):
    check_distribution(kind, kv_unified, draws=300 if kv_unified else 1000)  # the layout has no part in sampling


@pytest.mark.full
def test_speculation_preserves_the_sampling_distribution_over_twenty_thousand_draws(kind, kv_unified):
    check_distribution(kind, kv_unified, draws=20_000)


def check_distribution(kind: str, kv_unified: bool, draws: int) -> None:
    entries, size = prompt(12, 8), 6
    entries = [token % size for token in entries]
    backend = FakeBackend(kind, vocabulary_size=size, recurrent_snapshots=ROLLBACK, kv_unified=kv_unified)
    most_likely = ask(
        Engine(FakeBackend(kind, vocabulary_size=size), PLAIN), entries, max_tokens=4, ignore_eos=True
    ).tokens
    oracle = Oracle({"one": most_likely}, vocabulary=size)
    engine = Engine(backend, EngineSettings(speculation=3, drafters=("oracle",)), [oracle])
    counts = np.zeros((size,) * 3)
    for seed in range(draws):
        sampling = Sampling(temperature=1.0, seed=seed)
        # Half of the prompts are computed, half are repeats that start from stored logits.
        tokens = ask(
            engine, entries, sampling=sampling, max_tokens=3, ignore_eos=True, use_prefix_cache=seed % 2 > 0
        ).tokens
        counts[tuple(tokens)] += 1
    assert engine.counters.accepted_tokens > draws / 20
    expected = draws * compute_probabilities(kind, entries, size)
    common = expected > 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum()
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), f"chi-square {statistic:.0f} over {freedom} cells"


def compute_probabilities(kind: str, entries: list[int], size: int) -> np.ndarray:
    """Return the probability of every sequence of three tokens after a prompt."""
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


def test_each_completion_of_one_prompt_speculates(kind, kv_unified):
    entries = prompt(30, 9)
    prompts = {
        str(n): (entries, {"sampling": Sampling(temperature=1.0, seed=n), "max_tokens": 16, "ignore_eos": True})
        for n in range(4)
    }
    engine, expected, _ = speculating(kind, prompts, wrong=3, length=3, kv_unified=kv_unified)
    answers = play(engine, *build_requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert len({tuple(tokens) for tokens in expected.values()}) > 1
    assert all(answer.end.usage.accepted_tokens > 0 for answer in answers.values())


def test_automatic_draft_length_changes_no_token(kind, kv_unified):
    prompts = build_prompts(4, max_tokens=60)
    engine, expected, oracle = speculating(kind, prompts, wrong=7, length="auto", kv_unified=kv_unified)
    answers = play(engine, *build_requests(prompts))
    assert {id: answer.tokens for id, answer in answers.items()} == expected
    assert oracle.released


def test_the_sampler_advances_with_accepted_tokens_only(kind, kv_unified):
    prompts = build_prompts(2)
    engine, expected, _ = speculating(kind, prompts, wrong=3, kv_unified=kv_unified)
    samplers = {}
    for req in build_requests(prompts):
        engine.submit(req)
        samplers[req.id] = engine._jobs[req.id].sampler
    finish(engine)
    for id, tokens in expected.items():
        assert samplers[id].accepted_tokens == tokens
        assert samplers[id].draw_count == (0 if samplers[id].sampling.is_greedy else len(tokens))
