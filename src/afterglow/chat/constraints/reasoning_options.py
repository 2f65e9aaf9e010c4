"""Whether and how long a model thinks: what callers write as `reasoning`, and what the model's template makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from afterglow.chat.output.reasoning import ReasoningFormat
from afterglow.errors import InvalidArgument, UnsupportedOption

# Tokens that an effort allows where the model's template knows no efforts. None: as many as it likes.
EFFORT_BUDGET_TOKENS: dict[str, int | None] = {
    "none": 0, "minimal": 128, "low": 512, "medium": 2048, "high": 8192, "xhigh": None, "max": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """Whether thoughts are `allowed`, in how many tokens, and what the template has to be told."""

    allowed: bool = True
    budget_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def parse_reasoning_options(
    value: bool | int | str | None, reasoning_format: ReasoningFormat | None, template: str | None
) -> ReasoningOptions:
    """What `reasoning` means for this model: on or off, a budget in tokens, or one of OpenAI's efforts.

    >>> thinking(100, STYLES[1], "<think>").budget
    100
    """
    if isinstance(value, str) and value not in EFFORT_BUDGET_TOKENS:
        raise InvalidArgument(
            "reasoning", f"must be one of {', '.join(EFFORT_BUDGET_TOKENS)}, a number of tokens, or on or off"
        )
    if not isinstance(value, bool | int | str | None) or (isinstance(value, int) and value < 0):
        raise InvalidArgument("reasoning", f"must be a number of tokens, on or off, or an effort, not {value!r}")
    if value is None:
        return ReasoningOptions()
    if value is False or value in (0, "none"):
        return ReasoningOptions(False, 0, {"enable_thinking": False})
    if reasoning_format is None:
        raise UnsupportedOption("reasoning", "the model's chat template knows no thoughts")
    if value is True:
        return ReasoningOptions(chat_template_kwargs={"enable_thinking": True})
    if isinstance(value, int):
        return ReasoningOptions(budget_tokens=value, chat_template_kwargs={"enable_thinking": True})
    if "reasoning_effort" in (template or ""):
        return ReasoningOptions(chat_template_kwargs={"enable_thinking": True, "reasoning_effort": value})
    return ReasoningOptions(budget_tokens=EFFORT_BUDGET_TOKENS[value], chat_template_kwargs={"enable_thinking": True})
