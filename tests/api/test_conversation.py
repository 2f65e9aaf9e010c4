"""A conversation that calls tools ends in words, however much a model likes to call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from afterglow import ChatResponse, Conversation, TextDelta, ToolCall
from afterglow.api.conversation import MAX_TOOL_ROUNDS
from afterglow.chat.response import Delta
from afterglow.engine.types.request import Usage


class Eager:
    """A model that calls a tool whenever it may."""

    def chat(self, messages: Any, *, tools: Any, stream: bool = False, **options: Any) -> Any:
        calls = () if options.get("tool_choice") == "none" else (ToolCall(id="1", name="look", arguments="{}"),)
        text = "" if calls else "There it is."
        finish = "tool_calls" if calls else "stop"
        usage = Usage(prompt_tokens=1, generated_tokens=1)
        turn = ChatResponse(
            text=text, reasoning="", tool_calls=calls, finish_reason=finish, stop_reason=None, tokens=(), usage=usage
        )
        return Streamed(turn) if stream else turn

    async def chat_async(self, messages: Any, **options: Any) -> ChatResponse:
        return self.chat(messages, **options)


class Streamed:
    def __init__(self, turn: ChatResponse) -> None:
        self.turn = turn

    def deltas(self) -> Iterator[Delta]:
        yield Delta((TextDelta(self.turn.text),))


@pytest.mark.parametrize(
    "ask",
    [
        lambda talk: talk.ask("Where?"),
        lambda talk: asyncio.run(talk.ask_async("Where?")),
        lambda talk: list(talk.stream("Where?")),
    ],
    ids=["ask", "ask_async", "stream"],
)
def test_after_so_many_calls_the_model_has_to_answer(ask: Callable[[Conversation], object]) -> None:
    looked = []

    def look() -> str:
        """Look around."""
        looked.append(True)
        return "nothing yet"

    talk = Conversation(Eager(), tools=[look])  # type: ignore[arg-type]
    ask(talk)
    assert len(looked) == MAX_TOOL_ROUNDS
    assert talk.messages[-1].content == "There it is."
    assert talk.last_response is not None
    assert talk.last_response.finish_reason == "stop"
