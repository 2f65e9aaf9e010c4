"""Server-sent events: formatting, and responses that stream them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

from sse_starlette.sse import EventSourceResponse
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from afterglow.engine.types.request import PrefillProgress
from afterglow.errors import AfterglowError
from afterglow.server.errors import APIError, to_api_error
from afterglow.server.logs import get_record

ItemT = TypeVar("ItemT")
PingFormat: TypeAlias = Callable[[PrefillProgress | None], bytes]  # with the progress of a prefill that is under way
DONE_EVENT = b"data: [DONE]\n\n"
ERROR_STATUS_WINDOW_SECONDS = 0.5  # errors within this time become the HTTP status, later ones an SSE error event

# `json.dumps` creates a new encoder at every call.
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
encode_text = json.encoder.encode_basestring
TEXT_MARKER = "\x00text\x00"


def format_event(value: Any, name: str | None = None) -> bytes:
    """Format one event.

    >>> format_event({"a": 1})
    b'data: {"a":1}\\n\\n'
    """
    data = encode_json(value)
    return (f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n").encode()


class EventTemplate:
    """Formats events that begin with the same fields, which are serialized once.

    >>> EventTemplate({"id": 7}).format({"text": "a"})
    b'data: {"id":7,"text":"a"}\\n\\n'
    """

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = f"data: {encode_json(head)[:-1]},"

    def format(self, fields: dict[str, Any]) -> bytes:
        """Format an event from the common fields and `fields`."""
        return f"{self._head}{encode_json(fields)[1:]}\n\n".encode()

    def build_text_formatter(self, build_fields: Callable[[str], dict[str, Any]]) -> Callable[[str], bytes]:
        """Return a function that formats events which differ in one text only, without serializing the rest again.

        >>> EventTemplate({"id": 7}).build_text_formatter(lambda text: {"text": text, "end": None})("a")
        b'data: {"id":7,"text":"a","end":null}\\n\\n'
        """
        before, _, after = self.format(build_fields(TEXT_MARKER)).decode().rpartition(encode_text(TEXT_MARKER))
        return lambda text: f"{before}{encode_text(text)}{after}".encode()


def format_ping_comment(progress: PrefillProgress | None) -> bytes:
    """Format a keep-alive ping of an idle stream as a comment, which clients skip.

    >>> format_ping_comment(PrefillProgress("1", computed_entries=300, prompt_entries=400, seconds=3.0))
    b': ping, 75% of the prompt computed, 1 s left\\n\\n'
    """
    if progress is None:
        return b": ping\n\n"
    left = "" if progress.seconds_left is None else f", {progress.seconds_left:.0f} s left"
    return f": ping, {progress.share:.0%} of the prompt computed{left}\n\n".encode()


class EventStreamResponse(EventSourceResponse):
    """Streaming response. Calls `on_close` once when the stream ends, also if it never started.

    Every `ping_seconds`, it sends what `build_ping` returns.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        ping_seconds: float,
        build_ping: Callable[[], bytes],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(events, ping=ping_seconds, ping_message_factory=cast(Any, build_ping), sep="\n")
        self._on_close = on_close

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        await send(message)  # no send timeout is set, and the cancel scope for it costs more than the send itself

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How an API formats the keep-alive pings and the error of a stream that has no events yet."""

    format_error: Callable[[APIError], bytes]
    format_ping: PingFormat = format_ping_comment


class EarlyStreamResponse(Response):
    """Stream that starts before its response exists, e.g. while a model is loaded: pings, then that response.

    An error that occurs until then is the only event.
    """

    def __init__(self, response: asyncio.Future[Response], *, ping_seconds: float, format: StreamFormat) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._response = response
        self._ping_seconds = ping_seconds
        self._format = format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_body(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not self._response.done() and not disconnect.done():
                ping = self._format.format_ping(None)
                await send({"type": "http.response.body", "body": ping, "more_body": True})
                waits_for: set[asyncio.Future[Any]] = {self._response, disconnect}
                await asyncio.wait(waits_for, timeout=self._ping_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not self._response.done():
                return
            response = self._response.result()
        except (AfterglowError, APIError) as error:
            api_error = to_api_error(error)
            get_record().finish_reason = api_error.code
            return await send({"type": "http.response.body", "body": self._format.format_error(api_error)})
        finally:
            disconnect.cancel()
            self._response.cancel()
        await response(scope, receive, send_body)


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def report_errors(
    events: AsyncIterator[bytes], format_error: Callable[[APIError], bytes]
) -> AsyncIterator[bytes]:
    """Yield the events. An error becomes the last event."""
    try:
        async for event in events:
            yield event
    except (AfterglowError, APIError) as error:
        api_error = to_api_error(error)
        get_record().finish_reason = api_error.code
        yield format_error(api_error)


async def wait_for_first_item(
    items: AsyncIterator[ItemT], is_output: Callable[[ItemT], bool] = lambda item: True
) -> AsyncIterator[ItemT]:
    """Wait for the first item that `is_output`, and return an iterator over all items.

    Waits at most `ERROR_STATUS_WINDOW_SECONDS`. Raises an error that occurs within this time.
    """
    early: list[ItemT] = []
    deadline = time.monotonic() + ERROR_STATUS_WINDOW_SECONDS
    while True:
        following = asyncio.ensure_future(anext(items, None))
        try:
            await asyncio.wait({following}, timeout=max(0.0, deadline - time.monotonic()))
            item = following.result() if following.done() else None
        except BaseException:
            following.cancel()
            raise
        if item is None or is_output(item):
            return _chain_items(early, following, items)
        early.append(item)


async def _chain_items(
    early: list[ItemT], following: asyncio.Future[ItemT | None], items: AsyncIterator[ItemT]
) -> AsyncIterator[ItemT]:
    try:
        for item in early:
            yield item
        following_item = await following
        if following_item is not None:
            yield following_item
            async for item in items:
                yield item
    finally:
        following.cancel()
