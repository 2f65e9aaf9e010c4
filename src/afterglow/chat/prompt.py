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
from afterglow.chat.multimodal import NO_MEDIA, MediaPlaceholders, expand_placeholders, find_unused_character
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.engine.types.entries import Entry, Media
from afterglow.engine.types.media import MediaPart
from afterglow.errors import InvalidTemplate
from afterglow.llama.vocabulary import Vocabulary

MAX_CACHED_SPANS = 8192  # stretches of text
BOUNDARY_MESSAGES = 3  # messages at the end whose ends are boundaries; older ones were, when they were the last


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Entries, and the lengths at which a later prompt of the same conversation may part from this one."""

    entries: tuple[Entry, ...]
    boundaries: frozenset[int]
    text: str
    system_length: int = 0  # entries that the system messages and tools are
    media: Mapping[bytes, MediaPart] = field(default_factory=dict)  # of its pictures and sounds, by their digests

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
        self._has_boundaries = boundaries
        self._template = template
        self._control_tokens = vocabulary.control_tokens_by_text
        texts = sorted(self._control_tokens, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._get_strip_flags = functools.cache(vocabulary.get_strip_flags)
        self._tokenized_spans: OrderedDict[str, list[int]] = OrderedDict()

    def build(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        placeholders: MediaPlaceholders = NO_MEDIA,
    ) -> ChatPrompt:
        """The prompt for the assistant's next message. `shown` is what stands in the holes of the messages."""
        mark = find_unused_character(messages)
        shielded = [self._escape_message(message, mark) for message in messages]
        options: dict[str, Any] = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        text = self._template.render(shielded, **options)
        tokens = self._tokenize_with_placeholders(text, mark, placeholders)
        begins = functools.partial(
            self._count_shared_tokens, text=text, tokens=tokens, separator=mark, placeholders=placeholders, **options
        )
        boundaries, system = (
            self._find_boundaries(shielded, mark, begins, bool(tools)) if self._has_boundaries else (set(), 0)
        )
        entries, places, contents = expand_placeholders(tokens, placeholders)
        edges = frozenset(places[boundary] for boundary in boundaries - {0, len(tokens)})
        return ChatPrompt(
            entries, edges, placeholders.replace_with_labels(text.replace(mark, "")), places[system], contents
        )

    def _find_boundaries(
        self,
        messages: Sequence[Message],
        separator: str,
        count_shared_tokens: Callable[[Sequence[Message]], int],
        has_tools: bool,
    ) -> tuple[set[int], int]:
        """Where a later prompt may part from this one, and how many tokens its system messages and tools are."""
        boundaries, system, first = set(), 0, count_system_messages(messages)
        for count in self._choose_boundary_counts(messages, first):
            end = count_shared_tokens(self._blank_next_message(messages, count, separator)) or count_shared_tokens(
                messages[:count]
            )
            boundaries.add(end)
            system = end if count == first else system
        if has_tools and not first:
            system = count_shared_tokens(self._blank_next_message(messages, 0, separator))
            boundaries.add(system)
        return boundaries, system

    def _blank_next_message(self, messages: Sequence[Message], count: int, separator: str) -> list[Message]:
        """The first messages and the next one without what it says: an edited one parts from it there."""
        silent = [replace(one, content=separator, reasoning=None, tool_calls=()) for one in messages[count : count + 1]]
        return [*messages[:count], *silent]

    def _count_shared_tokens(
        self,
        messages: Sequence[Message],
        text: str,
        tokens: list[int],
        separator: str,
        placeholders: MediaPlaceholders,
        **options: Any,
    ) -> int:
        """How many tokens a conversation shares with another that begins as it does."""
        try:
            other = self._template.render(messages, add_generation_prompt=False, **options)
        except InvalidTemplate:
            return 0  # some templates render only whole conversations
        return count_common_prefix(
            self._tokenize_with_placeholders(find_common_prefix(other, text), separator, placeholders), tokens
        )

    def tokenize(self, text: str, separator: str = "") -> list[int]:
        """Rendered text as tokens, with the model's start token where it wants one and the template wrote none."""
        return self._tokenize_with_placeholders(text, separator, NO_MEDIA)

    def _tokenize_with_placeholders(self, text: str, separator: str, placeholders: MediaPlaceholders) -> list[int]:
        """The same, with a negative number for each hole."""
        tokens: list[int] = []
        for piece in placeholders.split(text):
            tokens += [piece] if isinstance(piece, int) else self._tokenize_text(piece, separator)
        bos = self._vocabulary.special_tokens.get("bos")
        if self._vocabulary.adds_bos and bos is not None and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        return tokens

    def _tokenize_text(self, text: str, separator: str) -> list[int]:
        tokens: list[int] = []
        start, strip = 0, False
        for match in self._control_pattern.finditer(text):
            token = self._control_tokens[match[0]]
            before, after = self._get_strip_flags(token)
            stretch = text[start : match.start()]
            stretch = stretch.lstrip() if strip else stretch
            tokens += self._tokenize_span(stretch.rstrip() if before else stretch, separator)
            tokens.append(token)
            start, strip = match.end(), after
        return tokens + self._tokenize_span(text[start:].lstrip() if strip else text[start:], separator)

    def _tokenize_span(self, text: str, separator: str) -> list[int]:
        if not text:
            return []
        known = self._tokenized_spans.get(text)
        if known is None:
            known = self._vocabulary.tokenize(text.replace(separator, "") if separator else text)
            self._tokenized_spans[text] = known
            if len(self._tokenized_spans) > MAX_CACHED_SPANS:
                self._tokenized_spans.popitem(last=False)
        else:
            self._tokenized_spans.move_to_end(text)
        return known

    def _choose_boundary_counts(self, messages: Sequence[Message], system_count: int) -> set[int]:
        """After how many messages a later prompt is likely to part from this one: the `first` say how to answer."""
        return {system_count, *range(max(1, len(messages) - BOUNDARY_MESSAGES), len(messages) + 1)} - {0}

    def _escape_message(self, message: Message, separator: str) -> Message:
        """Break up the texts of control tokens in what people and tools wrote, so that they stay text."""
        written = (message.content, message.reasoning or "", *(call.arguments for call in message.tool_calls))
        if not any(map(self._control_pattern.search, written)):
            return message
        return replace(
            message,
            content=self._escape_control_tokens(message.content, separator),
            reasoning=None if message.reasoning is None else self._escape_control_tokens(message.reasoning, separator),
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.name, arguments=self._escape_control_tokens(call.arguments, separator))
                for call in message.tool_calls
            ),
        )

    def _escape_control_tokens(self, text: str, separator: str) -> str:
        return self._control_pattern.sub(lambda match: match[0][:1] + separator + match[0][1:], text)


def count_system_messages(messages: Sequence[Message]) -> int:
    """How many messages at the beginning say how to answer."""
    others = (index for index, message in enumerate(messages) if message.role not in ("system", "developer"))
    return next(others, len(messages))


def find_common_prefix(left: str, right: str) -> str:
    """What two texts begin with in common."""
    if right.startswith(left):
        return left
    length = min(len(left), len(right))
    low, high = 0, length
    while low < high:  # slices compare at C's speed
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return left[:low]


def count_common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for first, second in zip(left, right, strict=False):
        if first != second:
            break
        length += 1
    return length
