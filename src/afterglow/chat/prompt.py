"""Conversations as prompt entries: control tokens only from the template, boundaries at the ends of messages."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from afterglow.chat.control_tokens import ControlTokenEscaper, TemplateTokenizer, compile_alternatives
from afterglow.chat.messages import SYSTEM_ROLES, Message
from afterglow.chat.multimodal import NO_MEDIA, MediaPlaceholders, expand_placeholders, find_unused_character, spell
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.engine.types.entries import Entry, Media
from afterglow.engine.types.media import MediaPart
from afterglow.errors import InvalidTemplate
from afterglow.llama.vocabulary import Vocabulary

TruncationPolicy: TypeAlias = Literal["refuse", "shift", "truncate_middle", "compact"]
BOUNDARY_MESSAGES = 3  # the ends of the last messages are boundaries; earlier prompts had those of older messages


ReplayMiss: TypeAlias = Literal[
    "not generated here", "message edited", "arguments changed", "reasoning changed", "changed by the template"
]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Which assistant messages of a prompt have their sampled tokens, and why the others have not, by their index."""

    replayed_tokens: int = 0
    replayed_messages: tuple[int, ...] = ()
    misses: Mapping[int, ReplayMiss] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakpoint:
    """Position in a conversation up to which later prompts are likely to be the same, as the client declares it.

    >>> Breakpoint(message=0)  # the end of the first message
    Breakpoint(tools=None, message=0, offset=None, attachments=0, retention_seconds=None)
    """

    tools: int | None = None  # after this many tools. None: in a message
    message: int = 0  # index of the message
    offset: int | None = None  # in the text of the message. None: its end
    attachments: int = 0  # attachments of the message that are before the offset
    retention_seconds: float | None = None  # the prefix is pinned for this time after its last use


@dataclass(frozen=True, slots=True)
class PromptBreakpoint:
    """A breakpoint in a prompt: the prefix of `length` entries ends there."""

    length: int
    retention_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Prompt entries, and the lengths at which a later prompt of the same conversation may diverge."""

    entries: tuple[Entry, ...]
    boundaries: frozenset[int]
    text: str
    system_length: int = 0  # entries of the system messages and tools
    media: Mapping[bytes, MediaPart] = field(default_factory=dict)  # media parts by digest
    replay: ReplayReport = field(default_factory=ReplayReport)
    breakpoints: tuple[PromptBreakpoint, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens, without media entries."""
        return tuple(entry for entry in self.entries if not isinstance(entry, Media))

    @property
    def cells(self) -> int:
        """Number of KV cache cells."""
        return count_cells(self.entries)


def count_cells(entries: Sequence[Entry]) -> int:
    """Return the number of KV cache cells of entries."""
    return sum(entry.cells if isinstance(entry, Media) else 1 for entry in entries)


@dataclass(frozen=True, slots=True)
class ReplayedSpan:
    """Part of a rendered text that the prompt replaces by tokens that the model sampled for it."""

    start: int
    end: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """Messages and tool definitions as a template renders them. `tools` None: those of the prompt."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedConversation:
    """A rendered conversation before it is tokenized. `separator` is the character that escapes client text in it."""

    text: str
    separator: str
    placeholders: MediaPlaceholders
    control_pattern: re.Pattern[str]
    messages: Sequence[Message]
    has_tools: bool
    # Renders other conversations with the same options. None: the template rejects it.
    render_others: Callable[[Sequence[TemplateInput]], list[str | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """A summary in place of the old messages of a prompt, and what it took to write it."""

    summarized_messages: int
    tokens_before: int
    tokens_after: int
    summary: str
    summaries_written: int = 0  # 0: an earlier request wrote it. More than one: in pieces that fit the context
    computed_tokens: int = 0  # of the prompts of these summaries; the others were prefix hits
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What was dropped from a prompt, by its overflow policy."""

    policy: TruncationPolicy
    dropped_messages: int = 0
    dropped_tokens: int = 0
    compaction: Compaction | None = None  # with the policy `compact`
    fallback: str = ""  # why `shift` was used instead of `compact`

    @property
    def report(self) -> dict[str, Any]:
        """Value of the response field `overflow`."""
        if self.compaction is not None:
            return {"policy": self.policy, **asdict(self.compaction)}
        dropped = {"dropped_messages": self.dropped_messages, "dropped_tokens": self.dropped_tokens}
        return {"policy": self.policy, **dropped, **({"fallback": self.fallback} if self.fallback else {})}


