"""Why a prompt was not found in memory, in plain words: the text where it parts from what is kept, and why.

It reads rendered text, so it knows nothing of templates but what they have in common. Where it guesses, it says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from afterglow.chat.prompt import common_text
from afterglow.chat.reasoning import STYLES
from afterglow.engine.explanation import Explanation

Likely: TypeAlias = Literal[
    "nothing kept", "all of it", "goes on", "evicted", "no checkpoint", "window passed", "on the grid",
    "other tokens", "white space", "date", "number", "tools reordered", "tools changed", "reasoning stripped",
    "system prompt", "answer changed", "tool result", "another question", "another text",
]  # fmt: skip

SHOWN = 60  # characters on each side of a difference
ROLES = {
    "developer": "system", "SYSTEM_PROMPT": "system", "AVAILABLE_TOOLS": "system", "human": "user", "INST": "user",
    "model": "assistant", "bot": "assistant", "ipython": "tool", "function": "tool", "TOOL_RESULTS": "tool",
}  # fmt: skip
HEADER = re.compile(
    r"(?:<\|im_start\|>|<\|start_header_id\|>|<\|start_of_role\|>|<\|start\|>|<\|turn>|<start_of_turn>|<\||\[|### )\s*"
    r"(system|user|assistant|tool|" + "|".join(ROLES) + r")\b"
)
END = re.compile(r"<\|[a-z_]+\|>|<turn\|>|<end_of_turn>|</s>|\[/INST\]")  # of a message
DEFINITION = re.compile(r'"(?:parameters|function)"\s*:|<tools>|AVAILABLE_TOOLS')
TOOL_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
MONTH = "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sep(?:tember)?|oct(?:ober)?"
DAY = "nov(?:ember)?|dec(?:ember)?|(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
NAMED = re.compile(rf"\W*(?:{MONTH}|{DAY})\W*", re.IGNORECASE)
DATE = re.compile(
    rf"\d{{4}}-\d\d|\d\d?[:.]\d\d\b|\d\d?/\d\d?/|\b(?:{MONTH}|{DAY}|date|time|today|now)\b", re.IGNORECASE
)
BY_ROLE: dict[str | None, Likely] = {
    "system": "system prompt",
    "assistant": "answer changed",
    "tool": "tool result",
    "user": "another question",
}

MEMORY: dict[Likely, str] = {  # what memory is to blame for, or nobody
    "nothing kept": "Nothing that begins like it is kept: it is new here, or of another model, setting or API key.",
    "all of it": "That is all that can be reused; the last token is always computed.",
    "goes on": "It goes on where what is kept ends, as the next turn of a conversation does.",
    "evicted": "{found.evicted:,} were kept once and had to make room: give the cache more bytes, or pin them.",
    "no checkpoint": "{found.shared:,} are kept, but this kind of model can only go on from a checkpoint, and there is "
    "none nearer to where the two part.",
    "window passed": "{found.shared:,} are kept, but the window of this model has passed where the two part, and there "
    "is no checkpoint nearer to it.",
    "on the grid": "{found.shared:,} are kept; deterministic mode reuses whole chunks only.",
}
DIFFERENCES: dict[Likely, str] = {  # what the texts tell
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
class Words:
    """Why a prompt missed. `before` is what comes before the difference, `ours` the prompt's text there, and `theirs`
    that of what is kept."""

    likely: Likely
    sentence: str
    before: str
    ours: str
    theirs: str


def explain_words(found: Explanation, *, before: str, ours: str, theirs: str) -> Words:
    """Say in words what an explanation and the texts around the difference mean.

    `before` is all the text that the prompt shares with what is nearest to it, `ours` and `theirs` how the two go on.

    >>> found = Explanation(prompt=50, reused=9, shared=9, ours=1, theirs=2, cause="all of it")
    >>> explain_words(found, before="<|im_start|>system\\nToday is ", ours="Tuesday. Be", theirs="Monday. Be").likely
    'date'
    """
    likely = _to_blame(found, before, ours, theirs) or likely_cause(before, ours, theirs)
    role = role_at(before)
    where = "the text" if role is None else "the system prompt" if role == "system" else f"the {role} message"
    sentence = f"{found.reused:,} of {found.prompt:,} tokens need not be computed. "
    sentence += (MEMORY | DIFFERENCES)[likely].format(where=where, found=found)
    shown = _end(before), _beginning(ours), _beginning(theirs)
    if likely in DIFFERENCES:
        sentence += " After “{}” the prompt has “{}”, and what is kept “{}”.".format(*shown)
    return Words(likely=likely, sentence=sentence, before=shown[0], ours=shown[1], theirs=shown[2])


def _to_blame(found: Explanation, before: str, ours: str, theirs: str) -> Likely | None:
    """What memory is to blame for; None: the texts have to tell."""
    if found.cause == "evicted":
        return "evicted"
    if not before:
        return "nothing kept"
    if found.reused >= found.prompt - 1 or not ours:
        return "all of it"
    if found.cause in ("no checkpoint", "window passed", "on the grid") and found.lost > 0:
        return found.cause
    return None if theirs else "goes on"


def likely_cause(before: str, ours: str, theirs: str) -> Likely:
    """What probably made two texts part.

    >>> likely_cause("[INST] I have ", "3 apples", "5 apples")
    'number'
    """
    common = common_text(ours, theirs)
    if len(common) == min(len(ours), len(theirs)):
        return "other tokens"
    before, ours, theirs = before + common, ours[len(common) :], theirs[len(common) :]
    role = role_at(before)
    own, other = _message(before, ours), _message(before, theirs)
    if role == "assistant" and _thinks(other) != _thinks(own):
        return "reasoning stripped"
    if role in (None, "system") and (DEFINITION.search(own) or DEFINITION.search(other)):
        names = TOOL_NAME.findall(own), TOOL_NAME.findall(other)
        return "tools reordered" if names[0] != names[1] and sorted(names[0]) == sorted(names[1]) else "tools changed"
    if (ours[:1].isspace() or theirs[:1].isspace()) and ours.split()[:3] == theirs.split()[:3]:
        return "white space"
    return _changed_value(before, ours, theirs) or BY_ROLE.get(role, "another text")


def _changed_value(before: str, ours: str, theirs: str) -> Likely | None:
    """A date, time or number that changed."""
    own, other = _word(before, ours), _word(before, theirs)
    line = before.rpartition("\n")[2][-40:]
    digits = any(map(str.isdigit, own)) and any(map(str.isdigit, other))
    if NAMED.fullmatch(own) and NAMED.fullmatch(other):
        return "date"
    if digits and (DATE.search(own) or DATE.search(line)):
        return "date"
    return "number" if digits else None


def _thinks(message: str) -> bool:
    """Whether a message has a thought that is not empty."""
    for style in STYLES:
        _, opened, rest = message.partition(style.opens)
        if opened and rest.partition(style.closes)[0].strip():
            return True
    return False


def role_at(text: str) -> str | None:
    """Whose message a text ends in; None: it has no messages, or a template that writes them in a way of its own.

    >>> role_at("<|im_start|>system\\nBe kind.<|im_end|>\\n<|im_start|>user\\nHel")
    'user'
    """
    found = HEADER.findall(text)
    return ROLES.get(found[-1], found[-1]) if found else None


def first_words(text: str) -> str:
    """What the first message of a person says; where there is none, all of the text.

    >>> first_words("<|im_start|>system\\nBe kind.<|im_end|>\\n<|im_start|>user\\nHello<|im_end|>")
    'Hello'
    """
    for header in HEADER.finditer(text):
        if ROLES.get(header[1], header[1]) == "user":
            said = re.sub(r"^(?:\s|\]|<\|[a-z_]+\|>)+", "", text[header.end() :])
            return END.split(said, maxsplit=1)[0].strip() or text
    return text


def _message(before: str, after: str) -> str:
    """The whole message that lies on both sides of a place."""
    starts = [match.start() for match in HEADER.finditer(before)]
    following = HEADER.search(after)
    return before[starts[-1] if starts else 0 :] + (after[: following.start()] if following else after)


def _word(before: str, after: str) -> str:
    """The word that lies on both sides of a place."""
    left, right = re.search(r"\S*$", before[-SHOWN:]), re.match(r"\S*", after)
    return (left[0] if left else "") + (right[0] if right else "")


def _end(text: str) -> str:
    return text if len(text) <= SHOWN else "…" + text[-SHOWN:]


def _beginning(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
