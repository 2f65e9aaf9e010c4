"""Conversation: the number of tool rounds is limited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from afterglow import ChatResponse, Conversation, TextDelta, ToolCall
from afterglow.api.conversation import MAX_TOOL_ROUNDS
from afterglow.chat.response import Delta
from afterglow.engine.types.request import Usage


class ToolCallingModel:
    """A model that calls a tool whenever tool calls are allowed."""

    def chat(self, messages: Any, *, tools: Any, stream: bool = False, **options: Any) -> Any:
        calls = () if options.get("tool_choice") == "none" else (ToolCall(id="1", name="look", arguments="{}"),)
        text = "" if calls else "There it is."
        finish_reason = "tool_calls" if calls else "stop"
        usage = Usage(prompt_tokens=1, generated_tokens=1)
        response = ChatResponse(
            text=text,
            reasoning="",
            tool_calls=calls,
            finish_reason=finish_reason,
            stop_reason=None,
            tokens=(),
            usage=usage,
        )
        return FakeStream(response) if stream else response

    async def chat_async(self, messages: Any, **options: Any) -> ChatResponse:
        return self.chat(messages, **options)


class FakeStream:
    """A chat stream with one delta."""

    def __init__(self, response: ChatResponse) -> None:
        self.response = response

    def deltas(self) -> Iterator[Delta]:
        yield Delta((TextDelta(self.response.text),))


@pytest.mark.parametrize(
    "ask",
    [
        lambda chat: chat.ask("Where?"),
        lambda chat: asyncio.run(chat.ask_async("Where?")),
        lambda chat: list(chat.stream("Where?")),
    ],
    ids=["ask", "ask_async", "stream"],
)
def test_the_model_must_answer_after_the_last_tool_round(ask: Callable[[Conversation], object]) -> None:
    calls = []

    def look() -> str:
        """Look around."""
        calls.append(True)
        return "nothing yet"

    chat = Conversation(ToolCallingModel(), tools=[look])  # type: ignore[arg-type]
    ask(chat)
    assert len(calls) == MAX_TOOL_ROUNDS
    assert chat.messages[-1].content == "There it is."
    assert chat.last_response is not None
    assert chat.last_response.finish_reason == "stop"
