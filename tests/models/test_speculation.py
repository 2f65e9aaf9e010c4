"""Speculative decoding on SmolLM2: the same tokens, up to the numeric effect of the batch shape."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest
from benchmark_models import prune_model

import afterglow
from afterglow.engine.types.settings import EngineSettings

pytestmark = pytest.mark.model
MARGIN = 0.1  # in logprob; the batch shape changes logits far less, a wrong KV cache far more
LIST = "flour, butter, sugar, eggs, milk, salt, apples, pears, plums, cherries, walnuts, honey, cinnamon, yeast"
PROMPTS = (
    f"The list: {LIST}.\nThe same list again: {LIST[:40]}",
    "Once upon a time there was a river that",
)
SMALL = {"context": 512, "sequences": 1, "threads": 1}


def check_equal(completion: afterglow.Completion, plain: afterglow.Completion) -> None:
    """Check that the tokens are equal, up to the first one at which plain decoding was undecided."""
    choice = plain.choices[0]
    for index, (token, expected) in enumerate(zip_longest(completion.tokens, plain.tokens)):
        if token != expected:
            (_, first), (_, second) = choice.alternatives[index]
            assert first - second < MARGIN, f"token {index}: {token} instead of {expected}"
            return


def test_c14_the_ngram_drafter_and_an_identical_draft_model_change_no_token(smollm2: Path) -> None:
    ngram = EngineSettings(speculation=4, drafters=("ngram",))
    draft = EngineSettings(speculation=3, drafters=("draft",))
    with (
        afterglow.load(smollm2, engine=ngram, **SMALL) as ngram_model,
        afterglow.load(smollm2, engine=draft, draft=smollm2, **SMALL) as draft_model,
        afterglow.load(smollm2, engine=EngineSettings(speculation="off"), **SMALL) as plain,
    ):
        for prompt in PROMPTS:
            expected = plain.complete(prompt, max_tokens=30, temperature=0, logprobs=2)
            check_equal(ngram_model.complete(prompt, max_tokens=30, temperature=0), expected)
            completion = draft_model.complete(prompt, max_tokens=30, temperature=0)
            check_equal(completion, expected)
            assert completion.usage.accepted_tokens > 0.8 * completion.usage.draft_tokens > 0
        usage = ngram_model.complete(PROMPTS[0], max_tokens=30, temperature=0).usage
        assert usage.accepted_tokens > 10


def test_c14_a_draft_model_with_fewer_layers_changes_no_token(smollm2: Path, tmp_path: Path) -> None:
    draft = tmp_path / "pruned.gguf"
    prune_model(smollm2, draft, layers=29)
    settings = EngineSettings(speculation=3, drafters=("draft",))
    with (
        afterglow.load(smollm2, engine=settings, draft=draft, **SMALL) as model,
        afterglow.load(smollm2, engine=EngineSettings(speculation="off"), **SMALL) as plain,
    ):
        for prompt in PROMPTS:
            completion = model.complete(prompt, max_tokens=30, temperature=0)
            check_equal(completion, plain.complete(prompt, max_tokens=30, temperature=0, logprobs=2))
            assert 0 < completion.usage.accepted_tokens < completion.usage.draft_tokens
