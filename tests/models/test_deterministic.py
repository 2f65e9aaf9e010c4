"""Deterministic mode on a real model: cold, warm, restored, forked and concurrent runs give identical tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import afterglow
from afterglow import EngineSettings

RIVER = Path(__file__).parents[1] / "data" / "river.txt"
SAMPLE, ALL = 20, 100
TOKENS = 10


@pytest.fixture(scope="module")
def deterministic(smollm2: Path) -> Iterator[afterglow.Model]:
    with afterglow.load(smollm2, context=1024, engine=EngineSettings(deterministic=True, grid=32)) as model:
        yield model


def prompts(model: afterglow.Model, count: int) -> list[list[int]]:
    """Pieces of a text after one beginning: they share their first seventy tokens."""
    text = model.tokenize(RIVER.read_text())
    return [text[:70] + text[70 + 15 * n : 90 + 18 * n] for n in range(count)]


def ways(model: afterglow.Model, prompt: list[int], other: list[int]) -> dict[str, tuple[int, ...]]:
    """The same prompt in five situations, each really the one it is called."""
    answers = {}
    model.clear_cache()
    cold = model.complete(prompt, max_tokens=TOKENS)
    assert cold.usage.cached_tokens == 0
    answers["cold"] = cold.tokens
    model.snapshot("kept")
    warm = model.complete(prompt, max_tokens=TOKENS)
    assert warm.usage.cached_tokens >= 64
    answers["warm"] = warm.tokens
    model.clear_cache()
    model.restore("kept")
    restored = model.complete(prompt, max_tokens=TOKENS)
    assert restored.usage.cached_tokens >= 64
    answers["restored"] = restored.tokens
    model.clear_cache()
    model.complete(other, max_tokens=1)
    forked = model.complete(prompt, max_tokens=TOKENS)
    assert forked.usage.cached_tokens == 64  # two chunks of the common beginning
    answers["forked"] = forked.tokens
    model.clear_cache()
    asked = [model.build_request(entries, max_tokens=TOKENS) for entries in (other, prompt, other[:50])]
    streams = [model._get_host().submit(request) for request in asked]
    for stream in streams:
        tokens = [event.token for event in stream if hasattr(event, "token")]
        if stream is streams[1]:
            answers["concurrent"] = tuple(tokens)
    return answers


def compare(model: afterglow.Model, count: int) -> None:
    every = prompts(model, count)
    for index, prompt in enumerate(every):
        answers = ways(model, prompt, every[index - 1])
        assert len(set(answers.values())) == 1, answers


def test_five_ways_to_compute_a_prompt_give_the_same_tokens(deterministic: afterglow.Model) -> None:
    compare(deterministic, SAMPLE)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_five_ways_give_the_same_tokens_for_many_prompts(deterministic: afterglow.Model) -> None:
    compare(deterministic, ALL)
