"""Conversations as entries: control tokens only where the template put them, boundaries where messages end.

The text is cut at control tokens, and every stretch between two is tokenized once and remembered, so that the next
turn of a long conversation tokenizes only what is new.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.template import ChatTemplate
from afterglow.errors import InvalidArgument, InvalidTemplate
from afterglow.llama.vocabulary import Vocabulary

REMEMBERED = 8192  # stretches of text
RECENT = 3  # messages at the end whose ends are boundaries; older ones were, when they were the last
PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xF4000))


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, and the lengths at which a later prompt of the same conversation may part from this one."""

    tokens: tuple[int, ...]
    boundaries: frozenset[int]
    text: str
    system: int = 0  # tokens that the system messages and tools are


class PromptBuilder:
    """Renders and tokenizes the conversations of one model.

    >>> builder = PromptBuilder(vocabulary, template)
    >>> builder.build([Message(role="user", content="Hello")]).tokens
    """

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._control = vocabulary.control_texts
        texts = sorted(self._control, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._stretches: OrderedDict[str, list[int]] = OrderedDict()

    def build(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt for the assistant's next message."""
        mark = unused_character(messages)
        shielded = [self._shield(message, mark) for message in messages]
        text = self._template.render(shielded, tools=tools, arguments=arguments)
        tokens = self.tokenize(text, mark)
        boundaries, system = set(), 0
        for count in self._ends(messages):
            try:
                part = self._template.render(shielded[:count], tools=tools, generation=False, arguments=arguments)
            except InvalidTemplate:
                continue  # some templates render only whole conversations
            end = common_length(self.tokenize(common_text(part, text), mark), tokens)
            boundaries.add(end)
            system = end if count == told(messages) else system
        if tools and not told(messages):
            system = self._tools_end(shielded[0], text, tokens, mark, tools=tools, arguments=arguments)
            boundaries.add(system)
        return Prompt(tuple(tokens), frozenset(boundaries - {0, len(tokens)}), text.replace(mark, ""), system)

    def _tools_end(self, first: Message, text: str, tokens: list[int], mark: str, **options: Any) -> int:
        """How many tokens come before what the first message says: the tools, where nobody said anything before."""
        try:
            other = self._template.render([replace(first, content=mark)], generation=False, **options)
        except InvalidTemplate:
            return 0
        return common_length(self.tokenize(common_text(other, text), mark), tokens)

    def tokenize(self, text: str, mark: str = "") -> list[int]:
        """Rendered text as tokens, with the model's start token where it wants one and the template wrote none."""
        tokens: list[int] = []
        start, strip = 0, False
        for match in self._cut.finditer(text):
            token = self._control[match[0]]
            before, after = self._vocabulary.strips(token)
            stretch = text[start : match.start()]
            stretch = stretch.lstrip() if strip else stretch
            tokens += self._stretch(stretch.rstrip() if before else stretch, mark)
            tokens.append(token)
            start, strip = match.end(), after
        tokens += self._stretch(text[start:].lstrip() if strip else text[start:], mark)
        bos = self._vocabulary.special.get("bos")
        if self._vocabulary.adds_bos and bos is not None and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        return tokens

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

    def _ends(self, messages: Sequence[Message]) -> set[int]:
        """After how many messages a later prompt is likely to part from this one."""
        return {told(messages), *range(max(1, len(messages) - RECENT), len(messages) + 1)} - {0}

    def _shield(self, message: Message, mark: str) -> Message:
        """Break up the texts of control tokens in what people and tools wrote, so that they stay text."""
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


def unused_character(messages: Sequence[Message]) -> str:
    """A character of Unicode's private use that nobody wrote."""
    written = set().union(*(message.content + (message.reasoning or "") for message in messages)) if messages else set()
    written |= set().union(*(call.arguments for message in messages for call in message.tool_calls), set())
    for code in PRIVATE_USE:
        if chr(code) not in written:
            return chr(code)
    raise InvalidArgument("messages", f"use all {len(PRIVATE_USE):,} private characters: one has to be free")


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
