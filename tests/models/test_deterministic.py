"""Deterministic mode on SmolLM2: cold, warm, restored, forked and concurrent runs give identical tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import afterglow
from afterglow import EngineSettings

pytestmark = pytest.mark.model
RIVER = Path(__file__).parents[1] / "data" / "river.txt"
FEW_PROMPTS, MANY_PROMPTS = (0, 3, 7), range(100)  # by number: the later, the longer
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def deterministic(smollm2: Path) -> Iterator[afterglow.Model]:
    with afterglow.load(smollm2, context=1024, engine=EngineSettings(deterministic=True, grid=32)) as model:
        yield model


def build_prompts(model: afterglow.Model, numbers: Iterable[int]) -> list[list[int]]:
    """Return parts of a text after a common prefix of 70 tokens."""
    text = model.tokenize(RIVER.read_text())
    return [text[:70] + text[70 + 15 * n : 90 + 18 * n] for n in numbers]


def complete_from_each_state(model: afterglow.Model, prompt: list[int], other: list[int]) -> dict[str, tuple[int, ...]]:
    """Complete a prompt from five cache states and return the tokens of each. Usage proves each state."""
    tokens = {}
    model.clear_cache()
    cold = model.complete(prompt, max_tokens=MAX_TOKENS)
    assert cold.usage.cached_tokens == 0
    tokens["cold"] = cold.tokens
    model.snapshot("prompt")
    warm = model.complete(prompt, max_tokens=MAX_TOKENS)
    assert warm.usage.cached_tokens >= 64
    tokens["warm"] = warm.tokens
    model.clear_cache()
    model.restore("prompt")
    restored = model.complete(prompt, max_tokens=MAX_TOKENS)
    assert restored.usage.cached_tokens >= 64
    tokens["restored"] = restored.tokens
    model.clear_cache()
    model.complete(other, max_tokens=1)
    forked = model.complete(prompt, max_tokens=MAX_TOKENS)
    assert forked.usage.cached_tokens == 64  # two chunks of the common prefix
    tokens["forked"] = forked.tokens
    model.clear_cache()
    requests = [model.build_request(entries, max_tokens=MAX_TOKENS) for entries in (other, prompt, other[:50])]
    streams = [model._get_host().submit(request) for request in requests]
    for stream in streams:
        generated = tuple(event.token for event in stream if hasattr(event, "token"))
        if stream is streams[1]:
            tokens["concurrent"] = generated
    return tokens


def check_prompts(model: afterglow.Model, numbers: Iterable[int]) -> None:
    prompts = build_prompts(model, numbers)
    for index, prompt in enumerate(prompts):
        tokens = complete_from_each_state(model, prompt, prompts[index - 1])
        assert len(set(tokens.values())) == 1, tokens


def test_a_prompt_gives_the_same_tokens_from_every_cache_state(deterministic: afterglow.Model) -> None:
    check_prompts(deterministic, FEW_PROMPTS)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_many_prompts_give_the_same_tokens_from_every_cache_state(deterministic: afterglow.Model) -> None:
    check_prompts(deterministic, MANY_PROMPTS)
