"""A model's turn: its events as parts while they come, and what it was, once it is over."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from afterglow.chat.chat import ChatPlan
from afterglow.chat.detokenizer import Detokenizer
from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.parts import Answer, Part, together
from afterglow.engine.request import Event, Failed, Finished, Progress, Token, Usage
from afterglow.engine.stream import Stream

Finish: TypeAlias = Literal["stop", "length", "deadline", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model said, thought and called, and why it stopped.

    >>> turn = model.chat("What is 2+2?")
    >>> turn.text, turn.finish
    ('The answer to this classic math problem is 4.', 'stop')
    """

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish: Finish
    stop: str | int | None  # the stop text, or the token, that ended it
    tokens: tuple[Token, ...] = field(repr=False)
    usage: Usage
    parsed: Any = None  # the text as what the response format asked for, where the answer is complete
    others: tuple[Turn, ...] = ()  # the other answers, where several were asked for

    @property
    def message(self) -> Message:
        """The turn as a message of the conversation."""
        return Message(role="assistant", content=self.text, reasoning=self.reasoning or None, tool_calls=self.calls)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event of the engine brought: parts, and the token or the progress behind them."""

    parts: tuple[Part, ...]
    token: Token | None = None
    progress: Progress | None = None


class TurnStream:
    """A turn as it comes: iterate over its parts, in a thread or with `async for`. Leaving early cancels it.

    >>> for part in model.chat("What is 2+2?", stream=True):
    ...     print(part.text, end="|")
    The| answer| to| this| classic| math| problem| is| |4|.|
    """

    def __init__(self, stream: Stream, plan: ChatPlan, stops: Sequence[str]) -> None:
        self._stream = stream
        self._plan = plan
        self._reader = plan.reader()
        self._detokenizer = Detokenizer(stops)
        self._tokens: list[Token] = []
        self._parts: list[Part] = []
        self._turn: Turn | None = None

    def __iter__(self) -> Iterator[Part]:
        for delta in self.deltas():
            yield from delta.parts

    async def __aiter__(self) -> AsyncIterator[Part]:
        async for delta in self.deltas_async():
            for part in delta.parts:
                yield part

    def deltas(self, cancel: threading.Event | None = None) -> Iterator[Delta]:
        """The parts with what is behind them. Raises the error of a turn that failed."""
        for event in self._stream.until(cancel):
            if (delta := self._take(event)) is not None:
                yield delta

    async def deltas_async(self) -> AsyncIterator[Delta]:
        """The same for asyncio."""
        async for event in self._stream:
            if (delta := self._take(event)) is not None:
                yield delta

    def result(self, cancel: threading.Event | None = None) -> Turn:
        """Wait for the end, and give the whole turn."""
        for _ in self.deltas(cancel):
            pass
        return self.turn

    async def result_async(self) -> Turn:
        """The same for asyncio."""
        async for _ in self.deltas_async():
            pass
        return self.turn

    @property
    def turn(self) -> Turn:
        """The whole turn, once it is over."""
        assert self._turn is not None, "the turn is not over"
        return self._turn

    def cancel(self) -> None:
        """Ask for an end; whoever reads gets `Cancelled`."""
        self._stream.cancel()

    def _take(self, event: Event) -> Delta | None:
        match event:
            case Token():
                self._tokens.append(event)
                return Delta(
                    self._note(self._reader.feed(self._detokenizer.feed(self._plan.chat.piece(event.token)))), event
                )
            case Progress():
                return Delta((), progress=event)
            case Finished():
                return self._end(event)
            case Failed():
                raise event.error

    def _end(self, end: Finished) -> Delta:
        stop = end.stop.decode() if isinstance(end.stop, bytes) else end.stop
        rest = self._detokenizer.finish(stop if isinstance(stop, str) else None)
        delta = Delta(self._note(self._reader.feed(rest) + self._reader.finish()))
        answer = together(self._parts)
        self._turn = Turn(
            text=answer.text,
            reasoning=answer.reasoning,
            calls=answer.calls,
            finish="tool_calls" if answer.calls and end.reason == "stop" else end.reason,
            stop=stop,
            tokens=tuple(self._tokens),
            usage=end.usage,
            parsed=self._parsed(answer, end),
        )
        return delta

    def _parsed(self, answer: Answer, end: Finished) -> Any:
        parse = self._plan.parse
        return parse(answer.text) if parse is not None and end.reason == "stop" and not answer.calls else None

    def _note(self, parts: list[Part]) -> tuple[Part, ...]:
        self._parts += parts
        return tuple(parts)
