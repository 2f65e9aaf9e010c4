"""The option `reasoning`: whether and how long a model reasons, as a token budget and template variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from afterglow.chat.output.reasoning import ReasoningFormat
from afterglow.errors import InvalidArgument, UnsupportedOption

# Token budget of an effort if the chat template does not support efforts. None: no limit.
EFFORT_BUDGET_TOKENS: dict[str, int | None] = {
    "none": 0, "minimal": 128, "low": 512, "medium": 2048, "high": 8192, "xhigh": None, "max": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """Whether reasoning is allowed, its token budget (None: no limit), and variables for the template."""

    allowed: bool = True
    budget_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def parse_reasoning_options(
    value: bool | int | str | None, reasoning_format: ReasoningFormat | None, template: str | None
) -> ReasoningOptions:
    """Parse `reasoning` for a model: on or off, a budget in tokens, or one of OpenAI's efforts.

    >>> parse_reasoning_options("none", None, None).allowed
    False
    >>> parse_reasoning_options(100, ReasoningFormat("<think>", "</think>", ""), "<think>").budget_tokens
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
        raise UnsupportedOption("reasoning", "the model's chat template does not support reasoning")
    if value is True:
        return ReasoningOptions(chat_template_kwargs={"enable_thinking": True})
    if isinstance(value, int):
        return ReasoningOptions(budget_tokens=value, chat_template_kwargs={"enable_thinking": True})
    if "reasoning_effort" in (template or ""):
        return ReasoningOptions(chat_template_kwargs={"enable_thinking": True, "reasoning_effort": value})
    return ReasoningOptions(budget_tokens=EFFORT_BUDGET_TOKENS[value], chat_template_kwargs={"enable_thinking": True})
