"""Server-sent events: signs of life of a stream, and events that differ in one text only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from afterglow.engine.types.request import PrefillProgress
from afterglow.server.sse import EventStreamResponse, EventTemplate, format_ping_comment


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


@pytest.mark.parametrize("text", ["", "a", '"', "\\", "\n\r\t", "\x00text\x00", "\x00", "é€😀", "\u2028", "</script>"])
def test_a_text_is_formatted_as_in_a_whole_event(text):
    template = EventTemplate({"id": "\x00text\x00", "model": "m"})

    def build_fields(text: str) -> dict[str, object]:
        return {"choices": [{"delta": {"content": text}, "logprobs": None}], "usage": None}

    format_text = template.build_text_formatter(build_fields)
    assert format_text(text) == template.format(build_fields(text))
