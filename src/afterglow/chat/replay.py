"""Exact replay: later prompts use the tokens that the model sampled for its own messages.

A client sends the history back as JSON, and a template renders it. The result often differs from what the model
generated: other white space in tool call arguments, other key order, another tokenization of the same text. Everything
after the first difference would be prefilled again.

`ReplayStore` keeps generated messages by their place: the rendered text between the last replayed message and this one.
`Replayer` walks through a rendered prompt from place to place. It replaces a message by its sampled tokens if the
client returned the same text, reasoning and calls, and if the rendered text of the message has the same parts in the
same order. A template that drops reasoning renders other parts, so such a message is not replayed.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.multimodal import MediaPlaceholders
from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta, join_parts
from afterglow.chat.prompt import (
    RenderedConversation,
    ReplayedSpan,
    ReplayMiss,
    ReplayReport,
    TemplateInput,
    find_common_prefix,
)
from afterglow.errors import InvalidTemplate

MAX_MESSAGE_ENDS = 64  # control tokens after the start of a message that may end it
MAX_CACHED_CHECKS = 8192  # of rendered messages
CONTEXT_CHARACTERS = 256  # before a message, for its parser
RECORD_BYTES = 400  # of a generated message in RAM, beside its tokens; measured with tracemalloc
DIGEST_BYTES = 16

CallDefaults: TypeAlias = Mapping[str, Mapping[str, Any]]  # of the arguments of tools, by the name of the tool
NO_DEFAULTS: CallDefaults = MappingProxyType({})


def digest(*values: bytes) -> bytes:
    """Hash byte strings, each with its length."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for value in values:
        hasher.update(len(value).to_bytes(8, "little") + value)
    return hasher.digest()


# --- meaning


@dataclass(frozen=True, slots=True)
class Meaning:
    """Digests of what a message says. White space and key order of call arguments do not count."""

    text: bytes
    reasoning: bytes
    calls: bytes


def compute_meaning(text: str, reasoning: str, calls: Sequence[ToolCall]) -> Meaning:
    """Compute the meaning of an assistant message.

    >>> calls = [ToolCall(id="", name="add", arguments=text) for text in ('{"a":1,"b":2}', '{"b": 2, "a": 1}')]
    >>> compute_meaning("", "", calls[:1]) == compute_meaning("", "", calls[1:])
    True
    """
    text = "" if calls and text.isspace() else text  # clients drop white space beside calls
    return Meaning(
        digest(encode(text)), digest(encode(reasoning)), digest(*(encode(describe_call(call)) for call in calls))
    )


def describe_call(call: ToolCall) -> str:
    """Return name and arguments of a call as canonical JSON; arguments that are no JSON as they are."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = [call.arguments]
    return _write_canonical([call.name, arguments])


def drop_defaults(call: ToolCall, defaults: CallDefaults) -> ToolCall:
    """Return a call without the arguments that have the default of their schema. Clients such as Claude Code add them.

    >>> call = ToolCall(id="", name="edit", arguments='{"file": "a", "all": false}')
    >>> drop_defaults(call, {"edit": {"all": False}}).arguments
    '{"file": "a"}'
    """
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    known = {name: _write_canonical(value) for name, value in defaults.get(call.name, {}).items()}
    kept = {name: value for name, value in arguments.items() if known.get(name) != _write_canonical(value)}
    return replace(call, arguments=json.dumps(kept))


def _write_canonical(value: Any) -> str:
    return json.dumps(_normalize_numbers(value), sort_keys=True)


def _normalize_numbers(value: Any) -> Any:
    """Return a JSON value with whole numbers as integers: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _normalize_numbers(item) for key, item in value.items()}
    return [_normalize_numbers(item) for item in value] if isinstance(value, list) else value


