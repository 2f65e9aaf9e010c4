"""Responses of generations in Ollama's format, whole or as lines of JSON."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from afterglow.api.model import Model
from afterglow.chat.messages import ToolCall
from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.output.response import ChatResponse, Delta
from afterglow.engine.types.request import Token
from afterglow.server.errors import APIError
from afterglow.server.generation import Generation
from afterglow.server.ollama.details import format_time
from afterglow.server.ollama.errors import build_error_body
from afterglow.server.ollama.library import OpenedModel
from afterglow.server.sse import encode_json

DONE_REASONS = {"tool_calls": "stop", "deadline": "length"}
LIMIT_REASONS = ("length", "deadline")


def format_line(value: dict[str, Any]) -> bytes:
    """Format one line of a stream.

    >>> format_line({"done": True})
    b'{"done":true}\\n'
    """
    return f"{encode_json(value)}\n".encode()


class LineStreamResponse(StreamingResponse):
    """Streaming response of lines of JSON. Calls `on_close` once when the stream ends, also if it never started."""

    media_type = "application/x-ndjson"

    def __init__(
        self,
        lines: AsyncIterator[bytes],
        *,
        on_close: Callable[[], None],
        ping_seconds: float | None = None,
        build_ping: Callable[[], bytes] | None = None,
    ) -> None:
        """Pings have no effect: lines of JSON have no comments that could keep a connection alive."""
        super().__init__(lines)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def to_nanoseconds(seconds: float) -> int:
    """Convert seconds to Ollama's unit of time.

    >>> to_nanoseconds(0.5)
    500000000
    """
    return round(seconds * 1e9)


class LineFormatter(ABC):
    """Common part of the formatters of /api/chat and /api/generate."""

    def __init__(self, opened: OpenedModel, generation: Generation, *, logprobs: bool) -> None:
        self._opened = opened
        self._generation = generation
        self._logprobs = logprobs

    @abstractmethod
    def build_content(self, text: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Build the fields with text, reasoning and tool calls."""

    def build_extra(self, response: ChatResponse) -> dict[str, Any]:
        """Build further fields of the end."""
        return {}

    async def build_response(self) -> dict[str, Any]:
        """Read the generation to its end and return the body of the response."""
        (response,) = await self._generation.collect_responses()
        calls = build_calls(drop_cut_call(response.tool_calls, response))
        content = self.build_content(response.text, response.reasoning, calls)
        return self._build_line(content, response.tokens) | self._build_end(response)

    async def stream_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Yield the lines of a stream. A tool call is one line, as soon as it is complete."""
        collector = CallCollector()
        async for _, delta in deltas:
            text = "".join(part.text for part in delta.parts if isinstance(part, TextDelta))
            thinking = "".join(part.text for part in delta.parts if isinstance(part, ReasoningDelta))
            calls = build_calls(collector.add(delta.parts))
            tokens = [] if delta.token is None else [delta.token]
            if text or thinking or calls or (self._logprobs and tokens):
                yield format_line(self._build_line(self.build_content(text, thinking, calls), tokens))
        (response,) = self._generation.get_responses()
        if calls := build_calls(drop_cut_call(collector.finish(), response)):
            yield format_line(self._build_line(self.build_content("", "", calls)))
        yield format_line(self._build_line(self.build_content("", "", [])) | self._build_end(response))

    def format_error(self, error: APIError) -> bytes:
        """Format the error that ends a stream."""
        return format_line(build_error_body(error))

    def _build_line(self, content: dict[str, Any], tokens: Sequence[Token] = ()) -> dict[str, Any]:
        head = {"model": self._opened.requested_name, "created_at": format_time()}
        line = {**head, **content, "done": False}
        visible = [token for token in tokens if self._generation.is_visible_token(token)] if self._logprobs else []
        return line | (
            {"logprobs": [build_logprobs(self._generation.model, token) for token in visible]} if visible else {}
        )

    def _build_end(self, response: ChatResponse) -> dict[str, Any]:
        usage = response.usage
        end = {
            "done": True,
            "done_reason": DONE_REASONS.get(response.finish_reason, response.finish_reason),
            "total_duration": to_nanoseconds(time.monotonic() - self._opened.started),
            "load_duration": to_nanoseconds(self._opened.load_seconds),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_cached_count": usage.cached_tokens,
            "prompt_eval_duration": to_nanoseconds(usage.prefill_seconds),
            "eval_count": usage.generated_tokens,
            "eval_duration": to_nanoseconds(usage.decode_seconds),
        }
        dropped = {} if response.truncation is None else {"overflow": response.truncation.report}
        return end | dropped | self.build_extra(response)


class ChatLineFormatter(LineFormatter):
    """Formats a generation for /api/chat."""

    def build_content(self, text: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Build the object `message`."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        return {
            "message": message | ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        }


class GenerateLineFormatter(LineFormatter):
    """Formats a generation for /api/generate."""

    def __init__(self, opened: OpenedModel, generation: Generation, *, logprobs: bool, returns_context: bool) -> None:
        super().__init__(opened, generation, logprobs=logprobs)
        self._returns_context = returns_context

    def build_content(self, text: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Build the fields `response` and `thinking`."""
        return {"response": text} | ({"thinking": thinking} if thinking else {})

    def build_extra(self, response: ChatResponse) -> dict[str, Any]:
        """Build `context`: the tokens of prompt and response. A prompt with images has none."""
        request = self._generation.prompts[0].request
        if not self._returns_context or request.media:
            return {}
        prompt = [int(entry) for entry in request.entries]  # type: ignore[arg-type]
        return {"context": prompt + [token.token for token in response.tokens]}


