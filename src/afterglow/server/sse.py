"""Server-sent events: answers as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from sse_starlette.sse import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from afterglow.errors import AfterglowError
from afterglow.server.errors import APIError, to_api_error

T = TypeVar("T")
DONE_EVENT = b"data: [DONE]\n\n"
ERROR_STATUS_WINDOW_SECONDS = (
    0.5  # seconds in which what is wrong with a request becomes its status; later it is an event
)


encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # `json.dumps` makes one at every call


def format_event(value: Any, name: str | None = None) -> bytes:
    """One event.

    >>> event({"a": 1})
    b'data: {"a":1}\\n\\n'
    """
    data = encode_json(value)
    return (f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n").encode()


class EventTemplate:
    """Events that all begin with the same fields, which are written once.

    >>> Headed({"id": 7}).event({"text": "a"})
    b'data: {"id":7,"text":"a"}\\n\\n'
    """

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = f"data: {encode_json(head)[:-1]},"

    def format(self, fields: dict[str, Any]) -> bytes:
        """The event of the head and these fields."""
        return f"{self._head}{encode_json(fields)[1:]}\n\n".encode()


class EventStreamResponse(EventSourceResponse):
    """A response of events. `ended` is called once, however it ends, also where it never began."""

    def __init__(self, events: AsyncIterator[bytes], *, ping_seconds: float, on_close: Callable[[], None]) -> None:
        super().__init__(report_errors(events), ping=ping_seconds, sep="\n")
        self._on_close = on_close

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        await send(message)  # there is no timeout here, and the scope that would keep it costs more than the sending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def stream_response(
    items: AsyncIterator[T],
    format_events: Callable[[AsyncIterator[T]], AsyncIterator[bytes]],
    *,
    ping_seconds: float,
    on_close: Callable[[], None],
) -> EventStreamResponse:
    """The response that writes `items` as `page` does, once the first is there: an error before that is raised."""
    try:
        items = await wait_for_first_item(items)
    except BaseException:
        on_close()
        raise
    return EventStreamResponse(format_events(items), ping_seconds=ping_seconds, on_close=on_close)


async def report_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same; an error in the middle is told as an event, and is the last."""
    try:
        async for one in events:
            yield one
    except (AfterglowError, APIError) as error:
        yield format_event(to_api_error(error).body)


async def wait_for_first_item(items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same items, once the first is there or some time has passed. An error before that is raised here."""
    first = asyncio.ensure_future(anext(items, None))
    try:
        await asyncio.wait({first}, timeout=ERROR_STATUS_WINDOW_SECONDS)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        raise
    return _chain_first_item(first, items)


async def _chain_first_item(first: asyncio.Future[T | None], items: AsyncIterator[T]) -> AsyncIterator[T]:
    try:
        item = await first
        if item is not None:
            yield item
            async for item in items:
                yield item
    finally:
        first.cancel()