def compute_outline(parts: Sequence[OutputPart], defaults: CallDefaults = NO_DEFAULTS) -> bytes:
    """Compute the digest of the parts in their order, without arguments that have a default. White space around texts
    does not count: templates strip it."""
    pieces: list[tuple[str, str]] = []
    calls = {part.index: None for part in parts if isinstance(part, ToolCallDelta)}
    complete = dict(zip(calls, join_parts(parts).tool_calls, strict=True))
    for part in parts:
        match part:
            case ToolCallDelta(index):
                if (call := complete.pop(index, None)) is not None:
                    pieces.append(("call", describe_call(drop_defaults(call, defaults))))
            case TextDelta(text) | ReasoningDelta(text):
                kind = "text" if isinstance(part, TextDelta) else "reasoning"
                if pieces and pieces[-1][0] == kind:
                    pieces[-1] = kind, pieces[-1][1] + text
                else:
                    pieces.append((kind, text))
    return digest(*(encode(f"{kind} {text.strip()}") for kind, text in pieces if text.strip()))


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# --- generated messages


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message begins: after `length` characters of rendered text that follow the replayed message `parent`."""

    parent: bytes
    length: int
    text: bytes  # digest of these characters
    index: int  # of the message in the conversation


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedMessage:
    """A message of the model: its place, its meaning and its sampled tokens, without the end token."""

    place: Place
    meaning: Meaning
    outline: bytes
    call_ids: tuple[str, ...]
    written_ids: tuple[str, ...]  # call ids that the model wrote itself, so that the rendered text must have them
    tokens: tuple[int, ...]
    id: bytes = field(init=False)

    def __post_init__(self) -> None:
        tokens = b"".join(token.to_bytes(4, "little") for token in self.tokens)
        place = self.place
        object.__setattr__(self, "id", digest(place.parent, place.text, self.outline, tokens))

    @property
    def nbytes(self) -> int:
        """Bytes in RAM."""
        return RECORD_BYTES + 4 * len(self.tokens)


class ReplayDisk(Protocol):
    """Keeps generated messages over restarts."""

    def read(self, parent: bytes) -> list[GeneratedMessage]:
        """Return the messages that follow `parent`."""

    def write(self, message: GeneratedMessage) -> None:
        """Keep a message. Does not block."""

    def touch(self, ids: Sequence[bytes]) -> None:
        """Note that messages were used. Does not block."""

    def clear(self) -> None:
        """Remove the messages of the model."""

    def close(self) -> None:
        """Write what is left."""


class ReplayStore:
    """Generated messages of one model in RAM, and on disk if there is one. Evicts the least recently used ones.

    A replayed message is used together with all messages before it, so a message is evicted before its parent.

    >>> ReplayStore("tiny").get_root("tenant") == ReplayStore("tiny").get_root("other tenant")
    False
    """

    def __init__(self, model: str, max_bytes: int = 64 * 1024**2, disk: ReplayDisk | None = None) -> None:
        self._model = model
        self._max_bytes = max_bytes
        self._disk = disk
        self._nbytes = 0
        self._messages: OrderedDict[bytes, GeneratedMessage] = OrderedDict()  # by id, least recently used first
        self._children: dict[bytes, dict[bytes, GeneratedMessage]] = {}  # by parent, by id
        self._read_parents: set[bytes] = set()  # whose children on disk are in RAM
        self._checks: OrderedDict[bytes, bool] = OrderedDict()  # results of `check_rendering`
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes in RAM."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._messages)

    def get_root(self, salt: str) -> bytes:
        """Return the parent of the first messages of a tenant. Everything found from there was generated for it."""
        return digest(encode(self._model), encode(salt))

    def find_children(self, parent: bytes) -> list[GeneratedMessage]:
        """Return the messages whose place follows `parent`, shortest place first, then oldest first."""
        with self._lock:
            if self._disk is not None and parent not in self._read_parents:
                self._read_parents.add(parent)
                for message in self._disk.read(parent):
                    self._insert(message)
            return sorted(self._children.get(parent, {}).values(), key=lambda message: message.place.length)

    def add(self, message: GeneratedMessage) -> None:
        """Keep a message."""
        with self._lock:
            self._insert(message)
            ancestor = message.place.parent
            while ancestor in self._messages:
                self._messages.move_to_end(ancestor)
                ancestor = self._messages[ancestor].place.parent
            if self._disk is not None:
                self._disk.write(message)

    def touch(self, messages: Sequence[GeneratedMessage]) -> None:
        """Mark the replayed messages of a prompt as used, the last one first."""
        with self._lock:
            for message in reversed(messages):
                if message.id in self._messages:
                    self._messages.move_to_end(message.id)
            if self._disk is not None and messages:
                self._disk.touch([message.id for message in messages])

    def check_rendering(self, message: GeneratedMessage, rendered: str, check: Callable[[], bool]) -> bool:
        """Return the result of `check` for a rendered text of a message. It is called once for each text."""
        key = digest(message.id, encode(rendered))
        with self._lock:
            known = self._checks.get(key)
        result = check() if known is None else known
        with self._lock:
            self._checks[key] = result
            self._checks.move_to_end(key)
            if len(self._checks) > MAX_CACHED_CHECKS:
                self._checks.popitem(last=False)
        return result

    def clear(self) -> None:
        """Remove all messages, on disk too."""
        with self._lock:
            self._messages.clear()
            self._children.clear()
            self._read_parents.clear()
            self._nbytes = 0
            if self._disk is not None:
                self._disk.clear()

    def close(self) -> None:
        """Write what is left to disk."""
        if self._disk is not None:
            self._disk.close()

    def _insert(self, message: GeneratedMessage) -> None:
        if message.id in self._messages or message.nbytes > self._max_bytes:
            return
        self._messages[message.id] = message
        self._children.setdefault(message.place.parent, {})[message.id] = message
        self._nbytes += message.nbytes
        while self._nbytes > self._max_bytes:
            self._evict(next(iter(self._messages.values())))

    def _evict(self, message: GeneratedMessage) -> None:
        parent = message.place.parent
        del self._messages[message.id]
        self._nbytes -= message.nbytes
        self._children[parent].pop(message.id)
        if not self._children[parent]:
            del self._children[parent]
        self._read_parents.discard(parent)  # it may still be on disk


# --- replay


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Replayed spans of one prompt in order, and the place of the message that will be generated after it."""

    spans: tuple[ReplayedSpan, ...]
    place: Place
    report: ReplayReport


