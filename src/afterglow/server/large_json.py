"""JSON responses that are too large to be encoded on the event loop, such as many embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import Response

from afterglow.server.state import ServerState


async def build_large_response(state: ServerState, build: Callable[[], Any]) -> Response:
    """Return a response with the value that `build` returns. It is built and encoded in a thread."""
    content = await state.run_text_work(lambda: "".join(encode_pieces(build())).encode())
    return Response(content, media_type="application/json")


def encode_pieces(value: Any) -> Iterator[str]:
    """Yield the JSON text of a value. A list of numbers is one piece: other threads run between two pieces.

    >>> list(encode_pieces([{"a": [1.5, 2]}, {}]))
    ['[', '{', '"a":', '[1.5,2]', '}', ',', '{', '}', ']']
    """
    if isinstance(value, dict):
        yield "{"
        for index, (name, item) in enumerate(value.items()):
            yield f"{',' if index else ''}{json.dumps(name)}:"
            yield from encode_pieces(item)
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        yield "["
        for index, item in enumerate(value):
            yield from [","] if index else []
            yield from encode_pieces(item)
        yield "]"
    else:
        yield json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
