"""Thirteen seeded workloads of agents and assistants on a local machine, (a) to (m), as data.

A workload is a list of steps; `workload_runner.py` runs it against a server. Prompts and answers have fixed sizes.
Later turns contain the model's own answers, because caching those is part of the work. Except in (k), tools are text in
the system prompt: templates of small models do not support tools. (k) has native tool calls and reasoning, with the
template `agent_template.jinja` for both servers; its answers have the length that the model gives them.

A digest of all workloads is pinned in `tests/benchmarks/test_workloads.py`. Texts, sizes, seeds and the names of
dataclass fields are part of it: old results are only comparable as long as it does not change.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from synthetic_inputs import random_image_url, random_text

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request: messages to append to a conversation, and the number of tokens of the answer."""

    talk: str  # name of the conversation
    says: tuple[Message, ...]
    answer: int
    of: tuple[str, int] | None = None  # the conversation starts as a copy of the first n messages of another one
    after: int = 0  # sent when all other requests of its group have this many tokens
    schema: dict[str, Any] | None = None  # JSON schema of the answer


@dataclass(frozen=True, kw_only=True)
class CallTools(Ask):
    """One request of an agent that must be answered by native tool calls. The client parses their arguments and writes
    them back with another order of keys; each gets `result` in the next request."""

    tools: tuple[dict[str, Any], ...]
    result: str
    seed: int


@dataclass(frozen=True)
class Together:
    """Concurrent requests."""

    asks: tuple[Ask, ...]


@dataclass(frozen=True)
class Restart:
    """The server stops and starts again. Its disk tier survives."""


@dataclass(frozen=True)
class HangUp:
    """A request whose client disconnects after some seconds, and another request sent at that moment."""

    ask: Ask
    seconds: float
    other: Ask


Step: TypeAlias = Ask | Together | Restart | HangUp


@dataclass(frozen=True)
class Workload:
    """Steps of a workload, and the size of the server."""

    letter: str
    name: str
    steps: tuple[Step, ...]
    slots: int = 4  # conversations that the server can hold at once
    context: int = 4096  # tokens per slot
    needs: str = ""  # a capability the server must have: "pictures" is image input


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str | list[dict[str, Any]]) -> Message:
    return {"role": "user", "content": content}


def describe_tools(seed: str, count: int, words: int) -> str:
    """Return tool descriptions, in the form in which agents put them into a system prompt."""
    tools = []
    for number in range(count):
        description = random_text(f"{seed} tool {number}", words).strip()
        properties = {"path": {"type": "string"}, "limit": {"type": "integer"}}
        tools.append({"name": f"tool_{number}", "description": description, "parameters": properties})
    return "\n".join(map(json.dumps, tools))


def build_agent(seed: str, quick: bool) -> Workload:
    """(a) A system prompt with twenty tools, then ten turns, each with a tool result."""
    words, result, answer = (3, 8, 3) if quick else (20, 40, 12)
    opening = system(f"{random_text(seed, 30)}\n{describe_tools(seed, 4 if quick else 20, words)}")
    steps = []
    for turn in range(10):
        message = user(f"result of tool_{turn}:{random_text(f'{seed} result {turn}', result)}")
        steps.append(Ask(talk="agent", says=(message,) if turn else (opening, message), answer=answer))
    return Workload("a", "an agent with 20 tools, 10 turns", tuple(steps))


def build_branches(seed: str, quick: bool) -> Workload:
    """(b) One question is edited into ten, one answer is regenerated, then each of the ten is revisited, twice."""
    words, question, followup, answer = (30, 25, 4, 2) if quick else (200, 100, 12, 6)
    opening = (system(random_text(seed, words)), user(random_text(f"{seed} 0", question)))
    steps = [Ask(talk="0", says=opening, answer=answer)]
    for branch in range(1, 10):
        edited = user(random_text(f"{seed} {branch}", question))
        steps.append(Ask(talk=str(branch), says=(edited,), answer=answer, of=("0", 1)))
    steps.append(Ask(talk="regenerated", says=(), answer=answer, of=("9", 2)))
    for visit in range(1 if quick else 2):
        for branch in range(10):
            message = user(random_text(f"{seed} {branch} {visit}", followup))
            steps.append(Ask(talk=str(branch), says=(message,), answer=answer))
    return Workload("b", "10 branches, each revisited", tuple(steps))