class PromptBuilder:
    """Renders and tokenizes the conversations of one model.

    >>> with ChatTemplate("{{ messages[0].content }}!", {}) as chat_template:
    ...     builder = PromptBuilder(vocabulary, chat_template)
    ...     prompt = builder.build(builder.render([Message(role="user", content="Hello")]))
    >>> prompt.text
    'Hello!'
    """

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate, *, boundaries: bool = True) -> None:
        """`boundaries`: whether to find boundaries. Each costs one rendering; a KV cache that can be truncated at any
        position needs none."""
        self._vocabulary = vocabulary
        self._has_boundaries = boundaries
        self._template = template
        self._tokenizer = TemplateTokenizer(vocabulary, template.source)
        self._escaper = ControlTokenEscaper(self._tokenizer.tokens_by_text, template.source)
        self._control_pattern = compile_alternatives(vocabulary.control_tokens_by_text)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        placeholders: MediaPlaceholders = NO_MEDIA,
        prefill: Message | None = None,
        continuation: Callable[[str, Callable[[str], str]], str] | None = None,
    ) -> RenderedConversation:
        """Render the prompt for the next assistant message. `placeholders` are the media of the messages.

        `prefill` is the beginning of that message, and `continuation` writes it: it gets the rendered text and a
        function that escapes client text.
        """
        client_messages = messages if prefill is None else [*messages, prefill]
        separator = find_unused_character(client_messages, list(tools), chat_template_kwargs)
        escape = functools.cache(functools.partial(self._escaper.escape, separator=separator))
        options: dict[str, Any] = {"chat_template_kwargs": chat_template_kwargs, "escape": escape}

        def render_others(others: Sequence[TemplateInput]) -> list[str | None]:
            conversations = [(other.messages, tools if other.tools is None else other.tools) for other in others]
            texts = self._template.render_others(
                conversations, separator=separator, add_generation_prompt=False, **options
            )
            return [None if text is None else restore_separator(text, separator) for text in texts]

        text = restore_separator(
            self._template.render(messages, separator=separator, tools=tools, **options), separator
        )
        if continuation is not None:
            text += continuation(text, escape)
        return RenderedConversation(
            text=text,
            separator=separator,
            placeholders=placeholders,
            control_pattern=self._control_pattern,
            messages=messages,
            has_tools=bool(tools),
            render_others=render_others,
        )

    def build(
        self,
        rendered: RenderedConversation,
        replays: Sequence[ReplayedSpan] = (),
        breakpoints: Sequence[tuple[TemplateInput, float | None]] = (),
    ) -> ChatPrompt:
        """Tokenize a rendered conversation. `replays` are in order and do not overlap.

        `breakpoints` are conversations that diverge from this one at a breakpoint, with their retention.
        """
        text, separator, placeholders = rendered.text, rendered.separator, rendered.placeholders
        spans = self._tokenize_spans(rendered, replays)
        tokens = [token for span in spans for token in span.tokens]
        boundaries, system_length = set[int](), 0

        def count_shared_tokens(others: Sequence[TemplateInput]) -> list[int]:
            """Count the tokens that the prompt shares with the rendering of each of other conversations.

            0: the template rejects it. Some templates render only complete conversations.
            """
            try:
                texts = rendered.render_others(others) if others else []
            except InvalidTemplate:  # it took too long
                return [0] * len(others)
            return [0 if other is None else count_tokens(len(find_common_prefix(other, text))) for other in texts]

        def count_tokens(common: int) -> int:
            """Count the tokens of the first characters of the text, as far as they do not depend on the others."""
            count = 0
            for span in spans:
                if span.end > common:  # diverges inside
                    if span not in replays:
                        shared = text[span.start : common]
                        shared_tokens = self.tokenize(shared, separator, placeholders, add_bos=not span.start)
                        count += count_common_prefix(shared_tokens, span.tokens)
                    break
                count += len(span.tokens)
            return count

        if self._has_boundaries:
            boundaries, system_length = self._find_boundaries(
                rendered.messages, separator, count_shared_tokens, rendered.has_tools
            )
        entries, positions, media = expand_placeholders(tokens, placeholders)
        counts = count_shared_tokens([other for other, _ in breakpoints])
        lengths = [(positions[count], retention) for count, (_, retention) in zip(counts, breakpoints, strict=True)]
        return ChatPrompt(
            entries=entries,
            boundaries=frozenset(positions[boundary] for boundary in boundaries - {0, len(tokens)}),
            text=placeholders.replace_with_labels(text.replace(separator, "")),
            system_length=positions[system_length],
            media=media,
            breakpoints=tuple(PromptBreakpoint(length, retention) for length, retention in lengths if length),
        )

    def _tokenize_spans(self, rendered: RenderedConversation, replays: Sequence[ReplayedSpan]) -> list[ReplayedSpan]:
        """Return the spans of the text in order, with their tokens: sampled ones for replays."""
        spans: list[ReplayedSpan] = []
        ends = [*(replay.start for replay in replays), len(rendered.text)]
        for start, end, replay in zip([0, *(replay.end for replay in replays)], ends, [*replays, None], strict=True):
            text = rendered.text[start:end]
            tokens = self.tokenize(text, rendered.separator, rendered.placeholders, add_bos=not start)
            spans.append(ReplayedSpan(start, end, tokens))
            spans += [] if replay is None else [replay]
        return spans

    def _find_boundaries(
        self,
        messages: Sequence[Message],
        separator: str,
        count_shared_tokens: Callable[[Sequence[TemplateInput]], list[int]],
        has_tools: bool,
    ) -> tuple[set[int], int]:
        """Return the boundaries, and the length of the system messages and tools, in tokens."""
        system_count = count_system_messages(messages)
        # A later prompt is likely to diverge after the system messages and after one of the last messages.
        counts = {system_count, *range(max(1, len(messages) - BOUNDARY_MESSAGES), len(messages) + 1)} - {0}
        if has_tools and not system_count:
            counts.add(0)
        blanked = [TemplateInput(blank_next_message(messages, count, separator)) for count in sorted(counts)]
        boundaries = dict(zip(sorted(counts), count_shared_tokens(blanked), strict=True))
        refused = [count for count, boundary in boundaries.items() if count and not boundary]
        cut = [TemplateInput(messages[:count]) for count in refused]
        boundaries |= zip(refused, count_shared_tokens(cut), strict=True)
        return {*boundaries.values()}, boundaries.get(system_count, 0)

    def tokenize(
        self, text: str, separator: str = "", placeholders: MediaPlaceholders = NO_MEDIA, *, add_bos: bool = True
    ) -> list[int]:
        """Tokenize rendered text, with a negative number for each placeholder. With `add_bos`, add the BOS token if the
        model requires it and the template did not."""
        tokens: list[int] = []
        for piece in placeholders.split(text):
            tokens += [piece] if isinstance(piece, int) else self._tokenizer.tokenize(piece, separator)
        bos = self._vocabulary.special_tokens.get("bos")
        if add_bos and self._vocabulary.adds_bos and bos is not None and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        return tokens


