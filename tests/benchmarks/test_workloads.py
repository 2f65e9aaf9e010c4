"""Workloads are the same data every time, an ideal cache is what it says, and texts are read back as they were said."""

from __future__ import annotations

import dataclasses
import json
from hashlib import blake2b

import hybrid
import pytest
from ideal import TEMPLATE, Ideal
from words import WORDS, text
from workloads import WORKLOADS, Ask, HangUp, Restart, Step, Together, Workload

from afterglow.llama.model import LlamaModel, ModelSettings


def asks(workload: Workload) -> list[Ask]:
    """Every request of a workload, in order."""

    def of(step: Step) -> tuple[Ask, ...]:
        match step:
            case Ask():
                return (step,)
            case Together(asked):
                return asked
            case HangUp():
                return (step.ask, step.other)
            case Restart():
                return ()

    return [ask for step in workload.steps for ask in of(step)]


@pytest.mark.parametrize("letter", WORKLOADS)
def test_a_seed_gives_the_same_workload_and_another_seed_another(letter):
    make = WORKLOADS[letter]
    assert make("one", True) == make("one", True)
    assert make("one", True) != make("two", True)
    assert make("one", True).letter == letter


def test_the_workloads_are_those_that_were_measured():
    """A change of a size or a text makes old results mean something else: measure again, then change this."""
    written = [dataclasses.asdict(make("pinned", False)) for make in WORKLOADS.values()]
    assert blake2b(json.dumps(written).encode(), digest_size=8).hexdigest() == "81341bcf01b56053"


@pytest.mark.parametrize("letter", WORKLOADS)
def test_every_conversation_begins_with_what_somebody_says_and_fits_its_server(letter):
    for quick in (True, False):
        workload = WORKLOADS[letter]("any", quick)
        begun: dict[str, int] = {}
        for ask in asks(workload):
            if ask.of is not None:
                assert ask.of[0] in begun
                begun[ask.talk] = begun[ask.of[0]]
            said = sum(len(str(message["content"]).split()) for message in ask.says)
            begun[ask.talk] = begun.get(ask.talk, 0) + said + ask.answer
        assert max(begun.values()) < workload.context


def test_quick_workloads_have_less_in_them():
    for make in WORKLOADS.values():
        sizes = [sum(len(str(ask.says)) for ask in asks(make("any", quick))) for quick in (True, False)]
        assert sizes[0] < sizes[1]


def test_what_was_computed_before_is_not_needed_again():
    cache, prompt = Ideal(), list(range(100))
    assert cache.needed(prompt) == 100
    assert cache.needed(prompt) == 1  # the last one always
    assert cache.needed([*prompt, 7, 7]) == 2
    assert cache.needed([*prompt[:60], 7, 7, 7]) == 3


def test_an_answer_is_known_but_for_its_last_token():
    cache, prompt = Ideal(), list(range(50))
    cache.needed(prompt)
    cache.answered(prompt, [101, 102, 103])
    assert cache.needed([*prompt, 101, 102, 103, 9, 9]) == 3


def test_the_first_tokens_of_a_template_count_for_nothing():
    cache = Ideal()
    cache.needed(list(range(50)))
    assert cache.needed([*range(TEMPLATE), 99, 99]) == TEMPLATE + 2


def test_the_hybrid_model_reads_back_what_it_says(tmp_path):
    hybrid.write(tmp_path / "model.gguf", hybrid.TINY)
    with LlamaModel.load(tmp_path / "model.gguf", ModelSettings(vocab_only=True)) as model:
        vocabulary, said = model.vocabulary, " " + " ".join(WORDS)
        tokens = vocabulary.tokenize(said)
        assert len(tokens) == len(WORDS)
        assert set(tokens) == set(hybrid.tokens()[1])
        assert vocabulary.detokenize(tokens) in (said, said.encode())
        assert len(vocabulary.tokenize(text("any", 200))) < 240  # words and full stops
