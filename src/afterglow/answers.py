"""A request's events as text: whole, or as it streams, from threads and from asyncio."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from afterglow.chat.detokenizer import Detokenizer
from afterglow.completion import Choice
from afterglow.engine.request import Failed, Finished, Token, Usage
from afterglow.engine.stream import Stream

Piece = Callable[[int], bytes]


def gather(
    stream: Stream,
    piece: Piece,
    stops: Sequence[str],
    on_token: Callable[[int], None] | None,
    cancel: threading.Event | None,
) -> tuple[Choice, Usage]:
    """The whole answer; an answer that failed raises."""
    tokens: list[Token] = []
    for event in stream.until(cancel):
        if isinstance(event, Token):
            tokens.append(event)
            if on_token is not None:
                on_token(event.token)
    end = finished(stream)
    detokenizer = Detokenizer(stops)
    text = "".join(detokenizer.feed(piece(token.token)) for token in tokens)
    return Choice.of(tokens, text + detokenizer.finish(stop_text(end)), end), end.usage


def texts(stream: Stream, piece: Piece, stops: Sequence[str]) -> Iterator[str]:
    """The answer's text as it comes."""
    detokenizer = Detokenizer(stops)
    for event in stream:
        if isinstance(event, Token) and (text := detokenizer.feed(piece(event.token))):
            yield text
    if rest := detokenizer.finish(stop_text(finished(stream))):
        yield rest


async def texts_async(stream: Stream, piece: Piece, stops: Sequence[str]) -> AsyncIterator[str]:
    """The same for asyncio."""
    detokenizer = Detokenizer(stops)
    async for event in stream:
        if isinstance(event, Token) and (text := detokenizer.feed(piece(event.token))):
            yield text
    if rest := detokenizer.finish(stop_text(finished(stream))):
        yield rest


def finished(stream: Stream) -> Finished:
    """How the answer ended; a failure is raised."""
    if isinstance(stream.end, Failed):
        raise stream.end.error
    assert stream.end is not None
    return stream.end


def stop_text(end: Finished) -> str | None:
    return end.stop.decode() if isinstance(end.stop, bytes) else None
