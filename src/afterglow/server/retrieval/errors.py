"""Error bodies of the rerank routes."""

from __future__ import annotations

from typing import Any

from afterglow.server.errors import APIError
from afterglow.server.openai.errors import build_error_body as build_openai_error_body


def build_error_body(error: APIError) -> dict[str, Any]:
    """Build an error object for clients of Cohere (`message`), of Jina (`detail`), and of this server.

    >>> build_error_body(APIError(400, "`query` is missing", param="query"))["message"]
    '`query` is missing'
    """
    return {"message": error.message, "detail": error.message, **build_openai_error_body(error)}
