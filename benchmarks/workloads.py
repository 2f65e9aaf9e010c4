"""What agents and assistants on one's own machine ask for, as seeded data: ten workloads, (a) to (j).

A workload is a list of steps. It knows no server and measures nothing; `playing.py` plays it. Prompts and answers have
fixed sizes. Later turns contain what the model itself answered, because keeping that is part of the work. Tools stand
in the system prompt as text: templates of small models know none, and each server would invent its own words for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from bitmap import bitmap
from words import text

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request: messages that are added to a conversation, and how many tokens the answer has."""

    talk: str
    says: tuple[Message, ...]
    answer: int
    of: tuple[str, int] | None = None  # the conversation begins as a copy of so many messages of another
    after: int = 0  # comes when all others of its group have so many tokens
    schema: dict[str, Any] | None = None  # the answer is JSON that fits


@dataclass(frozen=True)
class Together:
    """Requests that run at once."""

    asks: tuple[Ask, ...]


@dataclass(frozen=True)
class Restart:
    """The server is stopped and started again, with what it keeps on disk."""


@dataclass(frozen=True)
class HangUp:
    """A request whose client goes away after so many seconds, and another that comes at that moment."""

    ask: Ask
    seconds: float
    other: Ask


Step: TypeAlias = Ask | Together | Restart | HangUp


@dataclass(frozen=True)
class Workload:
    """What is asked, and of how large a server."""

    letter: str
    name: str
    steps: tuple[Step, ...]
    slots: int = 4  # conversations that the server can hold at once
    context: int = 4096  # tokens of each
    needs: str = ""  # what a server must be able to do


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str | list[dict[str, Any]]) -> Message:
    return {"role": "user", "content": content}


def tools(seed: str, count: int, words: int) -> str:
    """Descriptions of tools as agents write them into a system prompt."""
    described = []
    for number in range(count):
        about = text(f"{seed} tool {number}", words).strip()
        properties = {"path": {"type": "string"}, "limit": {"type": "integer"}}
        described.append({"name": f"tool_{number}", "description": about, "parameters": properties})
    return "\n".join(map(json.dumps, described))


def agent(seed: str, quick: bool) -> Workload:
    """(a) A system prompt with twenty tools, then ten turns, each with the result of a tool."""
    words, result, answer = (3, 8, 3) if quick else (20, 40, 12)
    opening = system(f"{text(seed, 30)}\n{tools(seed, 4 if quick else 20, words)}")
    steps = []
    for turn in range(10):
        said = user(f"result of tool_{turn}:{text(f'{seed} result {turn}', result)}")
        steps.append(Ask(talk="agent", says=(said,) if turn else (opening, said), answer=answer))
    return Workload("a", "an agent with 20 tools, 10 turns", tuple(steps))


def branches(seed: str, quick: bool) -> Workload:
    """(b) One question is edited into ten, one answer made again, then each of the ten is gone back to, twice."""
    words, question, again, answer = (30, 25, 4, 2) if quick else (200, 100, 12, 6)
    steps = [Ask(talk="0", says=(system(text(seed, words)), user(text(f"{seed} 0", question))), answer=answer)]
    for branch in range(1, 10):
        edited = user(text(f"{seed} {branch}", question))
        steps.append(Ask(talk=str(branch), says=(edited,), answer=answer, of=("0", 1)))
    steps.append(Ask(talk="regenerated", says=(), answer=answer, of=("9", 2)))
    for visit in range(1 if quick else 2):
        for branch in range(10):
            following = user(text(f"{seed} {branch} {visit}", again))
            steps.append(Ask(talk=str(branch), says=(following,), answer=answer))
    return Workload("b", "10 branches, each revisited", tuple(steps))


def delegation(seed: str, quick: bool) -> Workload:
    """(c) Four agents begin at once with one system prompt that nobody has computed yet, and come again at once."""
    words, task, answer = (120, 6, 3) if quick else (1100, 30, 8)
    opening = system(text(seed, words))
    groups = []
    for turn in range(2):
        asks = []
        for number in range(4):
            said = user(text(f"{seed} {turn} {number}", task))
            asks.append(Ask(talk=str(number), says=(said,) if turn else (opening, said), answer=answer))
        groups.append(Together(tuple(asks)))
    return Workload("c", "4 agents at once, one system prompt", tuple(groups))


