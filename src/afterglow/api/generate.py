"""A request's events as text: whole, or as it streams, from threads and from asyncio."""

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
    """The whole answer; an answer that failed raises."""
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
    """The answer's text as it comes."""
    detokenizer = Detokenizer(stops)
    for event in stream:
        if isinstance(event, Token) and (text := detokenizer.feed(token_to_piece(event.token))):
            yield text
    if rest := detokenizer.finish(get_stop_text(get_finished_event(stream))):
        yield rest


async def stream_text_async(
    stream: EventStream, token_to_piece: TokenToPiece, stops: Sequence[str]
) -> AsyncIterator[str]:
    """The same for asyncio."""
    detokenizer = Detokenizer(stops)
    async for event in stream:
        if isinstance(event, Token) and (text := detokenizer.feed(token_to_piece(event.token))):
            yield text
    if rest := detokenizer.finish(get_stop_text(get_finished_event(stream))):
        yield rest


def get_finished_event(stream: EventStream) -> Finished:
    """How the answer ended; a failure is raised."""
    if isinstance(stream.end_event, Failed):
        raise stream.end_event.error
    assert stream.end_event is not None
    return stream.end_event


def get_stop_text(end: Finished) -> str | None:
    return end.stop_reason.decode() if isinstance(end.stop_reason, bytes) else None
