"""How a template wants a conversation written, found out by rendering small conversations with it.

It knows dictionaries and the answers of the template; what is done with the findings is said in `chat.adapting`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

NEEDLE, RESULT, THOUGHT = "needle7", "result7", "thought7"  # what is looked for in the rendered text
CALL = "call00001"  # an identifier that the pickiest templates take
# Objects that the template wrote as they are: it took them for something else.
MISREAD = (f"{{'place': '{NEEDLE}'}}", *(f"{{{quote}type{quote}: {quote}t" for quote in "'\""))
REASONING = ("reasoning_content", "thinking", "reasoning", "thought")
QUOTED = re.compile(r"""["']developer["']""")  # most templates write any role; a few know this one
PART = "part"  # reasoning as a part of the content, of the type `thinking`

Turn: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """How messages with tool calls are written."""

    text: bool = False  # the arguments as JSON text, not as an object
    content: str | None = ""  # where the model said nothing beside its calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a template does with what it is given. The defaults are what most templates do.

    >>> Habits().reasoning
    'reasoning_content'
    """

    nothing: bool = True  # `tools` and `documents` are None where there are none; otherwise they are left out
    parts: bool = False  # content is a list of typed parts, not text
    system: bool = True  # it shows system messages
    developer: bool = False  # it knows the role `developer`
    thoughtful: bool = False  # it wants reasoning with every message of the assistant, empty where there was none
    reasoning: str = "reasoning_content"  # the field that it reads reasoning from, or PART
    tools: bool = True  # it shows the tools that are offered
    calls: Calls | None = Calls()  # None: it does not show them
    results: bool = True  # it shows messages of the role `tool`


Render: TypeAlias = Callable[[Sequence[Turn], Sequence[Turn] | None, bool], str | None]


def learn(source: str, render: Render) -> Habits:
    """Try the template. `render` takes messages, tools, and whether None is given where there are none.

    A template that does not even show a single question keeps the defaults: its own complaint about the real
    conversation is worth more than what could be guessed here.
    """
    for nothing, parts in itertools.product((True, False), (False, True)):
        trial = _Trial(render, nothing, parts)
        if trial.shows([trial.user(NEEDLE)]):
            break
    else:
        return Habits()
    trial.thoughtful = not trial.renders([trial.user("a"), trial.assistant("b"), trial.user("c")])
    calls, results = trial.calls()
    return Habits(
        nothing=nothing,
        parts=parts,
        system=trial.shows([trial.turn("system", NEEDLE), trial.user("a")]),
        developer=QUOTED.search(source) is not None and trial.shows([trial.turn("developer", NEEDLE), trial.user("a")]),
        thoughtful=trial.thoughtful and trial.renders([trial.user("a"), trial.assistant("b"), trial.user("c")]),
        reasoning=trial.reasoning(calls),
        tools=trial.shows([trial.user("a")], tools=offered(NEEDLE)),
        calls=calls,
        results=results,
    )


def offered(name: str) -> list[Turn]:
    """A tool as it is offered to a template."""
    place = {"type": "string", "description": "where"}
    parameters = {"type": "object", "properties": {"place": place}, "required": ["place"]}
    return [{"type": "function", "function": {"name": name, "description": "what", "parameters": parameters}}]


class _Trial:
    """Small conversations for one template, and what becomes of them."""

    def __init__(self, render: Render, nothing: bool, parts: bool) -> None:
        self._render = render
        self._nothing = nothing
        self._parts = parts
        self.thoughtful = False

    def turn(self, role: str, content: str) -> Turn:
        return {"role": role, "content": [{"type": "text", "text": content}] if self._parts else content}

    def user(self, content: str) -> Turn:
        return self.turn("user", content)

    def assistant(self, content: str) -> Turn:
        return {**self.turn("assistant", content), **({"reasoning_content": ""} if self.thoughtful else {})}

    def renders(self, turns: Sequence[Turn]) -> bool:
        return self._render(turns, None, self._nothing) is not None

    def shows(self, turns: Sequence[Turn], tools: Sequence[Turn] | None = None, needle: str = NEEDLE) -> bool:
        text = self._render(turns, tools, self._nothing)
        return text is not None and needle in text and not any(written in text for written in MISREAD)

    def calls(self) -> tuple[Calls | None, bool]:
        """How calls are written, and whether their results are shown."""
        ways = [Calls(text=text, content=content) for content in ("", None) for text in (False, True)]
        for end in ([self.result()], []):
            for way in ways:
                turns = [self.user("a"), self.call(way), *end]
                if self.shows(turns, offered("weather")):
                    return way, bool(end) and self.shows(turns, offered("weather"), RESULT)
        return None, self.shows([self.user("a"), self.assistant("b"), self.result()], offered("weather"), RESULT)

    def call(self, way: Calls) -> Turn:
        arguments = f'{{"place": "{NEEDLE}"}}' if way.text else {"place": NEEDLE}
        called = {"id": CALL, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        turn = {**self.assistant(""), "tool_calls": [called]}
        return turn if way.content is not None else {**turn, "content": None}

    def result(self) -> Turn:
        return {**self.turn("tool", RESULT), "tool_call_id": CALL, "name": "weather"}

    def reasoning(self, calls: Calls | None) -> str:
        """The field that reasoning is read from: the first with which it shows anywhere."""
        for field in (*REASONING, PART):
            said = with_reasoning(self.turn("assistant", "b"), field, THOUGHT)
            trials = [[self.user("a"), said], [self.user("a"), said, self.user("c")]]
            if calls is not None:
                trials.insert(0, [self.user("a"), with_reasoning(self.call(calls), field, THOUGHT), self.result()])
            if any(self.shows(turns, offered("weather"), THOUGHT) for turns in trials):
                return field
        return REASONING[0]


def with_reasoning(turn: Turn, field: str, reasoning: str) -> Turn:
    """The message with what the model thought, in the field that the template reads.

    >>> with_reasoning({"role": "assistant", "content": "Yes"}, "thinking", "Hm")
    {'role': 'assistant', 'content': 'Yes', 'thinking': 'Hm'}
    """
    if field != PART:
        return {**turn, field: reasoning}
    content = turn["content"] or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**turn, "content": [{"type": "thinking", "thinking": reasoning}, *parts]}
