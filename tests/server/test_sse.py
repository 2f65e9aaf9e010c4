"""Server-sent events: keep-alive pings of a stream, also before its response exists; events that differ in one text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Message

from afterglow.engine.types.request import PrefillProgress
from afterglow.server.errors import invalid_request_error
from afterglow.server.sse import (
    EarlyStreamResponse,
    EventStreamResponse,
    EventTemplate,
    StreamFormat,
    format_ping_comment,
)


def test_a_silent_stream_gets_comments_with_the_progress_of_the_prefill() -> None:
    progress = [None, PrefillProgress("1", 100, 400, cached_entries=0, seconds=5.0)]
    sent: list[bytes] = []

    async def run() -> None:
        has_two_pings = asyncio.Event()

        async def stream_events() -> AsyncIterator[bytes]:
            await has_two_pings.wait()  # a long prefill
            yield b"data: x\n\n"

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))
            if len(sent) > 2:
                has_two_pings.set()

        async def receive() -> Any:
            await asyncio.Event().wait()

        response = EventStreamResponse(
            stream_events(),
            ping_seconds=0.01,
            build_ping=lambda: format_ping_comment(progress.pop(0) if progress else None),
            on_close=lambda: None,
        )
        await response({"type": "http", "method": "POST"}, receive, send)

    asyncio.run(run())
    assert sent[1:3] == [b": ping\n\n", b": ping, 25% of the prompt computed, 15 s left\n\n"]
    assert b"data: x\n\n" in sent


def run_early_stream(*, fails: bool = False, disconnects: bool = False) -> tuple[list[Message], bool]:
    """Run a response that exists after two pings; return what was sent, and whether its work was cancelled."""
    sent: list[Message] = []

    async def run() -> bool:
        has_two_pings = asyncio.Event()

        async def work() -> Response:
            await has_two_pings.wait()
            if disconnects:
                await asyncio.Event().wait()
            if fails:
                raise invalid_request_error("messages", "too long")
            return Response("data: x\n\n")

        async def send(message: Message) -> None:
            sent.append(message)
            if len(sent) > 2:
                has_two_pings.set()

        async def receive() -> Any:
            await (has_two_pings if disconnects else asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(work())
        format = StreamFormat(lambda error: f"error: {error.message}".encode())
        await EarlyStreamResponse(task, ping_seconds=0.01, format=format)({"type": "http"}, receive, send)
        await asyncio.wait({task})
        return task.cancelled()

    return sent, asyncio.run(run())


def test_a_stream_whose_model_is_being_loaded_gets_pings_and_then_its_events() -> None:
    sent, _ = run_early_stream()
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert (b"content-type", b"text/event-stream; charset=utf-8") in sent[0]["headers"]
    bodies = [message["body"] for message in sent[1:]]
    assert bodies[:2] == [b": ping\n\n", b": ping\n\n"]
    assert bodies[-1] == b"data: x\n\n"


def test_an_error_before_the_first_event_of_an_early_stream_is_an_event() -> None:
    sent, _ = run_early_stream(fails=True)
    assert sent[-1]["body"].startswith(b"error: ")
    assert not sent[-1].get("more_body")


def test_a_client_that_leaves_an_early_stream_cancels_its_work() -> None:
    sent, was_cancelled = run_early_stream(disconnects=True)
    assert was_cancelled
    assert sent[-1]["body"] == b": ping\n\n"


@pytest.mark.parametrize("text", ["", "a", '"', "\\", "\n\r\t", "\x00text\x00", "\x00", "é€😀", "\u2028", "</script>"])
def test_a_text_is_formatted_as_in_a_whole_event(text):
    template = EventTemplate({"id": "\x00text\x00", "model": "m"})

    def build_fields(text: str) -> dict[str, object]:
        return {"choices": [{"delta": {"content": text}, "logprobs": None}], "usage": None}

    format_text = template.build_text_formatter(build_fields)
    assert format_text(text) == template.format(build_fields(text))