def build_delegation(seed: str, quick: bool) -> Workload:
    """(c) Four agents start at once with one uncached system prompt, and send their second turn at once."""
    return _build_delegation("c", "4 agents at once, one system prompt", seed, quick, 1100)


def build_short_delegation(seed: str, quick: bool) -> Workload:
    """(m) The same as (c) with its first size, a system prompt of 900 words."""
    return _build_delegation("m", "4 agents at once, a shorter system prompt", seed, quick, 900)


def _build_delegation(letter: str, name: str, seed: str, quick: bool, full_words: int) -> Workload:
    words, task, answer = (120, 6, 3) if quick else (full_words, 30, 8)
    opening = system(random_text(seed, words))
    groups = []
    for turn in range(2):
        asks = []
        for number in range(4):
            message = user(random_text(f"{seed} {turn} {number}", task))
            asks.append(Ask(talk=str(number), says=(message,) if turn else (opening, message), answer=answer))
        groups.append(Together(tuple(asks)))
    return Workload(letter, name, tuple(groups))


def build_interleaved(seed: str, quick: bool) -> Workload:
    """(d) Thirty-two conversations with one system prompt alternate."""
    words, count, question, answer = (120, 8, 8, 2) if quick else (1850, 32, 12, 4)
    opening = system(random_text(seed, words))
    steps = []
    for turn in range(2):
        for number in range(count):
            message = user(random_text(f"{seed} {turn} {number}", question))
            steps.append(Ask(talk=str(number), says=(message,) if turn else (opening, message), answer=answer))
    return Workload("d", "32 conversations in turn", tuple(steps))


def build_restart(seed: str, quick: bool) -> Workload:
    """(e) The server restarts in the middle of a conversation."""
    words, question, answer = (150, 8, 3) if quick else (2400, 8, 8)
    opening = (system(random_text(seed, words)), user(random_text(f"{seed} 0", question)))
    steps = (
        Ask(talk="talk", says=opening, answer=answer),
        Ask(talk="talk", says=(user(random_text(f"{seed} 1", question)),), answer=answer),
        Restart(),
        Ask(talk="talk", says=(user(random_text(f"{seed} 2", question)),), answer=answer),
    )
    return Workload("e", "a restart in the middle", steps)


def build_streams(seed: str, quick: bool) -> Workload:
    """(f) Eight concurrent streams: alone, and then with a long prompt that arrives while they decode."""
    words, answer, arrives, long = (15, 6, 2, 150) if quick else (60, 32, 8, 2740)

    def build_group(name: str) -> tuple[Ask, ...]:
        return tuple(
            Ask(talk=f"{name} {number}", says=(user(random_text(f"{seed} {name} {number}", words)),), answer=answer)
            for number in range(8)
        )

    late = Ask(talk="long", says=(user(random_text(f"{seed} long", long)),), answer=2, after=arrives)
    steps = (Together(build_group("alone")), Together((*build_group("in company"), late)))
    return Workload("f", "8 streams and a long prompt", steps, slots=9)


def build_disconnect(seed: str, quick: bool) -> Workload:
    """(g) A client disconnects during the prefill of its long prompt, and another client sends a request."""
    words, seconds = (400, 0.2) if quick else (2740, 1.0)
    cancelled = Ask(talk="gone", says=(user(random_text(f"{seed} gone", words)),), answer=4)
    other = Ask(talk="other", says=(user(random_text(f"{seed} other", 8)),), answer=2)
    return Workload("g", "a disconnect in a long prompt", (HangUp(cancelled, seconds, other),))