@dataclass(frozen=True, slots=True)
class Replayer:
    """Finds the messages of one conversation that can be replayed.

    `parse` returns the parts of a rendered message, given the end of the text before it. `write_as_text` returns the
    text of a message whose calls the template cannot render.
    """

    store: ReplayStore
    salt: str
    messages: Sequence[Message]  # as the client sent them
    parse: Callable[[str, str], Sequence[OutputPart]]
    write_as_text: Callable[[Message], str | None] = lambda message: None
    defaults: CallDefaults = field(default_factory=lambda: NO_DEFAULTS)

    def plan(self, rendered: RenderedConversation) -> ReplayPlan:
        """Find the replayed spans of a rendered conversation."""
        plain = PlainText(rendered.text, rendered.separator, rendered.placeholders)
        parent, start = self.store.get_root(self.salt), 0
        spans: list[ReplayedSpan] = []
        replayed: list[GeneratedMessage] = []
        misses: dict[int, ReplayMiss] = {}
        while (found := self._find_next(rendered, plain, parent, start, misses)) is not None:
            span, message = found
            spans.append(span)
            replayed.append(message)
            parent, start = message.id, plain.from_raw(span.end)
        self.store.touch(replayed)
        rest = plain.text[start:]
        place = Place(parent, len(rest), digest_text(rest), len(self.messages))
        return ReplayPlan(tuple(spans), place, self._build_report(replayed, misses))

    def _find_next(
        self,
        rendered: RenderedConversation,
        plain: PlainText,
        parent: bytes,
        start: int,
        misses: dict[int, ReplayMiss],
    ) -> tuple[ReplayedSpan, GeneratedMessage] | None:
        """Return the first message after `parent` that can be replayed. `misses` gets the reasons of the others."""
        for message in self._iter_candidates(plain, parent, start):
            reason = self._compare(message)
            if reason is None:
                span_start = plain.to_raw(start + message.place.length)
                end = self._find_end(message, rendered, span_start)
                if end is not None:
                    return ReplayedSpan(span_start, end, message.tokens), message
                reason = "changed by the template"
            if misses.get(message.place.index) != "changed by the template":  # it is the one that the client means
                misses[message.place.index] = reason
        return None

    def _iter_candidates(self, plain: PlainText, parent: bytes, start: int) -> Iterator[GeneratedMessage]:
        """Yield the messages whose place is in this prompt, nearest first."""
        hasher, hashed = create_text_hasher(), start
        children = self.store.find_children(parent)
        for length, messages in itertools.groupby(children, key=lambda message: message.place.length):
            if start + length >= len(plain.text):
                return
            hasher.update(encode(plain.text[hashed : start + length]))
            hashed = start + length
            text = hasher.copy().digest()
            here = [message for message in messages if message.place.text == text]
            # Answers with the same meaning: the call ids tell which one the client has, else the newest is likely.
            yield from sorted(here[::-1], key=lambda message: not self._has_call_ids(message))

    def _has_call_ids(self, generated: GeneratedMessage) -> bool:
        calls = self.messages[generated.place.index].tool_calls if generated.place.index < len(self.messages) else ()
        return tuple(call.id for call in calls) == generated.call_ids

    def _compare(self, generated: GeneratedMessage) -> ReplayMiss | None:
        """Return why the client's message is not the generated one; None if it is."""
        index = generated.place.index
        message = self.messages[index] if index < len(self.messages) else None
        if message is None or message.role != "assistant" or message.attachments:
            return "message edited"
        meaning = compute_meaning(message.content, message.reasoning or "", message.tool_calls)
        if meaning.text != generated.meaning.text:
            return "message edited"
        without_defaults = [drop_defaults(call, self.defaults) for call in message.tool_calls]
        if generated.meaning.calls not in (meaning.calls, compute_meaning("", "", without_defaults).calls):
            return "arguments changed"
        return None if meaning.reasoning == generated.meaning.reasoning else "reasoning changed"

    def _find_end(self, message: GeneratedMessage, rendered: RenderedConversation, start: int) -> int | None:
        """Return where the rendered message ends: at the control token before which it has the generated parts."""
        separator = rendered.separator
        before = rendered.text[max(0, start - CONTEXT_CHARACTERS) : start].replace(separator, "")
        for end in self._iter_ends(message, rendered, start):
            candidate = rendered.text[start:end].replace(separator, "")
            check = functools.partial(self._has_same_parts, message, before, candidate)
            if self.store.check_rendering(message, before + candidate, check):
                return end
        return None

    def _iter_ends(self, message: GeneratedMessage, rendered: RenderedConversation, start: int) -> Iterator[int]:
        """Yield where the rendered message may end. Without control tokens, the next message is rendered after it."""
        text, end = rendered.text, None
        for match in itertools.islice(rendered.control_pattern.finditer(text, start), MAX_MESSAGE_ENDS):
            end = match.start()
            yield end
        if end is None:
            number = sum(other.role == "assistant" for other in self.messages[: message.place.index])
            indexes = [index for index, other in enumerate(rendered.messages) if other.role == "assistant"]
            with contextlib.suppress(InvalidTemplate, IndexError):
                (other,) = rendered.render_others([TemplateInput(rendered.messages[: indexes[number] + 1])])
                if other is not None:
                    yield start + len(find_common_prefix(other, text)[start:].rstrip())

    def _has_same_parts(self, generated: GeneratedMessage, before: str, rendered: str) -> bool:
        """Return whether a rendered message has the generated parts in their order."""
        if not all(id in rendered for id in generated.written_ids):
            return False
        parts = self.parse(before, rendered)
        if generated.outline in (compute_outline(parts), compute_outline(parts, self.defaults)):
            return True
        message = self.messages[generated.place.index]
        return rendered.strip() == self.write_as_text(message) and generated.outline == compute_outline(
            [
                ReasoningDelta(message.reasoning or ""),
                TextDelta(message.content),
                *(ToolCallDelta(i, call.arguments, call.id, call.name) for i, call in enumerate(message.tool_calls)),
            ]
        )

    def _build_report(self, replayed: Sequence[GeneratedMessage], misses: Mapping[int, ReplayMiss]) -> ReplayReport:
        indexes = tuple(message.place.index for message in replayed)
        others = {index for index, message in enumerate(self.messages) if message.role == "assistant"} - {*indexes}
        return ReplayReport(
            sum(len(message.tokens) for message in replayed),
            indexes,
            {index: misses.get(index, "not generated here") for index in sorted(others)},
        )


