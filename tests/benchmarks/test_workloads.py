"""Workloads are reproducible, the ideal cache is exact, and generated text tokenizes back to the same tokens."""

from __future__ import annotations

import dataclasses
import json
from hashlib import blake2b

import hybrid
import pytest
from ideal_cache import TEMPLATE_TOKENS, IdealCache
from synthetic_inputs import WORDS, random_text
from workloads import WORKLOADS, Ask, HangUp, Restart, Step, Together, Workload

from afterglow.llama.model import LlamaModel, ModelSettings


def list_asks(workload: Workload) -> list[Ask]:
    """Return all requests of a workload in order."""

    def list_step_asks(step: Step) -> tuple[Ask, ...]:
        match step:
            case Ask():
                return (step,)
            case Together(asks):
                return asks
            case HangUp():
                return (step.ask, step.other)
            case Restart():
                return ()

    return [ask for step in workload.steps for ask in list_step_asks(step)]


@pytest.mark.parametrize("letter", WORKLOADS)
def test_a_seed_gives_the_same_workload_and_another_seed_another(letter):
    build = WORKLOADS[letter]
    assert build("one", True) == build("one", True)
    assert build("one", True) != build("two", True)
    assert build("one", True).letter == letter


def test_the_workloads_are_those_that_were_measured():
    """If a size, text or field name changes, old results are not comparable: measure again, then change the digest."""
    workloads = {letter: dataclasses.asdict(build("pinned", False)) for letter, build in WORKLOADS.items()}
    native, fan_out, short = workloads.pop("k"), workloads.pop("l"), workloads.pop("m")
    assert blake2b(json.dumps([*workloads.values()]).encode(), digest_size=8).hexdigest() == "81341bcf01b56053"
    assert blake2b(json.dumps(native).encode(), digest_size=8).hexdigest() == "bf332209d465a12d"
    assert blake2b(json.dumps(fan_out).encode(), digest_size=8).hexdigest() == "7ed89bb3efa7f12c"
    assert blake2b(json.dumps(short).encode(), digest_size=8).hexdigest() == "79f23c155057dde3"


@pytest.mark.parametrize("letter", WORKLOADS)
def test_every_conversation_starts_with_a_message_and_fits_into_its_slot(letter):
    for quick in (True, False):
        workload = WORKLOADS[letter]("any", quick)
        lengths: dict[str, int] = {}
        for ask in list_asks(workload):
            if ask.of is not None:
                assert ask.of[0] in lengths
                lengths[ask.talk] = lengths[ask.of[0]]
            words = sum(len(str(message["content"]).split()) for message in ask.says)
            lengths[ask.talk] = lengths.get(ask.talk, 0) + words + ask.answer
        assert max(lengths.values()) < workload.context


def test_quick_workloads_are_smaller():
    for build in WORKLOADS.values():
        sizes = [sum(len(str(ask.says)) for ask in list_asks(build("any", quick))) for quick in (True, False)]
        assert sizes[0] < sizes[1]


def test_the_ideal_cache_computes_each_token_once_and_the_last_token_always():
    cache, prompt = IdealCache(), list(range(100))
    assert cache.add_prompt(prompt) == 100
    assert cache.add_prompt(prompt) == 1  # the last token
    assert cache.add_prompt([*prompt, 7, 7]) == 2
    assert cache.add_prompt([*prompt[:60], 7, 7, 7]) == 3


def test_the_ideal_cache_has_completions_without_their_last_token():
    cache, prompt = IdealCache(), list(range(50))
    cache.add_prompt(prompt)
    cache.add_completion(prompt, [101, 102, 103])
    assert cache.add_prompt([*prompt, 101, 102, 103, 9, 9]) == 3


def test_a_prefix_hit_within_the_template_does_not_count():
    cache = IdealCache()
    cache.add_prompt(list(range(50)))
    assert cache.add_prompt([*range(TEMPLATE_TOKENS), 99, 99]) == TEMPLATE_TOKENS + 2


@pytest.mark.native
def test_text_of_the_hybrid_model_tokenizes_back_to_the_same_tokens(tmp_path):
    hybrid.write(tmp_path / "model.gguf", hybrid.TINY_DECODER)
    with LlamaModel.load(tmp_path / "model.gguf", ModelSettings(vocab_only=True)) as model:
        vocabulary, text = model.vocabulary, " " + " ".join(WORDS)
        tokens = vocabulary.tokenize(text)
        assert len(tokens) == len(WORDS)
        assert set(tokens) == set(hybrid.build_tokens()[1])
        assert vocabulary.detokenize(tokens) in (text, text.encode())
        assert len(vocabulary.tokenize(random_text("any", 200))) < 240  # words and full stops
