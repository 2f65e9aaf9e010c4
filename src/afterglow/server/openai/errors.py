"""Error bodies of the OpenAI API."""

from __future__ import annotations

from typing import Any

from afterglow.server.errors import APIError


def build_error_body(error: APIError) -> dict[str, Any]:
    """Build OpenAI's error object.

    >>> build_error_body(APIError(404, "no such model", param="model"))["error"]["type"]
    'invalid_request_error'
    """
    return {"error": {"message": error.message, "type": error.error_type, "param": error.param, "code": error.code}}
