"""A constraint is obeyed to the letter, whatever else the request asks for."""

from __future__ import annotations

import re
import threading

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.host.thread import EngineThread
from afterglow.engine.sampling.grammar import GrammarCompiler
from afterglow.engine.sampling.stops import StopMatcher
from afterglow.engine.sampling.token_constraints import TokenConstraintFactory
from afterglow.engine.types.constraints import GrammarConstraint, ReasoningBudget
from afterglow.engine.types.request import Finished, Request
from afterglow.errors import Cancelled, InvalidArgument, InvalidGrammar
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend
from support.engine_factories import Fake
from support.hosts import error, read, tokens
from support.play import GREEDY, ask, play, prompt, request

ABC = GrammarConstraint(grammar="start: /(abc|xyz)+/ /[mno]/")
both = pytest.mark.parametrize("host", [EngineThread, EngineProcess])


def text(answer_tokens: list[int]) -> str:
    backend = FakeBackend()
    return b"".join(backend.token_to_piece(token) for token in answer_tokens if token).decode()


@pytest.mark.parametrize("kind", ["attention", "window", "recurrent", "hybrid"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_every_answer_obeys_its_grammar(kind, temperature):
    engine = Engine(FakeBackend(kind))
    for seed in range(5):
        sampling = Sampling(temperature=temperature, seed=seed)
        answer = ask(engine, prompt(30, seed), sampling=sampling, constraint=ABC, max_tokens=200)
        assert re.fullmatch("(abc|xyz)+[mno]", text(answer.tokens))
        assert answer.end.finish_reason == "stop"


def test_an_answer_ends_with_its_grammar_without_another_decode():
    backend = FakeBackend()
    answer = ask(Engine(backend), [5], constraint=GrammarConstraint(grammar='start: "abc"'))
    assert text(answer.tokens) == "abc"
    assert sum(rows for step in backend.decode_history for _, rows in step) == 3  # the prompt, a, b


def test_constrained_and_free_answers_share_decodes_and_do_not_disturb_each_other():
    alone = ask(Engine(FakeBackend()), prompt(20), ignore_ends=True, max_tokens=12)
    engine = Engine(FakeBackend())
    answers = play(
        engine,
        request("free", prompt(20), ignore_ends=True, max_tokens=12),
        request("led", prompt(20, 1), constraint=ABC, max_tokens=50),
    )
    assert engine.counters.max_batch_jobs == 2
    assert answers["free"].tokens == alone.tokens
    assert re.fullmatch("(abc|xyz)+[mno]", text(answers["led"].tokens))


def test_max_tokens_and_stops_hold_inside_a_grammar():
    engine = Engine(FakeBackend())
    long = GrammarConstraint(grammar="start: /(abc)+/")
    assert ask(engine, [5], constraint=long, max_tokens=7).reason == "length"
    stopped = ask(engine, [5], constraint=long, max_tokens=70, stop=(b"ca",))
    assert stopped.end.stop_reason == b"ca"


def test_a_grammar_that_begins_after_a_text_leaves_everything_before_it_free():
    free = ask(Engine(FakeBackend()), prompt(9), ignore_ends=True, max_tokens=60)
    written = text(free.tokens)
    start = written[10:12].encode()
    led = GrammarConstraint(triggers=((start, 'start: "abcabcabc"'),))
    answer = ask(Engine(FakeBackend()), prompt(9), ignore_ends=True, max_tokens=60, constraint=led)
    begun = written.index(start.decode()) + 2
    assert answer.tokens[:begun] == free.tokens[:begun]
    assert text(answer.tokens)[begun : begun + 9] == "abcabcabc"
    assert len(answer.tokens) == 60  # after its end everything is free again


def test_a_grammar_that_holds_once_ends_the_answer():
    led = GrammarConstraint(triggers=((b"a", 'start: "xyz"'), (b"b", 'start: "zyx"')), stop_after_first=True)
    answer = ask(Engine(FakeBackend()), prompt(9), ignore_ends=True, max_tokens=400, constraint=led)
    assert re.fullmatch("[^ab]*(axyz|bzyx)", text(answer.tokens))
    assert answer.end.finish_reason == "stop"


def test_what_a_token_has_beyond_the_beginning_belongs_to_the_grammar():
    class Pairs:
        pieces = (b"", b"x<", b">a", b"b", b"c", b"a")
        ends = control = frozenset({0})

        def tokenize(self, text):
            return [self.pieces.index(bytes([byte])) for byte in text]

    matcher = GrammarCompiler(Pairs()).compile(GrammarConstraint(triggers=((b"<>", 'start: "ab"'),)))
    for token in (1, 2):
        assert matcher.get_allowed_tokens() is None
        matcher.accept(token)
    assert list(matcher.get_allowed_tokens()) == [3]


def test_where_a_stop_ends_inside_its_piece_is_known():
    matcher = StopMatcher([b"END"])
    assert matcher.feed(b"the E") is None
    assert matcher.feed(b"ND of it") == b"END"
    assert matcher.match_end == 2


@both
@pytest.mark.parametrize("grammar", ["start: /(/", "start: unknown", "no grammar at all", 'start: "é"'])
def test_a_grammar_that_cannot_be_is_refused_and_nothing_else_happens(host, grammar):
    with host(Fake()) as engine:
        refused = engine.submit(request("bad", prompt(5), constraint=GrammarConstraint(grammar=grammar)))
        assert isinstance(error(refused), InvalidGrammar)
        good = read(engine.submit(request("good", prompt(5), constraint=ABC, max_tokens=99)))
        assert re.fullmatch("(abc|xyz)+[mno]", text(tokens(good)))


@pytest.mark.parametrize("grammar", ["", None, 7])
def test_what_is_no_text_is_no_grammar(grammar):
    with pytest.raises(InvalidArgument):
        GrammarConstraint(grammar=grammar)


def test_a_very_long_grammar_is_refused():
    with pytest.raises(InvalidGrammar, match=r"1,048,577 characters, 1,048,576 are allowed"):
        GrammarConstraint(grammar="x" * (1024 * 1024 + 1))


def test_a_request_can_be_cancelled_while_its_grammar_is_compiled(monkeypatch):
    compiling, go_on = threading.Event(), threading.Event()

    def wait(guides: TokenConstraintFactory, request: Request) -> None:
        if request.is_constrained:
            compiling.set()
            go_on.wait(10)

    monkeypatch.setattr(TokenConstraintFactory, "build", wait)
    with EngineThread(Fake()) as engine:
        led = engine.submit(request("led", prompt(5), constraint=ABC))
        assert compiling.wait(10)
        assert isinstance(read(engine.submit(request("other", prompt(5))))[-1], Finished)  # nobody waits for it
        led.cancel()
        assert isinstance(error(led), Cancelled)
        go_on.set()


@both
def test_requests_that_come_together_begin_together_with_a_grammar(host):
    with host(Fake()) as engine:
        asked = [request(str(n), prompt(40), constraint=ABC, max_tokens=99, sampling=GREEDY) for n in range(3)]
        answers = [read(stream) for stream in engine.submit_together(asked)]
    assert len({tuple(tokens(answer)) for answer in answers}) == 1
    assert sum(answer[-1].usage.cached_tokens for answer in answers) >= 2 * 39


# --- thoughts


def budget(count: int, *, open: bool = True) -> ReasoningBudget:
    return ReasoningBudget(
        max_tokens=count, start_marker=b"ab", end_marker=b"yz", closing_tokens=(24, 25, 12), starts_open=open
    )


def test_a_thought_is_closed_when_its_budget_is_used_up():
    plain = ask(Engine(FakeBackend()), prompt(9), ignore_ends=True, max_tokens=30)
    assert "yz" not in text(plain.tokens)[:8]
    answer = ask(Engine(FakeBackend()), prompt(9), ignore_ends=True, max_tokens=30, thought=budget(5))
    assert answer.tokens[:5] == plain.tokens[:5]
    assert text(answer.tokens)[5:8] == "yzm"
    assert len(answer.tokens) == 30


def test_a_thought_that_ends_by_itself_is_left_alone():
    shape = GrammarConstraint(grammar='start: "mnyz" "ooooo"')
    answer = ask(Engine(FakeBackend()), [5], constraint=shape, thought=budget(4))
    assert text(answer.tokens) == "mnyzooooo"


def test_a_thought_that_the_model_opens_is_counted_from_there():
    shape = GrammarConstraint(grammar='start: "ooooo" ("ab" /m*/ "yzm")? "n"')
    answer = ask(Engine(FakeBackend()), [5], constraint=shape, thought=budget(3, open=False), max_tokens=60)
    assert re.fullmatch("ooooo(abm{0,3}yzm)?n", text(answer.tokens))
    forced = GrammarConstraint(grammar='start: "ab" /m+/ "yzm" "n"')
    assert text(ask(Engine(FakeBackend()), [5], constraint=forced, thought=budget(3, open=False)).tokens) == "abmmmyzmn"


def test_without_any_budget_a_thought_is_closed_at_once():
    answer = ask(Engine(FakeBackend()), prompt(9), ignore_ends=True, max_tokens=10, thought=budget(0))
    assert text(answer.tokens).startswith("yzm")
