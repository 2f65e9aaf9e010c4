"""Conversation: tool rounds are limited, and a history may exceed the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import afterglow
from afterglow import ChatResponse, Conversation, TextDelta, ToolCall
from afterglow.api.conversation import MAX_TOOL_ROUNDS
from afterglow.chat.output.response import Delta
from afterglow.engine.types.request import Usage
from afterglow.errors import PromptTooLong
from afterglow.testing import models


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


@pytest.mark.native
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_conversation_continues_after_its_history_exceeds_the_context(kind: str) -> None:
    with afterglow.load(models.get_path(f"successor-{kind}"), context=512, threads=1) as model:
        chat = Conversation(model, max_tokens=8)
        responses = [chat.ask(f"{number} {'x' * 10}") for number in range(30)]
        assert len(chat.messages) == 60
        truncated = [response for response in responses if response.truncation is not None]
        assert len(truncated) > 5
        assert truncated[-1].truncation.dropped_messages >= 20
        hits = [response for response in truncated if response.usage.cached_tokens > response.usage.prompt_tokens // 2]
        assert len(hits) >= len(truncated) // 2  # dropping in steps keeps later turns prefix hits
        strict = Conversation(model, messages=chat.messages, overflow="refuse")
        with pytest.raises(PromptTooLong):
            strict.ask("one more")
        assert len(strict.messages) == 60
