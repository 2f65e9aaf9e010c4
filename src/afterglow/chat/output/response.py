"""Reads the events of a generation: as streamed parts, and as the complete response."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.output.detokenizer import Detokenizer
from afterglow.chat.output.parts import OutputFormat, OutputPart, join_parts
from afterglow.chat.prompt import Truncation
from afterglow.engine.host.stream import CANCEL_POLL_SECONDS, EventStream
from afterglow.engine.types.request import EngineEvent, Failed, Finished, PrefillProgress, Token, Usage

ChatFinishReason: TypeAlias = Literal["stop", "length", "deadline", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponse:
    """Text, reasoning and tool calls of a response, and its finish reason.

    >>> response = model.chat("What is 2+2?", temperature=0)
    >>> response.text, response.finish_reason
    ('The answer to this classic math problem is 4.', 'stop')
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: ChatFinishReason
    stop_reason: str | int | None  # the stop text or stop token that ended the response
    tokens: tuple[Token, ...] = field(repr=False)
    usage: Usage
    parsed: Any = None  # the text parsed by the response format; None if it is cut off or the type rejects it
    alternatives: tuple[ChatResponse, ...] = ()  # the other responses of a request with n > 1
    truncation: Truncation | None = None  # what was dropped from the conversation by the overflow policy

    def __repr__(self) -> str:
        text = f"ChatResponse({shorten_text(self.text)!r}"
        reasoning = f", reasoning={shorten_text(self.reasoning)!r}" if self.reasoning else ""
        calls = f", tool_calls={[call.name for call in self.tool_calls]}" if self.tool_calls else ""
        return f"{text}{reasoning}{calls}, finish_reason={self.finish_reason!r})"

    @property
    def message(self) -> Message:
        """The response as an assistant message."""
        return Message(
            role="assistant", content=self.text, reasoning=self.reasoning or None, tool_calls=self.tool_calls
        )


def shorten_text(text: str, limit: int = 60) -> str:
    """Return the beginning of a text, for a `repr`.

    >>> shorten_text("one two three", limit=8)
    'one two…'
    """
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


@dataclass(frozen=True, slots=True)
class Delta:
    """Parts of one engine event, with the token or the prefill progress that caused them."""

    parts: tuple[OutputPart, ...]
    token: Token | None = None
    progress: PrefillProgress | None = None


class ChatStream:
    """The streamed response to a chat or a prompt. Iterate over its parts with `for` or `async for`.

    Leaving the loop early, or dropping the stream, cancels the request.

    >>> for part in model.chat("What is 2+2?", stream=True, temperature=0):
    ...     print(part.text, end="|")
    The| answer| to| this| classic| math| problem| is| |4|.|
    """

    def __init__(
        self,
        stream: EventStream,
        format: OutputFormat,
        stops: Sequence[str] = (),
        *,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        owner: object = None,
    ) -> None:
        """`on_token` is called with each token that is read. Setting `cancel` makes the reader raise `Cancelled`.

        `owner` is the model, which must not be garbage collected while its response is read.
        """
        self._owner = owner
        self._stream = stream
        self._on_token = on_token
        self._cancel_event = cancel
        self._format = format
        self._parser = format.create_parser()
        self._detokenizer = Detokenizer(stops)
        self._tokens: list[Token] = []
        self._parts: list[OutputPart] = []
        self._response: ChatResponse | None = None

    def __del__(self) -> None:
        self._stream.cancel_unfinished()  # nobody began to read it

    def __iter__(self) -> Iterator[OutputPart]:
        for delta in self.deltas():
            yield from delta.parts

    async def __aiter__(self) -> AsyncIterator[OutputPart]:
        async for delta in self.deltas_async():
            for part in delta.parts:
                yield part

    def deltas(self) -> Iterator[Delta]:
        """Yield parts with their tokens and progress. Raises the error of a failed request."""
        for event in self._stream.iterate_until(self._cancel_event):
            if (delta := self._handle_event(event)) is not None:
                yield delta

    async def deltas_async(self) -> AsyncIterator[Delta]:
        """Asyncio version of `deltas`."""
        watcher = None if self._cancel_event is None else asyncio.create_task(self._watch(self._cancel_event))
        try:
            async for event in self._stream:
                if (delta := self._handle_event(event)) is not None:
                    yield delta
        finally:
            if watcher is not None:
                watcher.cancel()

    async def _watch(self, cancel: threading.Event) -> None:
        """Cancel the request once the event is set. It is polled, because another thread may set it."""
        while not cancel.is_set():
            await asyncio.sleep(CANCEL_POLL_SECONDS)
        self.cancel()

    def result(self) -> ChatResponse:
        """Wait for the end and return the complete response."""
        for _ in self.deltas():
            pass
        return self.response

    async def result_async(self) -> ChatResponse:
        """Asyncio version of `result`."""
        async for _ in self.deltas_async():
            pass
        return self.response

    @property
    def response(self) -> ChatResponse:
        """The complete response. Only available after the end of the stream."""
        assert self._response is not None, "the stream has not ended"
        return self._response

    @property
    def events(self) -> EventStream:
        """Engine events that the parts are made of."""
        return self._stream

    def cancel(self) -> None:
        """Cancel the request. Iterating then raises `Cancelled`."""
        self._stream.cancel()

    def _handle_event(self, event: EngineEvent) -> Delta | None:
        match event:
            case Token():
                self._tokens.append(event)
                if self._on_token is not None:
                    self._on_token(event.token)
                text = self._detokenizer.feed(self._format.token_to_piece(event.token))
                return Delta(self._record_parts(self._parser.feed(text)), event)
            case PrefillProgress():
                return Delta((), progress=event)
            case Finished():
                return self._finish(event)
            case Failed():
                raise event.error

    def _finish(self, finished: Finished) -> Delta:
        stop = finished.stop_reason.decode() if isinstance(finished.stop_reason, bytes) else finished.stop_reason
        rest = self._detokenizer.finish(stop if isinstance(stop, str) else None)
        is_complete = finished.finish_reason == "stop"
        parts = self._parser.feed(rest) + self._parser.finish(truncated=not is_complete)
        delta, output = Delta(self._record_parts(parts)), join_parts(self._parts)
        if self._format.record is not None:
            self._format.record([token.token for token in self._tokens], self._parts, finished)
        response = self._response = ChatResponse(
            text=output.text,
            reasoning=output.reasoning,
            tool_calls=output.tool_calls,
            finish_reason="tool_calls" if output.tool_calls and is_complete else finished.finish_reason,
            stop_reason=stop,
            tokens=tuple(self._tokens),
            usage=replace(
                finished.usage,
                replayed_tokens=self._format.replay.replayed_tokens,
                replay_misses=tuple(self._format.replay.misses.items()),
            ),
            truncation=self._format.truncation,
        )
        # The text before a stop text is only a part of the value.
        has_end = is_complete and not isinstance(stop, str)
        if self._format.parse is not None and has_end and not output.tool_calls:
            with contextlib.suppress(ValueError, RecursionError):  # validators may reject what the schema allows
                self._response = replace(response, parsed=self._format.parse(output.text))
        return delta

    def _record_parts(self, parts: list[OutputPart]) -> tuple[OutputPart, ...]:
        self._parts += parts
        return tuple(parts)
