"""What an answer is made of, as it streams: text, thoughts and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from afterglow.chat.messages import ToolCall


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of what the model says.

    >>> Text("Hello").text
    'Hello'
    """

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of what the model thinks before it says something.

    >>> Reasoning("Hm").text
    'Hm'
    """

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the call number `index`. The first has its id and name; the arguments of all are one JSON text.

    >>> CallPart(0, '{"a": ', id="call_1", name="add").name
    'add'
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


OutputPart: TypeAlias = TextDelta | ReasoningDelta | ToolCallDelta


class OutputParser(Protocol):
    """Turns the text of an answer into parts, as it comes.

    However the text is cut into pieces, the parts add up to the same answer.
    """

    def feed(self, text: str) -> list[OutputPart]:
        """The parts that are certain now."""

    def finish(self) -> list[OutputPart]:
        """The rest, once no more text comes. A call that broke off keeps what was written of it."""


class PlainTextParser:
    """Reads everything as text.

    >>> Plain().feed("Hello")
    [Text(text='Hello')]
    """

    def feed(self, text: str) -> list[OutputPart]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[OutputPart]:
        return []


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The parts of a whole answer, put together."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def join_parts(parts: Iterable[OutputPart]) -> ParsedOutput:
    """The answer that parts add up to.

    >>> together([Reasoning("Hm"), Text("He"), Text("llo")])
    Answer(text='Hello', reasoning='Hm', calls=())
    """
    texts: list[str] = []
    thoughts: list[str] = []
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for part in parts:
        match part:
            case TextDelta(text):
                texts.append(text)
            case ReasoningDelta(text):
                thoughts.append(text)
            case ToolCallDelta(index, arguments, id, name):
                calls.setdefault(index, (id or "", name or "", []))[2].append(arguments)
    made = tuple(ToolCall(id=id, name=name, arguments="".join(written)) for id, name, written in calls.values())
    return ParsedOutput("".join(texts), "".join(thoughts), made)
