"""Explains prefix misses in plain English: where a prompt diverges from the cached prefix, and the likely reason.

Reads rendered text and knows only what chat templates have in common. Inferred reasons are labeled as likely.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from afterglow.chat.output.reasoning import REASONING_FORMATS
from afterglow.chat.prompt import find_common_prefix
from afterglow.engine.kvcache.explain import Explanation

MissReason: TypeAlias = Literal[
    "not cached", "repeated", "fully reused", "continuation", "evicted", "no checkpoint", "window moved",
    "deterministic grid", "tokenization", "whitespace", "date", "number", "tools reordered", "tools changed",
    "reasoning stripped", "system prompt", "assistant message", "tool result", "user message", "text",
]  # fmt: skip

CONTEXT_CHARACTERS = 60  # shown on each side of a difference
ROLE_ALIASES = {
    "developer": "system", "SYSTEM_PROMPT": "system", "AVAILABLE_TOOLS": "system", "human": "user", "INST": "user",
    "model": "assistant", "bot": "assistant", "ipython": "tool", "function": "tool", "TOOL_RESULTS": "tool",
}  # fmt: skip
MESSAGE_HEADER = re.compile(
    r"(?:<\|im_start\|>|<\|start_header_id\|>|<\|start_of_role\|>|<\|start\|>|<\|turn>|<start_of_turn>|<\||\[|### )\s*"
    r"(system|user|assistant|tool|" + "|".join(ROLE_ALIASES) + r")\b"
)
MESSAGE_END = re.compile(r"<\|[a-z_]+\|>|<turn\|>|<end_of_turn>|</s>|\[/INST\]")
TOOL_DEFINITION = re.compile(r'"(?:parameters|function)"\s*:|<tools>|AVAILABLE_TOOLS')
TOOL_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
MONTH_PATTERN = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sep(?:tember)?|oct(?:ober)?"
)
MONTH_OR_DAY_PATTERN = "nov(?:ember)?|dec(?:ember)?|(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
DATE_WORD = re.compile(rf"\W*(?:{MONTH_PATTERN}|{MONTH_OR_DAY_PATTERN})\W*", re.IGNORECASE)
DATE_OR_TIME = re.compile(
    rf"\d{{4}}-\d\d|\d\d?[:.]\d\d\b|\d\d?/\d\d?/|\b(?:{MONTH_PATTERN}|{MONTH_OR_DAY_PATTERN}|date|time|today|now)\b",
    re.IGNORECASE,
)
MISS_REASON_BY_ROLE: dict[str | None, MissReason] = {
    "system": "system prompt",
    "assistant": "assistant message",
    "tool": "tool result",
    "user": "user message",
}

CACHE_REASON_MESSAGES: dict[MissReason, str] = {  # reasons that follow from the state of the cache
    "not cached": "No cached prefix begins like this prompt: it is new, or was cached for another model, setting or "
    "API key.",
    "repeated": "The whole prompt is cached, with the logits after it: nothing is computed.",
    "fully reused": "This is all that can be reused; the last token is computed for its logits.",
    "continuation": "The prompt continues after the end of the cached prefix, like the next turn of a conversation.",
    "evicted": "{explanation.evicted_entries:,} tokens were cached and have been evicted: increase the cache size, or "
    "pin them.",
    "no checkpoint": "{explanation.shared_entries:,} tokens are cached, but this kind of model can only resume at a "
    "checkpoint, and there is none closer to the divergence.",
    "window moved": "{explanation.shared_entries:,} tokens are cached, but the sliding window of this model has moved "
    "past the divergence, and there is no checkpoint closer to it.",
    "deterministic grid": "{explanation.shared_entries:,} tokens are cached; deterministic mode reuses only whole "
    "chunks.",
}
TEXT_REASON_MESSAGES: dict[MissReason, str] = {  # reasons inferred from the texts
    "tokenization": "The text is the same but tokenized differently: send the tokens of responses as they were "
    "generated.",
    "whitespace": "Likely cause: whitespace changed in {location}.",
    "date": "Likely cause: a date or time changed in {location}. Move it after the text that stays the same, or into "
    "the last message.",
    "number": "Likely cause: a number changed in {location}. Move text that changes after text that stays the same.",
    "tools reordered": "Likely cause: the same tools in a different order. Always send them in the same order.",
    "tools changed": "Likely cause: different tools, or a changed tool description.",
    "reasoning stripped": "Likely cause: the reasoning of an earlier response was removed. Many templates do this "
    "after the next user message; the text before it stays cached.",
    "system prompt": "Likely cause: a different system prompt.",
    "assistant message": "Likely cause: an earlier assistant message differs from the generated response.",
    "tool result": "Likely cause: a different tool result.",
    "user message": "The user message is different or was edited.",
    "text": "The text is different from there on.",
}


REASON_SUMMARIES: dict[MissReason, str] = {  # clauses after "because"
    "not cached": "no cached prefix begins like this prompt",
    "repeated": "the whole prompt is cached, with the logits after it",
    "fully reused": "the logits after the last token are not cached",
    "continuation": "the prompt continues after the cached prefix",
    "evicted": "{explanation.evicted_entries:,} tokens were cached and have been evicted",
    "no checkpoint": "there is no checkpoint closer to the end of the {explanation.shared_entries:,} cached tokens",
    "window moved": "the sliding window has moved past the end of the {explanation.shared_entries:,} cached tokens",
    "deterministic grid": "deterministic mode reuses whole chunks only",
    "tokenization": "the same text was tokenized differently",
    "whitespace": "whitespace changed in {location}",
    "date": "a date or time changed in {location}",
    "number": "a number changed in {location}",
    "tools reordered": "the tools came in a different order",
    "tools changed": "a tool or its description changed",
    "reasoning stripped": "the reasoning of an earlier response was removed",
    "system prompt": "the system prompt is different",
    "assistant message": "an earlier assistant message differs from the generated response",
    "tool result": "a tool result is different",
    "user message": "the user message is different",
    "text": "the text is different",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MissReport:
    """Why a prompt missed. `shared_text` precedes the divergence; `prompt_text` and `cached_text` follow it in the
    prompt and in the cached prefix."""

    reason: MissReason
    message: str
    summary: str  # clause after "because"
    shared_text: str
    prompt_text: str
    cached_text: str


def explain_miss(explanation: Explanation, *, shared_text: str, prompt_text: str, cached_text: str) -> MissReport:
    """Explain a miss from the engine's explanation and the texts around the divergence.

    `shared_text` is all the text that the prompt shares with the nearest cached prefix; `prompt_text` and `cached_text`
    are the continuations.

    >>> explanation = Explanation(
    ...     prompt_entries=50,
    ...     reused_entries=9,
    ...     shared_entries=9,
    ...     next_prompt_entry=1,
    ...     next_cached_entry=2,
    ...     cause="fully reused",
    ... )
    >>> shared = "<|im_start|>system\\nToday is "
    >>> explain_miss(explanation, shared_text=shared, prompt_text="Tuesday. Be", cached_text="Monday. Be").reason
    'date'
    """
    reason = _find_cache_reason(explanation, shared_text, prompt_text, cached_text) or infer_text_reason(
        shared_text, prompt_text, cached_text
    )
    role = find_last_role(shared_text)
    location = "the text" if role is None else "the system prompt" if role == "system" else f"the {role} message"
    message = f"{explanation.reused_entries:,} of {explanation.prompt_entries:,} tokens are reused. "
    template = (CACHE_REASON_MESSAGES | TEXT_REASON_MESSAGES)[reason]
    message += template.format(location=location, explanation=explanation)
    if len(shared_text) > CONTEXT_CHARACTERS:
        shared_text = "…" + shared_text[-CONTEXT_CHARACTERS:]
    prompt_text, cached_text = _truncate(prompt_text), _truncate(cached_text)
    if reason in TEXT_REASON_MESSAGES:
        message += f" After “{shared_text}”, the prompt has “{prompt_text}” and the cached prefix “{cached_text}”."
    summary = REASON_SUMMARIES[reason].format(location=location, explanation=explanation)
    return MissReport(
        reason=reason,
        message=message,
        summary=summary,
        shared_text=shared_text,
        prompt_text=prompt_text,
        cached_text=cached_text,
    )


def _find_cache_reason(
    explanation: Explanation, shared_text: str, prompt_text: str, cached_text: str
) -> MissReason | None:
    """Return a reason that follows from the state of the cache; None if it depends on the texts."""
    if explanation.reused_entries == explanation.prompt_entries:
        return "repeated"
    if explanation.cause == "evicted":
        return "evicted"
    if not shared_text:
        return "not cached"
    if explanation.reused_entries >= explanation.prompt_entries - 1 or not prompt_text:
        return "fully reused"
    if explanation.cause in ("no checkpoint", "window moved", "deterministic grid") and explanation.lost_entries > 0:
        return explanation.cause
    return None if cached_text else "continuation"


def infer_text_reason(shared_text: str, prompt_text: str, cached_text: str) -> MissReason:
    """Infer why two texts diverge.

    >>> infer_text_reason("[INST] I have ", "3 apples", "5 apples")
    'number'
    """
    common = find_common_prefix(prompt_text, cached_text)
    if len(common) == min(len(prompt_text), len(cached_text)):
        return "tokenization"
    shared_text, prompt_text, cached_text = shared_text + common, prompt_text[len(common) :], cached_text[len(common) :]
    role = find_last_role(shared_text)
    prompt_message = _extract_message(shared_text, prompt_text)
    cached_message = _extract_message(shared_text, cached_text)
    if role == "assistant" and _has_reasoning(cached_message) != _has_reasoning(prompt_message):
        return "reasoning stripped"
    if role in (None, "system") and (TOOL_DEFINITION.search(prompt_message) or TOOL_DEFINITION.search(cached_message)):
        prompt_names, cached_names = TOOL_NAME.findall(prompt_message), TOOL_NAME.findall(cached_message)
        is_reordered = prompt_names != cached_names and sorted(prompt_names) == sorted(cached_names)
        return "tools reordered" if is_reordered else "tools changed"
    if (prompt_text[:1].isspace() or cached_text[:1].isspace()) and prompt_text.split()[:3] == cached_text.split()[:3]:
        return "whitespace"
    return _detect_changed_value(shared_text, prompt_text, cached_text) or MISS_REASON_BY_ROLE.get(role, "text")


def _detect_changed_value(shared_text: str, prompt_text: str, cached_text: str) -> MissReason | None:
    """Detect a changed date, time or number."""
    prompt_word, cached_word = _extract_word(shared_text, prompt_text), _extract_word(shared_text, cached_text)
    line = shared_text.rpartition("\n")[2][-40:]
    has_digits = any(map(str.isdigit, prompt_word)) and any(map(str.isdigit, cached_word))
    if DATE_WORD.fullmatch(prompt_word) and DATE_WORD.fullmatch(cached_word):
        return "date"
    if has_digits and (DATE_OR_TIME.search(prompt_word) or DATE_OR_TIME.search(line)):
        return "date"
    return "number" if has_digits else None


def _has_reasoning(message: str) -> bool:
    """Return whether a message has non-empty reasoning."""
    for reasoning_format in REASONING_FORMATS:
        _, start_tag, rest = message.partition(reasoning_format.start_tag)
        if start_tag and rest.partition(reasoning_format.end_tag)[0].strip():
            return True
    return False


def find_last_role(text: str) -> str | None:
    """Return the role of the message in which a text ends; None without messages or for an unknown template format.

    >>> find_last_role("<|im_start|>system\\nBe kind.<|im_end|>\\n<|im_start|>user\\nHel")
    'user'
    """
    roles = MESSAGE_HEADER.findall(text)
    return ROLE_ALIASES.get(roles[-1], roles[-1]) if roles else None


def find_first_user_text(text: str) -> str:
    """Return the text of the first user message; all of the text if there is none.

    >>> find_first_user_text("<|im_start|>system\\nBe kind.<|im_end|>\\n<|im_start|>user\\nHello<|im_end|>")
    'Hello'
    """
    for header in MESSAGE_HEADER.finditer(text):
        if ROLE_ALIASES.get(header[1], header[1]) == "user":
            content = re.sub(r"^(?:\s|\]|<\|[a-z_]+\|>)+", "", text[header.end() :])
            return MESSAGE_END.split(content, maxsplit=1)[0].strip() or text
    return text


def _extract_message(before: str, after: str) -> str:
    """Return the message that spans the position between two texts."""
    starts = [match.start() for match in MESSAGE_HEADER.finditer(before)]
    following = MESSAGE_HEADER.search(after)
    return before[starts[-1] if starts else 0 :] + (after[: following.start()] if following else after)


def _extract_word(before: str, after: str) -> str:
    """Return the word that spans the position between two texts."""
    left, right = re.search(r"\S*$", before[-CONTEXT_CHARACTERS:]), re.match(r"\S*", after)
    return (left[0] if left else "") + (right[0] if right else "")


def _truncate(text: str) -> str:
    return text if len(text) <= CONTEXT_CHARACTERS else text[:CONTEXT_CHARACTERS] + "…"
