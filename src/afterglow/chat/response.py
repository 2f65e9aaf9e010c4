"""A model's turn: its events as parts while they come, and what it was, once it is over."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from afterglow.chat.chat import ChatPlan
from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.output.detokenizer import Detokenizer
from afterglow.chat.output.parts import OutputPart, ParsedOutput, join_parts
from afterglow.engine.host.stream import EventStream
from afterglow.engine.types.request import EngineEvent, Failed, Finished, PrefillProgress, Token, Usage

ChatFinishReason: TypeAlias = Literal["stop", "length", "deadline", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponse:
    """What the model said, thought and called, and why it stopped.

    >>> turn = model.chat("What is 2+2?")
    >>> turn.text, turn.finish
    ('The answer to this classic math problem is 4.', 'stop')
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: ChatFinishReason
    stop_reason: str | int | None  # the stop text, or the token, that ended it
    tokens: tuple[Token, ...] = field(repr=False)
    usage: Usage
    parsed: Any = None  # the text as what the response format asked for, where the answer is complete
    alternatives: tuple[ChatResponse, ...] = ()  # the other answers, where several were asked for

    @property
    def message(self) -> Message:
        """The turn as a message of the conversation."""
        return Message(
            role="assistant", content=self.text, reasoning=self.reasoning or None, tool_calls=self.tool_calls
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event of the engine brought: parts, and the token or the progress behind them."""

    parts: tuple[OutputPart, ...]
    token: Token | None = None
    progress: PrefillProgress | None = None


class ChatStream:
    """A turn as it comes: iterate over its parts, in a thread or with `async for`. Leaving early cancels it.

    >>> for part in model.chat("What is 2+2?", stream=True):
    ...     print(part.text, end="|")
    The| answer| to| this| classic| math| problem| is| |4|.|
    """

    def __init__(self, stream: EventStream, plan: ChatPlan, stops: Sequence[str]) -> None:
        self._stream = stream
        self._plan = plan
        self._parser = plan.create_parser()
        self._detokenizer = Detokenizer(stops)
        self._tokens: list[Token] = []
        self._parts: list[OutputPart] = []
        self._response: ChatResponse | None = None

    def __iter__(self) -> Iterator[OutputPart]:
        for delta in self.deltas():
            yield from delta.parts

    async def __aiter__(self) -> AsyncIterator[OutputPart]:
        async for delta in self.deltas_async():
            for part in delta.parts:
                yield part

    def deltas(self, cancel: threading.Event | None = None) -> Iterator[Delta]:
        """The parts with what is behind them. Raises the error of a turn that failed."""
        for event in self._stream.iterate_until(cancel):
            if (delta := self._handle_event(event)) is not None:
                yield delta

    async def deltas_async(self) -> AsyncIterator[Delta]:
        """The same for asyncio."""
        async for event in self._stream:
            if (delta := self._handle_event(event)) is not None:
                yield delta

    def result(self, cancel: threading.Event | None = None) -> ChatResponse:
        """Wait for the end, and give the whole turn."""
        for _ in self.deltas(cancel):
            pass
        return self.response

    async def result_async(self) -> ChatResponse:
        """The same for asyncio."""
        async for _ in self.deltas_async():
            pass
        return self.response

    @property
    def response(self) -> ChatResponse:
        """The whole turn, once it is over."""
        assert self._response is not None, "the turn is not over"
        return self._response

    def cancel(self) -> None:
        """Ask for an end; whoever reads gets `Cancelled`."""
        self._stream.cancel()

    def _handle_event(self, event: EngineEvent) -> Delta | None:
        match event:
            case Token():
                self._tokens.append(event)
                return Delta(
                    self._record_parts(self._parser.feed(self._detokenizer.feed(self._plan.chat.piece(event.token)))),
                    event,
                )
            case PrefillProgress():
                return Delta((), progress=event)
            case Finished():
                return self._finish(event)
            case Failed():
                raise event.error

    def _finish(self, finished: Finished) -> Delta:
        stop = finished.stop_reason.decode() if isinstance(finished.stop_reason, bytes) else finished.stop_reason
        rest = self._detokenizer.finish(stop if isinstance(stop, str) else None)
        delta = Delta(self._record_parts(self._parser.feed(rest) + self._parser.finish()))
        answer = join_parts(self._parts)
        self._response = ChatResponse(
            text=answer.text,
            reasoning=answer.reasoning,
            tool_calls=answer.tool_calls,
            finish_reason="tool_calls"
            if answer.tool_calls and finished.finish_reason == "stop"
            else finished.finish_reason,
            stop_reason=stop,
            tokens=tuple(self._tokens),
            usage=finished.usage,
            parsed=self._parse_output(answer, finished),
        )
        return delta

    def _parse_output(self, output: ParsedOutput, finished: Finished) -> Any:
        parse = self._plan.parse
        return (
            parse(output.text)
            if parse is not None and finished.finish_reason == "stop" and not output.tool_calls
            else None
        )

    def _record_parts(self, parts: list[OutputPart]) -> tuple[OutputPart, ...]:
        self._parts += parts
        return tuple(parts)