class CallCollector:
    """Collects the deltas of tool calls until a call is complete."""

    def __init__(self) -> None:
        self._index: int | None = None
        self._call: ToolCall | None = None

    def add(self, parts: Iterable[OutputPart]) -> list[ToolCall]:
        """Add deltas and return the calls that they complete: those before the start of another call."""
        complete: list[ToolCall] = []
        for part in parts:
            if not isinstance(part, ToolCallDelta):
                continue
            if part.index != self._index:
                complete += self.finish()
                self._index, self._call = part.index, ToolCall(id="", name="", arguments="")
            call = self._call or ToolCall(id="", name="", arguments="")
            self._call = ToolCall(
                id=part.id or call.id, name=part.name or call.name, arguments=call.arguments + part.arguments
            )
        return complete

    def finish(self) -> list[ToolCall]:
        """Return the last call."""
        call, self._call = self._call, None
        return [] if call is None else [call]


def drop_cut_call(calls: Sequence[ToolCall], response: ChatResponse) -> Sequence[ToolCall]:
    """Return tool calls without the last one if a limit cut it off before its arguments."""
    is_cut = response.finish_reason in LIMIT_REASONS and bool(calls) and not calls[-1].arguments
    return calls[:-1] if is_cut else calls


def build_calls(calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Build tool calls with their arguments as objects. A call whose arguments a limit cut off is left out."""
    built: list[dict[str, Any]] = []
    for call in calls:
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError:
            continue
        if isinstance(arguments, dict):
            built.append({"id": call.id, "function": {"name": call.name, "arguments": arguments}})
    return built


def build_logprobs(model: Model, token: Token) -> dict[str, Any]:
    """Build the log-probabilities of a token and its alternatives."""
    alternatives = [build_logprob(model, alternative, value) for alternative, value in token.alternatives]
    return build_logprob(model, token.token, token.logprob or 0.0) | (
        {"top_logprobs": alternatives} if alternatives else {}
    )


def build_logprob(model: Model, token: int, logprob: float) -> dict[str, Any]:
    """Build the text, bytes and log-probability of a token."""
    piece = model.vocabulary.token_to_piece(token)
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}
