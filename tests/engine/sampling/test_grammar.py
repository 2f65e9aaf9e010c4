"""Grammar constraints hold exactly, whatever else the request asks for."""

from __future__ import annotations

import re
import threading

import pytest

from afterglow.chat.constraints.grammar import build_json_schema_grammar
from afterglow.engine.engine import Engine
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.host.thread import EngineThread
from afterglow.engine.sampling.grammar import GrammarCompiler
from afterglow.engine.sampling.token_constraints import TokenConstraintFactory
from afterglow.engine.types.constraints import GrammarConstraint, convert_gbnf
from afterglow.engine.types.request import Finished, Request
from afterglow.errors import Cancelled, InvalidArgument, InvalidGrammar
from afterglow.llama.sampling import Sampling
from afterglow.testing import FakeBackend
from support.engine_factories import FakeEngineFactory
from support.grammar_text import BYTES, PieceVocabulary
from support.hosts import get_tokens, read_error, read_events
from support.play import GREEDY, ask, play, prompt, request

ABC = GrammarConstraint(grammar="start: /(abc|xyz)+/ /[mno]/")
both_hosts = pytest.mark.parametrize("host", [EngineThread, pytest.param(EngineProcess, marks=pytest.mark.native)])


def decode_text(answer_tokens: list[int]) -> str:
    backend = FakeBackend()
    return b"".join(backend.token_to_piece(token) for token in answer_tokens if token).decode()


