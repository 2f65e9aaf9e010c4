"""Conversations as entries: control tokens only where the template put them, boundaries where messages end.

The text is cut at control tokens, and every stretch between two is tokenized once and remembered, so that the next
turn of a long conversation tokenizes only what is new.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.seeing import NOTHING, Shown, filled, unused_character
from afterglow.chat.template import ChatTemplate
from afterglow.engine.entries import Entry, Media
from afterglow.engine.pictures import Part
from afterglow.errors import InvalidTemplate
from afterglow.llama.vocabulary import Vocabulary

REMEMBERED = 8192  # stretches of text
RECENT = 3  # messages at the end whose ends are boundaries; older ones were, when they were the last


@dataclass(frozen=True, slots=True)
class Prompt:
    """Entries, and the lengths at which a later prompt of the same conversation may part from this one."""

    entries: tuple[Entry, ...]
    boundaries: frozenset[int]
    text: str
    system: int = 0  # entries that the system messages and tools are
    contents: Mapping[bytes, Part] = field(default_factory=dict)  # of its pictures and sounds, by their digests

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its tokens alone."""
        return tuple(entry for entry in self.entries if not isinstance(entry, Media))

    @property
    def cells(self) -> int:
        """How long it is in memory."""
        return sum(entry.cells if isinstance(entry, Media) else 1 for entry in self.entries)


class PromptBuilder:
    """Renders and tokenizes the conversations of one model.

    >>> builder = PromptBuilder(vocabulary, template)
    >>> builder.build([Message(role="user", content="Hello")]).tokens
    """

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate, *, boundaries: bool = True) -> None:
        """`boundaries`: whether they are of use. Each takes a rendering; memory that stands anywhere needs none."""
        self._vocabulary = vocabulary
        self._bounded = boundaries
        self._template = template
        self._control = vocabulary.control_texts
        texts = sorted(self._control, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._strips = functools.cache(vocabulary.strips)
        self._stretches: OrderedDict[str, list[int]] = OrderedDict()

    def build(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        shown: Shown = NOTHING,
    ) -> Prompt:
        """The prompt for the assistant's next message. `shown` is what stands in the holes of the messages."""
        mark = unused_character(messages)
        shielded = [self._shield(message, mark) for message in messages]
        options: dict[str, Any] = {"tools": tools, "arguments": arguments}
        text = self._template.render(shielded, **options)
        tokens = self._tokens(text, mark, shown)
        begins = functools.partial(self._begins, text=text, tokens=tokens, mark=mark, shown=shown, **options)
        boundaries, system = self._edges(shielded, mark, begins, bool(tools)) if self._bounded else (set(), 0)
        entries, places, contents = filled(tokens, shown)
        edges = frozenset(places[boundary] for boundary in boundaries - {0, len(tokens)})
        return Prompt(entries, edges, shown.without_holes(text.replace(mark, "")), places[system], contents)

    def _edges(
        self, messages: Sequence[Message], mark: str, begins: Callable[[Sequence[Message]], int], tools: bool
    ) -> tuple[set[int], int]:
        """Where a later prompt may part from this one, and how many tokens its system messages and tools are."""
        boundaries, system, first = set(), 0, told(messages)
        for count in self._ends(messages, first):
            end = begins(self._opened(messages, count, mark)) or begins(messages[:count])
            boundaries.add(end)
            system = end if count == first else system
        if tools and not first:
            system = begins(self._opened(messages, 0, mark))
            boundaries.add(system)
        return boundaries, system

    def _opened(self, messages: Sequence[Message], count: int, mark: str) -> list[Message]:
        """The first messages and the next one without what it says: an edited one parts from it there."""
        silent = [replace(one, content=mark, reasoning=None, tool_calls=()) for one in messages[count : count + 1]]
        return [*messages[:count], *silent]

    def _begins(
        self, messages: Sequence[Message], text: str, tokens: list[int], mark: str, shown: Shown, **options: Any
    ) -> int:
        """How many tokens a conversation shares with another that begins as it does."""
        try:
            other = self._template.render(messages, generation=False, **options)
        except InvalidTemplate:
            return 0  # some templates render only whole conversations
        return common_length(self._tokens(common_text(other, text), mark, shown), tokens)

    def tokenize(self, text: str, mark: str = "") -> list[int]:
        """Rendered text as tokens, with the model's start token where it wants one and the template wrote none."""
        return self._tokens(text, mark, NOTHING)

    def _tokens(self, text: str, mark: str, shown: Shown) -> list[int]:
        """The same, with a negative number for each hole."""
        tokens: list[int] = []
        for piece in shown.cut(text):
            tokens += [piece] if isinstance(piece, int) else self._stretches_of(piece, mark)
        bos = self._vocabulary.special.get("bos")
        if self._vocabulary.adds_bos and bos is not None and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        return tokens

    def _stretches_of(self, text: str, mark: str) -> list[int]:
        tokens: list[int] = []
        start, strip = 0, False
        for match in self._cut.finditer(text):
            token = self._control[match[0]]
            before, after = self._strips(token)
            stretch = text[start : match.start()]
            stretch = stretch.lstrip() if strip else stretch
            tokens += self._stretch(stretch.rstrip() if before else stretch, mark)
            tokens.append(token)
            start, strip = match.end(), after
        return tokens + self._stretch(text[start:].lstrip() if strip else text[start:], mark)

    def _stretch(self, text: str, mark: str) -> list[int]:
        if not text:
            return []
        known = self._stretches.get(text)
        if known is None:
            known = self._vocabulary.tokenize(text.replace(mark, "") if mark else text)
            self._stretches[text] = known
            if len(self._stretches) > REMEMBERED:
                self._stretches.popitem(last=False)
        else:
            self._stretches.move_to_end(text)
        return known

    def _ends(self, messages: Sequence[Message], first: int) -> set[int]:
        """After how many messages a later prompt is likely to part from this one: the `first` say how to answer."""
        return {first, *range(max(1, len(messages) - RECENT), len(messages) + 1)} - {0}

    def _shield(self, message: Message, mark: str) -> Message:
        """Break up the texts of control tokens in what people and tools wrote, so that they stay text."""
        written = (message.content, message.reasoning or "", *(call.arguments for call in message.tool_calls))
        if not any(map(self._cut.search, written)):
            return message
        return replace(
            message,
            content=self._broken(message.content, mark),
            reasoning=None if message.reasoning is None else self._broken(message.reasoning, mark),
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.name, arguments=self._broken(call.arguments, mark))
                for call in message.tool_calls
            ),
        )

    def _broken(self, text: str, mark: str) -> str:
        return self._cut.sub(lambda match: match[0][:1] + mark + match[0][1:], text)


def told(messages: Sequence[Message]) -> int:
    """How many messages at the beginning say how to answer."""
    others = (index for index, message in enumerate(messages) if message.role not in ("system", "developer"))
    return next(others, len(messages))


def common_text(one: str, other: str) -> str:
    """What two texts begin with in common."""
    if other.startswith(one):
        return one
    length = min(len(one), len(other))
    low, high = 0, length
    while low < high:  # slices compare at C's speed
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        length += 1
    return length
