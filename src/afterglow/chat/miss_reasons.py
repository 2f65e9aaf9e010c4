"""Why a prompt was not found in memory, in plain words: the text where it parts from what is kept, and why.

It reads rendered text, so it knows nothing of templates but what they have in common. Where it guesses, it says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from afterglow.chat.output.reasoning import REASONING_FORMATS
from afterglow.chat.prompt import find_common_prefix
from afterglow.engine.kvcache.explain import Explanation

MissReason: TypeAlias = Literal[
    "nothing kept", "all of it", "goes on", "evicted", "no checkpoint", "window passed", "on the grid",
    "other tokens", "white space", "date", "number", "tools reordered", "tools changed", "reasoning stripped",
    "system prompt", "answer changed", "tool result", "another question", "another text",
]  # fmt: skip

CONTEXT_CHARACTERS = 60  # characters on each side of a difference
ROLE_ALIASES = {
    "developer": "system", "SYSTEM_PROMPT": "system", "AVAILABLE_TOOLS": "system", "human": "user", "INST": "user",
    "model": "assistant", "bot": "assistant", "ipython": "tool", "function": "tool", "TOOL_RESULTS": "tool",
}  # fmt: skip
MESSAGE_HEADER = re.compile(
    r"(?:<\|im_start\|>|<\|start_header_id\|>|<\|start_of_role\|>|<\|start\|>|<\|turn>|<start_of_turn>|<\||\[|### )\s*"
    r"(system|user|assistant|tool|" + "|".join(ROLE_ALIASES) + r")\b"
)
MESSAGE_END = re.compile(r"<\|[a-z_]+\|>|<turn\|>|<end_of_turn>|</s>|\[/INST\]")  # of a message
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
    "assistant": "answer changed",
    "tool": "tool result",
    "user": "another question",
}

CACHE_REASON_MESSAGES: dict[MissReason, str] = {  # what memory is to blame for, or nobody
    "nothing kept": "Nothing that begins like it is kept: it is new here, or of another model, setting or API key.",
    "all of it": "That is all that can be reused; the last token is always computed.",
    "goes on": "It goes on where what is kept ends, as the next turn of a conversation does.",
    "evicted": "{found.evicted_entries:,} were kept once and had to make room: give the cache more bytes, or pin them.",
    "no checkpoint": "{found.shared_entries:,} are kept, but this kind of model can only go on from a checkpoint, and there is "
    "none nearer to where the two part.",
    "window passed": "{found.shared_entries:,} are kept, but the window of this model has passed where the two part, and there "
    "is no checkpoint nearer to it.",
    "on the grid": "{found.shared_entries:,} are kept; deterministic mode reuses whole chunks only.",
}
TEXT_REASON_MESSAGES: dict[MissReason, str] = {  # what the texts tell
    "other tokens": "The text goes on alike, but is cut into other tokens: send the tokens of answers as they came.",
    "white space": "Likely cause: white space changed in {where}.",
    "date": "Likely cause: a date or time changed in {where}. Put it behind what stays the same, or into the last "
    "message.",
    "number": "Likely cause: a number changed in {where}. Put what changes behind what stays the same.",
    "tools reordered": "Likely cause: the same tools in another order. Send them always in the same one.",
    "tools changed": "Likely cause: other tools, or one with another description.",
    "reasoning stripped": "Likely cause: the thoughts of an earlier answer were left out. Many templates do that after "
    "the next question; what was said before stays warm.",
    "system prompt": "Likely cause: another system prompt.",
    "answer changed": "Likely cause: an earlier answer is not as the model wrote it.",
    "tool result": "Likely cause: another result of a tool.",
    "another question": "It is another question, or an edited one.",
    "another text": "It is another text from there on.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MissReport:
    """Why a prompt missed. `before` is what comes before the difference, `ours` the prompt's text there, and `theirs`
    that of what is kept."""

    reason: MissReason
    message: str
    shared_text: str
    prompt_text: str
    cached_text: str


def explain_miss(explanation: Explanation, *, shared_text: str, prompt_text: str, cached_text: str) -> MissReport:
    """Say in words what an explanation and the texts around the difference mean.

    `before` is all the text that the prompt shares with what is nearest to it, `ours` and `theirs` how the two go on.

    >>> found = Explanation(prompt=50, reused=9, shared=9, ours=1, theirs=2, cause="all of it")
    >>> explain_words(found, before="<|im_start|>system\\nToday is ", ours="Tuesday. Be", theirs="Monday. Be").likely
    'date'
    """
    likely = _find_cache_reason(explanation, shared_text, prompt_text, cached_text) or infer_text_reason(
        shared_text, prompt_text, cached_text
    )
    role = find_last_role(shared_text)
    where = "the text" if role is None else "the system prompt" if role == "system" else f"the {role} message"
    sentence = f"{explanation.reused_entries:,} of {explanation.prompt_entries:,} tokens need not be computed. "
    sentence += (CACHE_REASON_MESSAGES | TEXT_REASON_MESSAGES)[likely].format(where=where, found=explanation)
    shown = _truncate_start(shared_text), _truncate_end(prompt_text), _truncate_end(cached_text)
    if likely in TEXT_REASON_MESSAGES:
        sentence += " After “{}” the prompt has “{}”, and what is kept “{}”.".format(*shown)
    return MissReport(reason=likely, message=sentence, shared_text=shown[0], prompt_text=shown[1], cached_text=shown[2])


def _find_cache_reason(
    explanation: Explanation, shared_text: str, prompt_text: str, cached_text: str
) -> MissReason | None:
    """What memory is to blame for; None: the texts have to tell."""
    if explanation.cause == "evicted":
        return "evicted"
    if not shared_text:
        return "nothing kept"
    if explanation.reused_entries >= explanation.prompt_entries - 1 or not prompt_text:
        return "all of it"
    if explanation.cause in ("no checkpoint", "window passed", "on the grid") and explanation.lost_entries > 0:
        return explanation.cause
    return None if cached_text else "goes on"


def infer_text_reason(shared_text: str, prompt_text: str, cached_text: str) -> MissReason:
    """What probably made two texts part.

    >>> likely_cause("[INST] I have ", "3 apples", "5 apples")
    'number'
    """
    common = find_common_prefix(prompt_text, cached_text)
    if len(common) == min(len(prompt_text), len(cached_text)):
        return "other tokens"
    shared_text, prompt_text, cached_text = shared_text + common, prompt_text[len(common) :], cached_text[len(common) :]
    role = find_last_role(shared_text)
    own, other = _extract_message(shared_text, prompt_text), _extract_message(shared_text, cached_text)
    if role == "assistant" and _has_reasoning(other) != _has_reasoning(own):
        return "reasoning stripped"
    if role in (None, "system") and (TOOL_DEFINITION.search(own) or TOOL_DEFINITION.search(other)):
        names = TOOL_NAME.findall(own), TOOL_NAME.findall(other)
        return "tools reordered" if names[0] != names[1] and sorted(names[0]) == sorted(names[1]) else "tools changed"
    if (prompt_text[:1].isspace() or cached_text[:1].isspace()) and prompt_text.split()[:3] == cached_text.split()[:3]:
        return "white space"
    return _detect_changed_value(shared_text, prompt_text, cached_text) or MISS_REASON_BY_ROLE.get(role, "another text")


def _detect_changed_value(shared_text: str, prompt_text: str, cached_text: str) -> MissReason | None:
    """A date, time or number that changed."""
    own, other = _extract_word(shared_text, prompt_text), _extract_word(shared_text, cached_text)
    line = shared_text.rpartition("\n")[2][-40:]
    digits = any(map(str.isdigit, own)) and any(map(str.isdigit, other))
    if DATE_WORD.fullmatch(own) and DATE_WORD.fullmatch(other):
        return "date"
    if digits and (DATE_OR_TIME.search(own) or DATE_OR_TIME.search(line)):
        return "date"
    return "number" if digits else None


def _has_reasoning(message: str) -> bool:
    """Whether a message has a thought that is not empty."""
    for style in REASONING_FORMATS:
        _, opened, rest = message.partition(style.start_tag)
        if opened and rest.partition(style.end_tag)[0].strip():
            return True
    return False


def find_last_role(text: str) -> str | None:
    """Whose message a text ends in; None: it has no messages, or a template that writes them in a way of its own.

    >>> role_at("<|im_start|>system\\nBe kind.<|im_end|>\\n<|im_start|>user\\nHel")
    'user'
    """
    found = MESSAGE_HEADER.findall(text)
    return ROLE_ALIASES.get(found[-1], found[-1]) if found else None


def find_first_user_text(text: str) -> str:
    """What the first message of a person says; where there is none, all of the text.

    >>> first_words("<|im_start|>system\\nBe kind.<|im_end|>\\n<|im_start|>user\\nHello<|im_end|>")
    'Hello'
    """
    for header in MESSAGE_HEADER.finditer(text):
        if ROLE_ALIASES.get(header[1], header[1]) == "user":
            said = re.sub(r"^(?:\s|\]|<\|[a-z_]+\|>)+", "", text[header.end() :])
            return MESSAGE_END.split(said, maxsplit=1)[0].strip() or text
    return text


def _extract_message(before: str, after: str) -> str:
    """The whole message that lies on both sides of a place."""
    starts = [match.start() for match in MESSAGE_HEADER.finditer(before)]
    following = MESSAGE_HEADER.search(after)
    return before[starts[-1] if starts else 0 :] + (after[: following.start()] if following else after)


def _extract_word(before: str, after: str) -> str:
    """The word that lies on both sides of a place."""
    left, right = re.search(r"\S*$", before[-CONTEXT_CHARACTERS:]), re.match(r"\S*", after)
    return (left[0] if left else "") + (right[0] if right else "")


def _truncate_start(text: str) -> str:
    return text if len(text) <= CONTEXT_CHARACTERS else "…" + text[-CONTEXT_CHARACTERS:]


def _truncate_end(text: str) -> str:
    return text if len(text) <= CONTEXT_CHARACTERS else text[:CONTEXT_CHARACTERS] + "…"