class PlainText:
    """Rendered text without separators, with the digests of media instead of their placeholders."""

    def __init__(self, raw: str, separator: str, placeholders: MediaPlaceholders) -> None:
        patterns = [re.escape(separator)] if separator else []
        if placeholders.media:
            patterns.append(f"{placeholders.delimiter}(?P<number>\\d+){placeholders.delimiter}")
        pieces: list[str] = []
        self._raw_starts, self._starts = [0], [0]  # of the pieces of text between the replaced ones
        end = length = 0
        for match in re.finditer("|".join(patterns), raw) if patterns else ():
            number = match.groupdict().get("number")
            pieces += [raw[end : match.start()], "" if number is None else placeholders.describe(int(number))]
            length += len(pieces[-1]) + len(pieces[-2])
            end = match.end()
            self._raw_starts.append(end)
            self._starts.append(length)
        self.text = "".join([*pieces, raw[end:]])

    def to_raw(self, offset: int) -> int:
        """Return the offset in the rendered text of an offset in the plain text."""
        piece = bisect.bisect_right(self._starts, offset) - 1
        return self._raw_starts[piece] + offset - self._starts[piece]

    def from_raw(self, offset: int) -> int:
        """Return the offset in the plain text of an offset in the rendered text."""
        piece = bisect.bisect_right(self._raw_starts, offset) - 1
        return self._starts[piece] + offset - self._raw_starts[piece]


def create_text_hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def digest_text(text: str) -> bytes:
    """Hash the text of a place."""
    return hashlib.blake2b(encode(text), digest_size=DIGEST_BYTES).digest()