@pytest.mark.parametrize("kind", ["attention", "window", "recurrent", "hybrid"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_every_completion_matches_its_grammar(kind, temperature):
    engine = Engine(FakeBackend(kind))
    for seed in range(5):
        sampling = Sampling(temperature=temperature, seed=seed)
        answer = ask(engine, prompt(30, seed), sampling=sampling, constraint=ABC, max_tokens=200)
        assert re.fullmatch("(abc|xyz)+[mno]", decode_text(answer.tokens))
        assert answer.end.finish_reason == "stop"


def test_a_trigger_can_begin_in_the_prompt():
    constraint = GrammarConstraint(triggers=((b">>>f\n", 'start: "1"'),), prefix=b">>>")
    matcher = GrammarCompiler(PieceVocabulary()).compile(constraint)
    assert matcher.get_allowed_tokens() is None
    for byte in b"f\n":
        matcher.accept(byte)
    assert matcher.get_allowed_tokens().tolist() == [ord("1")]
    for byte in b"1 and f\n":  # only the first call has its trigger in the prompt
        matcher.accept(byte)
    assert matcher.get_allowed_tokens() is None


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_gbnf_grammar_of_the_sampling_parameters_is_enforced(temperature):
    engine = Engine(FakeBackend())
    for seed in range(5):
        sampling = Sampling(temperature=temperature, seed=seed, grammar='root ::= ("abc" | "xyz")+ end\nend ::= [mno]')
        answer = ask(engine, prompt(30, seed), sampling=sampling, max_tokens=200)
        assert re.fullmatch("(abc|xyz)+[mno]", decode_text(answer.tokens))
        assert answer.end.finish_reason == "stop"


@pytest.mark.parametrize(
    "grammar",
    ["root ::= (", "nonsense", "root ::= undefined", 'other ::= "a"', "(" * 5000, "root ::= " + "(" * 100_000],
)
def test_an_invalid_gbnf_grammar_is_rejected(grammar):
    with pytest.raises(InvalidGrammar):
        ask(Engine(FakeBackend()), [5], sampling=Sampling(grammar=grammar))


@pytest.mark.parametrize(
    "grammar",
    ["start: start", convert_gbnf("root ::= root"), build_json_schema_grammar({"$ref": "#"})],
    ids=["lark", "gbnf", "schema"],
)
def test_a_grammar_without_texts_is_an_error_in_plain_words(grammar):
    with pytest.raises(InvalidGrammar) as caught:
        BYTES.compile(GrammarConstraint(grammar=grammar)).get_allowed_tokens()
    assert str(caught.value) == "invalid grammar: no text continues it here"


def test_an_error_shows_the_place_in_the_grammar():
    with pytest.raises(InvalidGrammar) as caught:
        BYTES.compile(GrammarConstraint(grammar="start: name"))
    assert 'unknown name: "name"' in str(caught.value)
    assert "1 | start: name" in str(caught.value)
    assert "<grammar>" not in str(caught.value)


def test_a_gbnf_grammar_beside_another_constraint_is_rejected():
    with pytest.raises(InvalidArgument, match=r"sampling\.grammar"):
        ask(Engine(FakeBackend()), [5], sampling=Sampling(grammar="root ::= [0-9]"), constraint=ABC)


def test_a_completion_ends_with_its_grammar_without_another_decode():
    backend = FakeBackend()
    answer = ask(Engine(backend), [5], constraint=GrammarConstraint(grammar='start: "abc"'))
    assert decode_text(answer.tokens) == "abc"
    assert [rows for step in backend.decode_history for _, rows in step] == [1, 3]  # the prompt, and what is forced


def test_constrained_and_unconstrained_requests_share_decodes_and_do_not_affect_each_other():
    alone = ask(Engine(FakeBackend()), prompt(20), ignore_eos=True, max_tokens=12)
    engine = Engine(FakeBackend())
    answers = play(
        engine,
        request("unconstrained", prompt(20), ignore_eos=True, max_tokens=12),
        request("constrained", prompt(20, 1), constraint=ABC, max_tokens=50),
    )
    assert engine.counters.max_batch_jobs == 2
    assert answers["unconstrained"].tokens == alone.tokens
    assert re.fullmatch("(abc|xyz)+[mno]", decode_text(answers["constrained"].tokens))


def test_max_tokens_and_stops_apply_inside_a_grammar():
    engine = Engine(FakeBackend())
    endless = GrammarConstraint(grammar="start: /(abc)+/")
    assert ask(engine, [5], constraint=endless, max_tokens=7).reason == "length"
    stopped = ask(engine, [5], constraint=endless, max_tokens=70, stop=(b"ca",))
    assert stopped.end.stop_reason == b"ca"


def test_a_triggered_grammar_does_not_constrain_tokens_before_its_trigger():
    plain = ask(Engine(FakeBackend()), prompt(9), ignore_eos=True, max_tokens=60)
    plain_text = decode_text(plain.tokens)
    trigger = plain_text[10:12].encode()
    constraint = GrammarConstraint(triggers=((trigger, 'start: "abcabcabc"'),))
    answer = ask(Engine(FakeBackend()), prompt(9), ignore_eos=True, max_tokens=60, constraint=constraint)
    start = plain_text.index(trigger.decode()) + 2
    assert answer.tokens[:start] == plain.tokens[:start]
    assert decode_text(answer.tokens)[start : start + 9] == "abcabcabc"
    assert len(answer.tokens) == 60  # unconstrained again after the end of the grammar


def test_stop_after_first_ends_the_completion_with_the_grammar():
    constraint = GrammarConstraint(triggers=((b"a", 'start: "xyz"'), (b"b", 'start: "zyx"')), stop_after_first=True)
    answer = ask(Engine(FakeBackend()), prompt(9), ignore_eos=True, max_tokens=400, constraint=constraint)
    assert re.fullmatch("[^ab]*(axyz|bzyx)", decode_text(answer.tokens))
    assert answer.end.finish_reason == "stop"


def test_other_text_after_a_complete_one_ends_the_completion_if_asked():
    matcher = BYTES.compile(GrammarConstraint(grammar='start: ("ab")+', stop_at_other_text=True))
    for byte in b"ab":
        assert list(matcher.get_allowed_tokens()) == [byte]
        assert matcher.replace_other_text(byte) == byte
        matcher.accept(byte)
    assert matcher.get_allowed_tokens() is None  # the model chooses among all tokens
    assert matcher.replace_other_text(ord("a")) == ord("a")
    assert matcher.replace_other_text(ord("x")) == PieceVocabulary.end_token
    endless = GrammarConstraint(grammar="start: /(abc|xyz)+/", stop_at_other_text=True)
    answer = ask(Engine(FakeBackend()), prompt(9), ignore_eos=False, max_tokens=400, constraint=endless)
    assert re.fullmatch("(abc|xyz)+", decode_text(answer.tokens))
    assert answer.end.finish_reason == "stop"


def test_bytes_of_a_token_after_the_trigger_belong_to_the_grammar():
    class PairTokens:
        pieces = (b"", b"x<", b">a", b"b", b"c", b"a")
        eog_tokens = control_tokens = frozenset({0})

        def tokenize(self, text):
            return [self.pieces.index(bytes([byte])) for byte in text]

    matcher = GrammarCompiler(PairTokens()).compile(GrammarConstraint(triggers=((b"<>", 'start: "ab"'),)))
    for token in (1, 2):
        assert matcher.get_allowed_tokens() is None
        matcher.accept(token)
    assert list(matcher.get_allowed_tokens()) == [3]


@both_hosts
@pytest.mark.parametrize("grammar", ["start: /(/", "start: unknown", "no grammar at all", 'start: "é"'])
def test_an_invalid_grammar_fails_its_request_only(host, grammar):
    with host(FakeEngineFactory()) as engine:
        invalid = engine.submit(request("invalid", prompt(5), constraint=GrammarConstraint(grammar=grammar)))
        assert isinstance(read_error(invalid), InvalidGrammar)
        valid = read_events(engine.submit(request("valid", prompt(5), constraint=ABC, max_tokens=99)))
        assert re.fullmatch("(abc|xyz)+[mno]", decode_text(get_tokens(valid)))


@pytest.mark.parametrize("grammar", ["", None, 7])
def test_a_grammar_must_be_non_empty_text(grammar):
    with pytest.raises(InvalidArgument):
        GrammarConstraint(grammar=grammar)


def test_a_grammar_over_the_length_limit_is_rejected():
    with pytest.raises(InvalidGrammar, match=r"8,388,609 characters, 8,388,608 are allowed"):
        GrammarConstraint(grammar="x" * (8 * 1024 * 1024 + 1))


def test_a_request_can_be_cancelled_while_its_grammar_compiles(monkeypatch):
    compiling, proceed = threading.Event(), threading.Event()

    def wait(factory: TokenConstraintFactory, request: Request) -> None:
        if request.is_constrained:
            compiling.set()
            proceed.wait(60)

    monkeypatch.setattr(TokenConstraintFactory, "build", wait)
    with EngineThread(FakeEngineFactory()) as engine:
        constrained = engine.submit(request("constrained", prompt(5), constraint=ABC))
        assert compiling.wait(60)
        assert isinstance(read_events(engine.submit(request("other", prompt(5))))[-1], Finished)  # does not wait for it
        constrained.cancel()
        assert isinstance(read_error(constrained), Cancelled)
        proceed.set()


@both_hosts
def test_constrained_requests_submitted_together_start_together(host):
    with host(FakeEngineFactory(pause=0.02)) as engine:  # a prefill costs more than a copy of its result
        requests = [request(str(n), prompt(40), constraint=ABC, max_tokens=99, sampling=GREEDY) for n in range(3)]
        answers = [read_events(stream) for stream in engine.submit_together(requests)]
    assert len({tuple(get_tokens(answer)) for answer in answers}) == 1
    assert sum(answer[-1].usage.cached_tokens for answer in answers) >= 2 * 39
