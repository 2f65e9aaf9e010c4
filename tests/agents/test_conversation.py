"""Conversation: tool rounds are limited, and a history may exceed the context."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import afterglow
from afterglow import ChatResponse, Conversation, Message, TextDelta, ToolCall
from afterglow.agents.conversation import MAX_TOOL_ROUNDS
from afterglow.chat.output.response import Delta
from afterglow.engine.types.request import Usage
from afterglow.errors import Cancelled, InvalidArgument, PromptTooLong
from afterglow.testing import models
from afterglow.testing.script import script_answers


class ToolCallingModel:
    """A model that calls a tool whenever tool calls are allowed."""

    def __init__(self, tool: str = "look") -> None:
        self._tool = tool

    def chat(self, messages: Any, *, tools: Any, stream: bool = False, **options: Any) -> Any:
        calls = () if options.get("tool_choice") == "none" else (ToolCall(id="1", name=self._tool, arguments="{}"),)
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


def test_tools_run_beside_the_event_loop_of_ask_async() -> None:
    answered = threading.Event()

    async def look() -> str:
        """Look around."""
        await asyncio.sleep(0)
        return "a cat"

    def wait() -> str:
        """Wait for another task of the event loop."""
        return "in time" if answered.wait(5) else "blocked"

    async def ask(tool: Callable[[], object]) -> list[str]:
        chat = Conversation(ToolCallingModel(tool.__name__), tools=[tool])  # type: ignore[arg-type]
        asyncio.get_running_loop().call_later(0.01, answered.set)
        await asyncio.wait_for(chat.ask_async("Where?"), 30)
        return [message.content for message in chat.messages if message.role == "tool"]

    assert asyncio.run(ask(look)) == ["a cat"] * MAX_TOOL_ROUNDS
    answered.clear()
    assert asyncio.run(ask(wait)) == ["in time"] * MAX_TOOL_ROUNDS


def test_a_tool_that_is_a_coroutine_is_called_from_a_program_with_an_event_loop() -> None:
    async def look() -> str:
        """Look around."""
        await asyncio.sleep(0)
        return "a cat"

    async def ask() -> list[str]:
        chat = Conversation(ToolCallingModel(), tools=[look])  # type: ignore[arg-type]
        chat.ask("Where?")  # as in a notebook, whose cells run in an event loop
        return [message.content for message in chat.messages if message.role == "tool"]

    assert asyncio.run(ask()) == ["a cat"] * MAX_TOOL_ROUNDS


class UnprintableError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [ValueError(), UnprintableError()], ids=["empty", "unprintable"])
def test_an_error_without_a_text_is_told_by_its_type(error: Exception) -> None:
    def look() -> str:
        """Look around."""
        raise error

    chat = Conversation(ToolCallingModel(), tools=[look])  # type: ignore[arg-type]
    chat.ask("Where?")
    assert chat.messages[2].content == f"error: {type(error).__name__}"


ASK: dict[str, Callable[..., Any]] = {
    "ask": lambda chat, **options: chat.ask("x", **options),
    "ask_async": lambda chat, **options: asyncio.run(chat.ask_async("x", **options)),
    "stream": lambda chat, **options: chat.stream("x", **options),
    "regenerate": lambda chat, **options: chat.regenerate(**options),
    "stream_regeneration": lambda chat, **options: chat.stream_regeneration(**options),
}


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": True}, "`stream` is a method of a conversation, not an option: call .stream(text)"),
        ({"tools": []}, "`tools` belongs to the conversation: Conversation(model, tools=…)"),
        ({"temprature": 1}, "`temprature` is not an option; did you mean 'temperature'?"),
        ({"max_tokens": "many"}, "`max_tokens` must be a valid integer"),
    ],
)
def test_a_wrong_option_of_a_question_is_named_before_anything_is_generated(
    ask: Callable[..., object], options: dict[str, Any], message: str
) -> None:
    history = [("user", "Hi"), ("assistant", "Hello!")]
    chat = Conversation(ToolCallingModel(), messages=history)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        ask(chat, **options)
    assert (len(chat.messages), chat.last_response) == (2, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": True}, "`stream` is a method of a conversation"),
        ({"temprature": 1}, "`temprature` is not an option; did you mean 'temperature'?"),
        ({"tool": []}, "`tool` is not an option; did you mean 'tools'?"),
        ({"max_tokens": "many"}, "`max_tokens` must be a valid integer"),
    ],
)
def test_a_wrong_option_of_a_conversation_is_named_when_it_is_created(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        Conversation(ToolCallingModel(), **options)  # type: ignore[arg-type]


@pytest.mark.native
def test_the_first_of_several_answers_continues_a_conversation_and_the_others_are_returned() -> None:
    with (
        afterglow.load(models.get_path("attention"), context=1024, threads=1) as model,
        script_answers(model, ["One.", "Two.", "Three.", "Four."]),
    ):
        chat, answers = Conversation(model), [{"One.", "Two."}, {"Three.", "Four."}]
        for ask in (ASK["ask"], ASK["ask_async"]):
            response = ask(chat, n=2)
            assert chat.messages[-1].content == response.text
            assert {response.text, *(other.text for other in response.alternatives)} == answers.pop(0)
        with pytest.raises(InvalidArgument, match="`n` must be 1 for a stream"):
            list(ASK["stream"](chat, n=2))
        assert [message.role for message in chat.messages] == ["user", "assistant"] * 2


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


@pytest.mark.native
@pytest.mark.parametrize("kind", ["attention", "window", "recurrent", "hybrid"])
def test_a_summary_continues_the_cached_conversation_and_later_turns_are_prefix_hits(kind: str) -> None:
    with afterglow.load(models.get_path(f"successor-{kind}"), context=2048, threads=1) as model:
        chat = Conversation(model, system="be brief", max_tokens=30, overflow="compact", temperature=0)
        responses = [chat.ask(f"{number} {'x' * 100}") for number in range(12)]
        assert len(chat.messages) == 25  # the history stays whole
        computed = [response.usage.prompt_tokens - response.usage.cached_tokens for response in responses]
        first = next(index for index, response in enumerate(responses) if response.truncation is not None)
        compaction = responses[first].truncation.compaction
        assert compaction.summaries_written == 1
        assert compaction.summary.startswith("abcdef")
        assert compaction.tokens_after < compaction.tokens_before // 2 + 256
        # Without the cache, the prompt of the summary would be most of `tokens_before`.
        instruction = 300
        assert compaction.computed_tokens <= instruction + (100 if kind in ("recurrent", "hybrid") else 0)
        later = responses[first + 1 :]
        assert later
        assert all(response.truncation.compaction.summary == compaction.summary for response in later)
        assert all(response.truncation.compaction.summaries_written == 0 for response in later)
        assert max(computed[first + 1 :]) <= computed[1] + 8  # new text only, as before the summary


@pytest.mark.native
def test_a_long_history_is_summarized_in_pieces_once_and_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    history = [(role, f"{number} {'x' * 100}") for number in range(6) for role in ("user", "assistant")]
    question = [*history, ("user", "the newest question")]
    options: Any = {"context": 1024, "threads": 1, "disk_cache": True}
    path = models.get_path("successor-attention")
    with afterglow.load(path, **options) as model:
        response = model.chat(question, overflow="compact", max_tokens=8, temperature=0)
        assert response.truncation.compaction.summaries_written > 1
        assert response.usage.prompt_tokens < 1024 - 8
        again = asyncio.run(model.chat_async(question, overflow="compact", max_tokens=8, temperature=0))
        assert again.truncation.compaction.summaries_written == 0
        assert again.usage.cached_tokens == again.usage.prompt_tokens
    with afterglow.load(path, **options) as model:
        later = model.chat(question, overflow="compact", max_tokens=8, temperature=0)
        assert later.truncation.compaction.summaries_written == 0
        assert later.truncation.compaction.summary == response.truncation.compaction.summary
        model.clear_cache()
        assert model.chat(question, overflow="compact", max_tokens=1).truncation.compaction.summaries_written


@pytest.mark.native
def test_tools_stay_in_the_prompt_of_a_compacted_conversation() -> None:
    def look(place: str) -> str:
        """Look at a place."""
        return place

    call = ToolCall(id="1", name="look", arguments='{"place": "here"}')
    steps = [Message(role="assistant", content="", tool_calls=(call,)), Message(role="tool", content="x" * 300)]
    messages = [Message(role="user", content="Where is it?"), *(steps * 7)]
    with (
        afterglow.load(models.get_path("attention"), context=4096, threads=1) as model,
        script_answers(model, ["Here.", "SUMMARY", "There."]),
    ):
        model.chat(messages[:-2], tools=[look])
        response = model.chat(messages, tools=[look], overflow="compact", max_tokens=100)
        assert response.text == "There."
        compaction = response.truncation.compaction
        assert (compaction.summary, compaction.summarized_messages % 2) == ("SUMMARY", 1)  # a call with its result
        assert compaction.computed_tokens < compaction.tokens_before // 4
        system = model.apply_chat_template([("system", "")], tools=[look]).cells
        assert response.usage.cached_tokens >= system - 10  # the tools are where they were


@pytest.mark.native
def test_a_summary_can_be_cancelled_and_a_prompt_without_messages_cannot_be_summarized() -> None:
    history = [(role, f"{number} {'x' * 150}") for number in range(9) for role in ("user", "assistant")]
    cancel = threading.Event()
    cancel.set()
    with afterglow.load(models.get_path("successor-attention"), context=2048, threads=1) as model:
        with pytest.raises(Cancelled):
            model.chat([*history, ("user", "x" * 300)], overflow="compact", max_tokens=8, cancel=cancel)
        with pytest.raises(InvalidArgument, match="messages"):
            model.complete("x" * 3000, overflow="compact")


def test_a_conversation_without_messages_is_saved_and_loaded(tmp_path: Path) -> None:
    chat = Conversation(ToolCallingModel())  # type: ignore[arg-type]
    chat.save(tmp_path / "chat.json")
    other = Conversation(ToolCallingModel(), messages=[("user", "Hi")])  # type: ignore[arg-type]
    other.load(tmp_path / "chat.json")
    assert other.messages == []


def test_any_text_is_saved_and_loaded_whatever_the_encoding_of_the_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("io.text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")
    chat = Conversation(ToolCallingModel(), messages=[("user", "größer \ud83d")])  # type: ignore[arg-type]
    chat.save(tmp_path / "chat.json")
    other = Conversation(ToolCallingModel())  # type: ignore[arg-type]
    other.load(tmp_path / "chat.json")
    assert other.messages == chat.messages


def test_a_save_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    chat = Conversation(ToolCallingModel(), messages=[("user", "Hi")])  # type: ignore[arg-type]
    chat.save(tmp_path / "chat.json")
    monkeypatch.setattr(os, "fsync", fail)
    chat.edit(0, "Bye")
    with pytest.raises(OSError, match="No space left"):
        chat.save(tmp_path / "chat.json")
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]
    chat.load(tmp_path / "chat.json")
    assert [message.content for message in chat.messages] == ["Hi"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda chat: chat.edit(0, 5), "`text` must be text, not int"),
        (lambda chat: chat.edit("0", "x"), "`index` must be an integer, not '0'"),
        (lambda chat: chat.rewind(0.5), "`count` must be an integer, not 0.5"),
    ],
)
def test_a_wrong_argument_of_a_change_is_named(change: Callable[[Conversation], None], message: str) -> None:
    chat = Conversation(ToolCallingModel(), messages=[("user", "Hi")])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=message):
        change(chat)
    assert [said.content for said in chat.messages] == ["Hi"]
