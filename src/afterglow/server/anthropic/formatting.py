"""Formatting of a generation as an Anthropic message: content blocks, usage, whole or as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.output.response import ChatResponse, Delta
from afterglow.chat.prompt import count_cells
from afterglow.engine.types.request import PrefillProgress
from afterglow.server.anthropic.errors import build_error_body
from afterglow.server.errors import APIError
from afterglow.server.generation import Generation
from afterglow.server.sealing import get_sealer
from afterglow.server.sse import StreamFormat, format_event

ItemT = TypeVar("ItemT")
MessageEvent: TypeAlias = dict[str, Any]
PING_EVENT: MessageEvent = {"type": "ping"}
LONG_RETENTION_SECONDS = 3600.0
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "deadline": "max_tokens", "tool_calls": "tool_use"}


class BlockBuilder:
    """Builds the content blocks of a message from output parts, and the events of each part."""

    def __init__(self, salt: str, *, omit_thinking: bool) -> None:
        """`omit_thinking`: thinking is sent encrypted, as the signature of an empty block."""
        self.blocks: list[dict[str, Any]] = []
        self._salt = salt
        self._omit_thinking = omit_thinking
        self._pieces: list[str] = []  # text, thinking or input of the last block
        self._call_index = -1  # of the last tool call
        self._is_open = False

    def add_part(self, part: OutputPart) -> Iterator[MessageEvent]:
        """Add a part and yield its events."""
        match part:
            case TextDelta(text):
                if not self._is_in("text"):
                    yield from self._start({"type": "text", "text": ""})
                yield self._add_piece(text, {"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                if not self._is_in("thinking"):
                    yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
                event = self._add_piece(text, {"type": "thinking_delta", "thinking": text})
                if not self._omit_thinking:
                    yield event
            case ToolCallDelta(index, arguments, id, name):
                if not self._is_in("tool_use") or index != self._call_index:
                    self._call_index = index
                    yield from self._start({"type": "tool_use", "id": id, "name": name, "input": {}})
                if arguments:
                    yield self._add_piece(arguments, {"type": "input_json_delta", "partial_json": arguments})

    def finish(self) -> Iterator[MessageEvent]:
        """Complete the last block and yield its last events."""
        if not self._is_open:
            return
        self._is_open = False
        block, text = self.blocks[-1], "".join(self._pieces)
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                sealer = get_sealer()
                block["thinking"] = "" if self._omit_thinking else text
                block["signature"] = (sealer.encrypt if self._omit_thinking else sealer.sign)(text, self._salt)
                yield self._build_delta({"type": "signature_delta", "signature": block["signature"]})
            case "tool_use":
                block["input"] = parse_input(text)
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _is_in(self, block_type: str) -> bool:
        return self._is_open and self.blocks[-1]["type"] == block_type

    def _start(self, block: dict[str, Any]) -> Iterator[MessageEvent]:
        yield from self.finish()
        self.blocks.append(block)
        self._pieces, self._is_open = [], True
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _add_piece(self, text: str, delta: dict[str, Any]) -> MessageEvent:
        self._pieces.append(text)
        return self._build_delta(delta)

    def _build_delta(self, delta: dict[str, Any]) -> MessageEvent:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def parse_input(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a tool call. Those of a truncated call are no JSON.

    >>> parse_input('{"a": 1}'), parse_input('{"a": ')
    ({'a': 1}, {})
    """
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def build_input_usage(generation: Generation, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Divide the prompt tokens: reused ones, computed ones before the last breakpoint, and the rest."""
    prompt = generation.prompts[0]
    entries = prompt.request.entries
    ends = {breakpoint.length: breakpoint.retention_seconds for breakpoint in prompt.breakpoints}

    def count_created(positions: Sequence[int]) -> int:
        return max(0, count_cells(list(entries[: max(positions, default=0)])) - cached_tokens)

    created = count_created(list(ends))
    created_1h = count_created([end for end, seconds in ends.items() if (seconds or 0) >= LONG_RETENTION_SECONDS])
    return {
        "input_tokens": prompt_tokens - cached_tokens - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - created_1h,
            "ephemeral_1h_input_tokens": created_1h,
        },
    }


def build_stop(response: ChatResponse, max_tokens: int) -> dict[str, Any]:
    """Build `stop_reason` and `stop_sequence`."""
    reason = STOP_REASONS[response.finish_reason]
    if reason == "max_tokens" and response.finish_reason == "length" and response.usage.generated_tokens < max_tokens:
        reason = "model_context_window_exceeded"
    sequence = response.stop_reason if isinstance(response.stop_reason, str) and reason == "end_turn" else None
    return {"stop_reason": "stop_sequence" if sequence else reason, "stop_sequence": sequence}


def format_ping(progress: PrefillProgress | None) -> bytes:
    """Format a keep-alive ping of a stream as an event, as Anthropic does."""
    return format_event(PING_EVENT, "ping")


def format_stream_error(error: APIError) -> bytes:
    """Format the error that ends a stream."""
    return format_event(build_error_body(error), "error")


STREAM_FORMAT = StreamFormat(format_stream_error, format_ping)


class MessageFormatter:
    """Formats a generation as a message, whole or as events."""

    def __init__(
        self,
        generation: Generation,
        *,
        max_tokens: int,
        salt: str,
        omit_thinking: bool = False,
        diagnostics: dict[str, Any] | None = None,
    ) -> None:
        self._generation = generation
        self._max_tokens = max_tokens
        self._builder = BlockBuilder(salt, omit_thinking=omit_thinking)
        self._head: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": generation.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "diagnostics": diagnostics,
        }
        for truncation in generation.truncations:  # at most one: there is one prompt
            self._head["overflow"] = truncation.report

    async def build_response(self) -> dict[str, Any]:
        """Build the whole message."""
        async for _, delta in self._generation.stream_deltas():
            self._add_delta(delta)
        list(self._builder.finish())
        (response,) = self._generation.get_responses()
        return {
            **self._head,
            "content": self._builder.blocks,
            **build_stop(response, self._max_tokens),
            "usage": self._build_usage(response),
        }

    async def stream_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Yield the events of the stream."""
        async for event in self._build_events(deltas):
            yield format_event(event, event["type"])

    def format_error(self, error: APIError) -> bytes:
        """Format the error that ends a stream."""
        return format_stream_error(error)

    async def _build_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[MessageEvent]:
        is_started = False
        async for _, delta in deltas:
            if not is_started:
                is_started = True
                # A request that its deadline ends while it waits has no progress: its only delta is the last one.
                source = delta.progress or self._generation.get_responses()[0].usage
                usage = build_input_usage(self._generation, source.prompt_tokens, source.cached_tokens)
                usage |= {"output_tokens": 0, "service_tier": "standard"}
                yield {"type": "message_start", "message": {**self._head, "usage": usage}}
                yield PING_EVENT
            for event in self._add_delta(delta):
                yield event
        for event in self._builder.finish():
            yield event
        (response,) = self._generation.get_responses()
        yield {
            "type": "message_delta",
            "delta": build_stop(response, self._max_tokens),
            "usage": self._build_usage(response),
        }
        yield {"type": "message_stop"}

    def _add_delta(self, delta: Delta) -> list[MessageEvent]:
        return [event for part in delta.parts for event in self._builder.add_part(part)]

    def _build_usage(self, response: ChatResponse) -> dict[str, Any]:
        usage = response.usage
        return {
            **build_input_usage(self._generation, usage.prompt_tokens, usage.cached_tokens),
            "output_tokens": usage.generated_tokens,
            "output_tokens_details": {"thinking_tokens": self._generation.reasoning_tokens},
            "service_tier": "standard",
        }
