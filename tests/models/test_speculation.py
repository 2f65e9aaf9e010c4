"""Speculation on a model that people run: the same answer, within what the shape of a batch moves."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

from pruned import prune

import afterglow
from afterglow.engine.types.settings import EngineSettings

MARGIN = 0.1  # in logprob; the shape of a batch moves logits by far less, a wrong past by far more
LIST = "flour, butter, sugar, eggs, milk, salt, apples, pears, plums, cherries, walnuts, honey, cinnamon, yeast"
PROMPTS = (
    f"The list: {LIST}.\nThe same list again: {LIST[:40]}",
    "Once upon a time there was a river that",
)
SMALL = {"context": 512, "sequences": 1, "threads": 1}


def agree(found: afterglow.Completion, plain: afterglow.Completion) -> None:
    """Equal tokens, up to one where plain decoding was undecided itself."""
    choice = plain.choices[0]
    for index, (one, other) in enumerate(zip_longest(found.tokens, plain.tokens)):
        if one != other:
            (_, first), (_, second) = choice.alternatives[index]
            assert first - second < MARGIN, f"token {index}: {one} instead of {other}"
            return


def test_c14_what_was_said_before_and_the_model_as_its_own_draft_change_no_answer(smollm2: Path) -> None:
    lookup = EngineSettings(speculation=4, drafters=("lookup",))
    draft = EngineSettings(speculation=3, drafters=("draft",))
    with (
        afterglow.load(smollm2, engine=lookup, **SMALL) as copying,
        afterglow.load(smollm2, engine=draft, draft=smollm2, **SMALL) as twin,
        afterglow.load(smollm2, engine=EngineSettings(speculation="off"), **SMALL) as plain,
    ):
        for prompt in PROMPTS:
            expected = plain.complete(prompt, max_tokens=30, temperature=0, logprobs=2)
            agree(copying.complete(prompt, max_tokens=30, temperature=0), expected)
            found = twin.complete(prompt, max_tokens=30, temperature=0)
            agree(found, expected)
            assert found.usage.accepted_tokens > 0.8 * found.usage.draft_tokens > 0
        copied = copying.complete(PROMPTS[0], max_tokens=30, temperature=0).usage
        assert copied.accepted_tokens > 10


def test_c14_a_draft_of_fewer_layers_is_right_now_and_then_and_changes_no_answer(smollm2: Path, tmp_path: Path) -> None:
    draft = tmp_path / "pruned.gguf"
    prune(smollm2, draft, layers=29)
    settings = EngineSettings(speculation=3, drafters=("draft",))
    with (
        afterglow.load(smollm2, engine=settings, draft=draft, **SMALL) as model,
        afterglow.load(smollm2, engine=EngineSettings(speculation="off"), **SMALL) as plain,
    ):
        for prompt in PROMPTS:
            found = model.complete(prompt, max_tokens=30, temperature=0)
            agree(found, plain.complete(prompt, max_tokens=30, temperature=0, logprobs=2))
            assert 0 < found.usage.accepted_tokens < found.usage.draft_tokens