def build_document(seed: str, quick: bool) -> Workload:
    """(h) Twenty questions about one long text, each in its own conversation."""
    words, questions, question, answer = (200, 5, 6, 2) if quick else (5500, 20, 8, 4)
    opening = system(random_text(seed, words))
    steps = tuple(
        Ask(talk=str(number), says=(opening, user(random_text(f"{seed} {number}", question))), answer=answer)
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


def build_structured(seed: str, quick: bool) -> Workload:
    """(i) Questions with one system prompt, answered in JSON of a schema."""
    words, questions, question, answer = (40, 2, 8, 16) if quick else (300, 8, 40, 60)
    opening = system(random_text(seed, words))
    steps = tuple(
        Ask(talk=str(n), says=(opening, user(random_text(f"{seed} {n}", question))), answer=answer, schema=SCHEMA)
        for n in range(questions)
    )
    return Workload("i", "JSON answers", steps)


def build_image(seed: str, quick: bool) -> Workload:
    """(j) A conversation about an image, which needs to be encoded only once."""
    words, turns, answer = (8, 2, 3) if quick else (20, 6, 8)
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": random_image_url(seed, 64 if quick else 224)}},
        {"type": "text", "text": random_text(seed, words)},
    ]
    opening = (system(random_text(f"{seed} system", words)), user(content))
    steps = [Ask(talk="talk", says=opening, answer=answer)]
    for turn in range(1, turns):
        steps.append(Ask(talk="talk", says=(user(random_text(f"{seed} {turn}", words)),), answer=answer))
    return Workload("j", "a conversation with a picture", tuple(steps), needs="pictures")


def build_tool_calls(seed: str, quick: bool) -> Workload:
    """(k) An agent with native tools and reasoning: ten turns of calls, with a second question after the fifth."""
    words, opening, result, answer = (6, 8, 6, 250) if quick else (40, 30, 40, 300)
    properties = {
        "path": {"type": "string", "pattern": "^[a-z]{1,8}(/[a-z]{1,8}){0,2}$"},
        "limit": {"type": "integer", "minimum": 0, "maximum": 999},
        "recursive": {"type": "boolean"},
    }
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    tools = tuple(
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": random_text(f"{seed} tool {number}", words).strip(),
                "parameters": parameters,
            },
        }
        for number in range(6)
    )
    steps = []
    for turn in range(10):
        question = (user(random_text(f"{seed} question {turn}", 12).strip()),) if turn in (0, 5) else ()
        says = (system(random_text(seed, opening).strip()), *question) if not turn else question
        text = random_text(f"{seed} result {turn}", result).strip()
        steps.append(CallTools(talk="agent", says=says, answer=answer, tools=tools, result=text, seed=turn))
    name = "native tool calls and reasoning, 10 turns"
    return Workload("k", name, tuple(steps), slots=2, context=8192, needs="tools")


def build_fan_out(seed: str, quick: bool) -> Workload:
    """(l) An agent with 8,000 tokens of history starts eight children at once, as `Run.fork` of agents does."""
    words, task, answer = (120, 6, 3) if quick else (5400, 12, 8)
    opening = (system(random_text(seed, words)), user(random_text(f"{seed} task", task)))
    children = tuple(
        Ask(
            talk=f"child {number}", says=(user(random_text(f"{seed} {number}", task)),), answer=answer, of=("parent", 3)
        )
        for number in range(8)
    )
    steps = (Ask(talk="parent", says=opening, answer=answer), Together(children))
    return Workload("l", "8 children of an agent with 8,000 tokens", steps, slots=9, context=8192)


WORKLOADS: dict[str, Callable[[str, bool], Workload]] = {
    "a": build_agent,
    "b": build_branches,
    "c": build_delegation,
    "d": build_interleaved,
    "e": build_restart,
    "f": build_streams,
    "g": build_disconnect,
    "h": build_document,
    "i": build_structured,
    "j": build_image,
    "k": build_tool_calls,
    "l": build_fan_out,
    "m": build_short_delegation,
}
