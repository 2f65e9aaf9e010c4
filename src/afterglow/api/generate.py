"""Converts the events of a request to text: as one `Choice`, or streamed to threads or asyncio."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from afterglow.api.outputs import Choice
from afterglow.chat.output.detokenizer import Detokenizer
from afterglow.engine.host.stream import EventStream
from afterglow.engine.types.request import Failed, Finished, Token, Usage

TokenToPiece = Callable[[int], bytes]


def collect_choice(
    stream: EventStream,
    token_to_piece: TokenToPiece,
    stops: Sequence[str],
    on_token: Callable[[int], None] | None,
    cancel: threading.Event | None,
) -> tuple[Choice, Usage]:
    """Wait for the end of a request and return its completion. Raises the error of a failed request."""
    tokens: list[Token] = []
    for event in stream.iterate_until(cancel):
        if isinstance(event, Token):
            tokens.append(event)
            if on_token is not None:
                on_token(event.token)
    end = get_finished_event(stream)
    detokenizer = Detokenizer(stops)
    text = "".join(detokenizer.feed(token_to_piece(token.token)) for token in tokens)
    return Choice.from_tokens(tokens, text + detokenizer.finish(get_stop_text(end)), end), end.usage


def stream_text(stream: EventStream, token_to_piece: TokenToPiece, stops: Sequence[str]) -> Iterator[str]:
    """Yield the text of a request as it is generated. Raises the error of a failed request."""
    detokenizer = Detokenizer(stops)
    for event in stream:
        if isinstance(event, Token) and (text := detokenizer.feed(token_to_piece(event.token))):
            yield text
    if rest := detokenizer.finish(get_stop_text(get_finished_event(stream))):
        yield rest


async def stream_text_async(
    stream: EventStream, token_to_piece: TokenToPiece, stops: Sequence[str]
) -> AsyncIterator[str]:
    """Asyncio version of `stream_text`."""
    detokenizer = Detokenizer(stops)
    async for event in stream:
        if isinstance(event, Token) and (text := detokenizer.feed(token_to_piece(event.token))):
            yield text
    if rest := detokenizer.finish(get_stop_text(get_finished_event(stream))):
        yield rest


def get_finished_event(stream: EventStream) -> Finished:
    """Return the end event of a stream that was read to its end. Raises the error of a failed request."""
    if isinstance(stream.end_event, Failed):
        raise stream.end_event.error
    assert stream.end_event is not None
    return stream.end_event


def get_stop_text(end: Finished) -> str | None:
    return end.stop_reason.decode() if isinstance(end.stop_reason, bytes) else None