def interleaved(seed: str, quick: bool) -> Workload:
    """(d) Thirty-two conversations over one system prompt take turns."""
    words, count, question, answer = (120, 8, 8, 2) if quick else (1850, 32, 12, 4)
    opening = system(text(seed, words))
    steps = []
    for turn in range(2):
        for number in range(count):
            said = user(text(f"{seed} {turn} {number}", question))
            steps.append(Ask(talk=str(number), says=(said,) if turn else (opening, said), answer=answer))
    return Workload("d", "32 conversations in turn", tuple(steps))


def restarted(seed: str, quick: bool) -> Workload:
    """(e) The server is restarted in the middle of a conversation."""
    words, question, answer = (150, 8, 3) if quick else (2400, 8, 8)
    first = (system(text(seed, words)), user(text(f"{seed} 0", question)))
    steps = (
        Ask(talk="talk", says=first, answer=answer),
        Ask(talk="talk", says=(user(text(f"{seed} 1", question)),), answer=answer),
        Restart(),
        Ask(talk="talk", says=(user(text(f"{seed} 2", question)),), answer=answer),
    )
    return Workload("e", "a restart in the middle", steps)


def crowd(seed: str, quick: bool) -> Workload:
    """(f) Eight answers are being written: alone, and then with a long prompt that comes among them."""
    words, answer, arrives, long = (15, 6, 2, 150) if quick else (60, 32, 8, 2740)

    def streams(name: str) -> tuple[Ask, ...]:
        return tuple(
            Ask(talk=f"{name} {number}", says=(user(text(f"{seed} {name} {number}", words)),), answer=answer)
            for number in range(8)
        )

    arriving = Ask(talk="long", says=(user(text(f"{seed} long", long)),), answer=2, after=arrives)
    steps = (Together(streams("alone")), Together((*streams("in company"), arriving)))
    return Workload("f", "8 streams and a long prompt", steps, slots=9)


def hangups(seed: str, quick: bool) -> Workload:
    """(g) A client goes away while its long prompt is being computed, and another one asks."""
    words, seconds = (400, 0.2) if quick else (2740, 1.0)
    given_up = Ask(talk="gone", says=(user(text(f"{seed} gone", words)),), answer=4)
    other = Ask(talk="other", says=(user(text(f"{seed} other", 8)),), answer=2)
    return Workload("g", "a disconnect in a long prompt", (HangUp(given_up, seconds, other),))


def document(seed: str, quick: bool) -> Workload:
    """(h) Twenty questions about one long text, each in a conversation of its own."""
    words, questions, question, answer = (200, 5, 6, 2) if quick else (5500, 20, 8, 4)
    opening = system(text(seed, words))
    steps = tuple(
        Ask(talk=str(number), says=(opening, user(text(f"{seed} {number}", question))), answer=answer)
        for number in range(questions)
    )
    return Workload("h", "20 questions about a long text", steps, context=4096 if quick else 8192)


SCHEMA = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["true", "false", "unclear"]},
        "parts": {"type": "array", "items": {"enum": ["begin", "middle", "end"]}, "minItems": 2, "maxItems": 2},
    },
    "required": ["verdict", "parts"],
    "additionalProperties": False,
}


def structured(seed: str, quick: bool) -> Workload:
    """(i) Questions over one system prompt whose answers are JSON of a schema."""
    words, questions, question, answer = (40, 2, 8, 16) if quick else (300, 8, 40, 60)
    opening = system(text(seed, words))
    steps = tuple(
        Ask(talk=str(n), says=(opening, user(text(f"{seed} {n}", question))), answer=answer, schema=SCHEMA)
        for n in range(questions)
    )
    return Workload("i", "JSON answers", steps)


def picture(seed: str, quick: bool) -> Workload:
    """(j) A conversation about a picture: it is looked at once."""
    words, turns, answer = (8, 2, 3) if quick else (20, 6, 8)
    shown = [
        {"type": "image_url", "image_url": {"url": bitmap(seed, 64 if quick else 224)}},
        {"type": "text", "text": text(seed, words)},
    ]
    steps = [Ask(talk="talk", says=(system(text(f"{seed} system", words)), user(shown)), answer=answer)]
    for turn in range(1, turns):
        steps.append(Ask(talk="talk", says=(user(text(f"{seed} {turn}", words)),), answer=answer))
    return Workload("j", "a conversation with a picture", tuple(steps), needs="pictures")


WORKLOADS: dict[str, Callable[[str, bool], Workload]] = {
    "a": agent,
    "b": branches,
    "c": delegation,
    "d": interleaved,
    "e": restarted,
    "f": crowd,
    "g": hangups,
    "h": document,
    "i": structured,
    "j": picture,
}
