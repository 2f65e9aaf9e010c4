"""Law of forced tokens: what a grammar forces is appended without a decode each, and the completion stays the same."""

from __future__ import annotations

import pytest

import afterglow
from afterglow.engine.sampling.grammar import GrammarMatcher
from afterglow.engine.types.constraints import GrammarConstraint
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.sampling import Sampling
from afterglow.testing import models
from support.play import KINDS, LAYOUTS, Answer, ask, check, collect, fake, play, prompt, request

CONSTRAINT = GrammarConstraint(grammar='start: "hello" /[b-f]{3}/ "world" /[g-k]{2}/ "end"')
LETTERS = 26  # every letter is one token, so that a text can be written in one way only
PROMPT = [1 + token % 25 for token in prompt(30, 1)]


def spell(tokens: list[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


@pytest.fixture
def no_forcing(monkeypatch):
    """Return a function that makes the engine sample every token."""
    return lambda: monkeypatch.setattr(GrammarMatcher, "find_forced_tokens", lambda self: [])


@pytest.mark.parametrize("kv_unified", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_forced_tokens_change_no_token_and_save_decodes(kind, kv_unified, no_forcing):
    engine = fake(kind, kv_unified=kv_unified, vocabulary_size=LETTERS)
    answer = ask(engine, PROMPT, constraint=CONSTRAINT, max_tokens=40)
    decodes = engine.counters.decodes
    assert engine.counters.forced_tokens >= 8
    check(engine)
    no_forcing()
    plain_engine = fake(kind, kv_unified=kv_unified, vocabulary_size=LETTERS)
    plain = ask(plain_engine, PROMPT, constraint=CONSTRAINT, max_tokens=40)
    assert answer.tokens == plain.tokens
    assert spell(answer.tokens).startswith("hello")
    assert answer.reason == plain.reason == "stop"
    assert decodes <= plain_engine.counters.decodes - 8


@pytest.mark.parametrize("kind", KINDS)
def test_forced_tokens_are_a_prefix_hit_of_the_next_turn(kind):
    engine = fake(kind, vocabulary_size=LETTERS)
    answer = ask(engine, PROMPT, constraint=CONSTRAINT, max_tokens=12)
    assert engine.counters.forced_tokens
    following = ask(engine, [*PROMPT, *answer.tokens, 3, 4])
    assert following.cached >= len(PROMPT) + len(answer.tokens) - 5
    check(engine)


def test_a_stop_text_inside_forced_text_ends_the_completion():
    engine = fake("attention", vocabulary_size=LETTERS)
    answer = ask(engine, PROMPT, constraint=CONSTRAINT, max_tokens=40, stop=(b"ell",))
    assert spell(answer.tokens) == "hell"
    assert answer.reason == "stop"


@pytest.mark.parametrize(("options", "reason"), [({}, "stop"), ({"max_tokens": 4}, "length")])
def test_a_completion_whose_last_tokens_are_forced_is_not_ended_by_its_deadline(options, reason):
    engine = fake("attention", vocabulary_size=LETTERS)
    whole = GrammarConstraint(grammar='start: "hello"')
    answers: dict[str, Answer] = {}
    engine.submit(request("one", PROMPT, constraint=whole, deadline=60.0, **options))
    while not answers.get("one", Answer()).tokens:
        collect(answers, engine)
    (running,) = engine.running_jobs
    running.job.submitted_at -= 100.0
    collect(answers, engine)
    assert spell(answers["one"].tokens) == "hello"[: options.get("max_tokens")]
    assert answers["one"].reason == reason


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_max_tokens_counts_forced_tokens(limit):
    engine = fake("attention", vocabulary_size=LETTERS)
    answer = ask(engine, PROMPT, constraint=CONSTRAINT, max_tokens=limit)
    assert len(answer.tokens) == limit
    assert answer.reason == "length"


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_forced_tokens_end_at_the_end_of_the_sequence(kind, no_forcing):
    options = {"constraint": CONSTRAINT, "max_tokens": 40}
    engine = fake(kind, vocabulary_size=LETTERS, cells_per_sequence=len(PROMPT) + 3, sequences=1)
    answer = ask(engine, PROMPT, **options)
    no_forcing()
    plain = ask(fake(kind, vocabulary_size=LETTERS, cells_per_sequence=len(PROMPT) + 3, sequences=1), PROMPT, **options)
    assert (answer.tokens, answer.reason) == (plain.tokens, plain.reason)


@pytest.mark.parametrize("options", [{"logprobs": 2}, {"logprob_tokens": (3, 4)}])
def test_with_logprobs_every_token_is_sampled(options):
    engine = fake("attention", vocabulary_size=LETTERS)
    answer = ask(engine, PROMPT, constraint=CONSTRAINT, max_tokens=40, **options)
    assert engine.counters.forced_tokens == 0
    assert len(answer.logprobs) == len(answer.tokens)
    assert spell(answer.tokens).startswith("hello")


def test_concurrent_requests_with_and_without_a_grammar_give_their_own_tokens():
    requests = [
        request(str(n), [*PROMPT[n:], 2 + n], max_tokens=30, constraint=CONSTRAINT if n % 2 else None) for n in range(4)
    ]
    engine = fake("attention", vocabulary_size=LETTERS)
    answers = play(engine, *requests)
    assert engine.counters.forced_tokens
    for req in requests:
        alone = play(fake("attention", vocabulary_size=LETTERS), req)[req.id]
        assert answers[req.id].tokens == alone.tokens


@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
def test_forced_text_is_the_same_on_llama(kind, no_forcing):
    grammar = 'root ::= "occupation: " ("engineer" | "doctor") ", employed: " ("yes" | "no")'
    sampling = Sampling(temperature=0, grammar=grammar)
    texts, decodes = [], []
    for is_forcing in (True, False):
        if not is_forcing:
            no_forcing()
        options = {"context": 1024, "sequences": 1, "threads": 1, "disk_cache": False}
        with afterglow.load(models.get_path(kind), engine=EngineSettings(speculation="off"), **options) as model:
            response = model.complete("person:", sampling=sampling)
            texts.append(response.text)
            counters = model.get_stats().counters
            decodes.append(counters["decodes"])
            assert bool(counters["forced_tokens"]) is is_forcing
    assert texts[0] == texts[1]
    assert decodes[0] < decodes[1] / 2
