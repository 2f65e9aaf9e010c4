"""Parts of streamed output (text, reasoning, tool calls), and the parsers and output formats that produce them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from afterglow.chat.messages import ToolCall
from afterglow.chat.prompt import ReplayReport, Truncation
from afterglow.engine.types.request import Finished


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of visible text.

    >>> TextDelta("Hello").text
    'Hello'
    """

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of reasoning.

    >>> ReasoningDelta("Hm").text
    'Hm'
    """

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of tool call number `index`. The first piece has id and name; the arguments add up to one JSON text.

    >>> ToolCallDelta(0, '{"a": ', id="call_1", name="add").name
    'add'
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """Empty, so that `part.text` of any part is text to print."""
        return ""


OutputPart: TypeAlias = TextDelta | ReasoningDelta | ToolCallDelta


class OutputParser(Protocol):
    """Parses streamed text into parts.

    The joined result does not depend on how the text is split into pieces.
    """

    def feed(self, text: str) -> list[OutputPart]:
        """Return the parts that further text cannot change."""

    def finish(self, *, truncated: bool = False) -> list[OutputPart]:
        """Return the remaining parts at the end of the text. A truncated tool call keeps its partial arguments.

        `truncated`: whether the model did not end the text itself.
        """


class PlainTextParser:
    """Parser that returns everything as text.

    >>> PlainTextParser().feed("Hello")
    [TextDelta(text='Hello')]
    """

    def feed(self, text: str) -> list[OutputPart]:
        return [TextDelta(text)] if text else []

    def finish(self, *, truncated: bool = False) -> list[OutputPart]:
        return []


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the tokens of a request become a response. The default parser is that of completions: all output is text."""

    token_to_piece: Callable[[int], bytes]
    create_parser: Callable[[], OutputParser] = PlainTextParser
    parse: Callable[[str], Any] | None = None  # parses the text of a complete response
    truncation: Truncation | None = None  # what was dropped from the prompt
    replay: ReplayReport = field(default_factory=ReplayReport)  # of the prompt
    record: Callable[[Sequence[int], Sequence[OutputPart], Finished], None] | None = None  # called at the end


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """Joined parts of a complete answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def join_parts(parts: Iterable[OutputPart]) -> ParsedOutput:
    """Join parts to a complete answer.

    >>> join_parts([ReasoningDelta("Hm"), TextDelta("He"), TextDelta("llo")])
    ParsedOutput(text='Hello', reasoning='Hm', tool_calls=())
    """
    texts: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for part in parts:
        match part:
            case TextDelta(text):
                texts.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallDelta(index, arguments, id, name):
                calls.setdefault(index, (id or "", name or "", []))[2].append(arguments)
    tool_calls = tuple(ToolCall(id=id, name=name, arguments="".join(pieces)) for id, name, pieces in calls.values())
    return ParsedOutput("".join(texts), "".join(reasoning), tool_calls)