def restore_separator(text: str, separator: str) -> str:
    """Restore the separator in rendered text: templates that print values as Python or ASCII JSON spell it.

    >>> restore_separator(r"a\\u2063b", "\u2063") == "a\u2063b"
    True
    """
    for spelling in spell(separator):
        text = text.replace(spelling, separator)
    return text


def blank_next_message(messages: Sequence[Message], count: int, separator: str) -> list[Message]:
    """Return the first `count` messages and an empty next one: an edited next message diverges at its content."""
    next_message = messages[count : count + 1]
    blank = [replace(message, content=separator, reasoning=None, tool_calls=()) for message in next_message]
    return [*messages[:count], *blank]


def cut_messages(messages: Sequence[Message], breakpoint: Breakpoint, separator: str) -> list[Message]:
    """Return messages that are the same up to a breakpoint and differ from there on."""
    index = min(breakpoint.message, len(messages) - 1)
    if breakpoint.offset is None or index < breakpoint.message:
        return blank_next_message(messages, index + 1, separator)
    message = messages[index]
    cut = replace(message, content=message.content[: breakpoint.offset] + separator, tool_calls=())
    return [*messages[:index], cut]


def count_system_messages(messages: Sequence[Message]) -> int:
    """Count the system and developer messages at the start."""
    others = (index for index, message in enumerate(messages) if message.role not in SYSTEM_ROLES)
    return next(others, len(messages))


def find_common_prefix(left: str, right: str) -> str:
    """Return the longest common prefix of two texts."""
    if right.startswith(left):
        return left
    low, high = 0, min(len(left), len(right))
    while low < high:  # bisection: comparing slices is faster than a loop over characters
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return left[:low]


def count_common_prefix(left: Sequence[Entry], right: Sequence[Entry]) -> int:
    """Return the length of the longest common prefix of two sequences of entries."""
    if left == right[: len(left)]:  # the usual case, without a loop over the tokens
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (first, second) in pairs if first != second), min(len(left), len(right)))
