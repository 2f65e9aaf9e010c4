"""Error bodies and statuses of the Anthropic API."""

from __future__ import annotations

from typing import Any

from afterglow.server.errors import APIError
from afterglow.server.logs import get_record

OVERLOADED_STATUS = 529
OVERLOADED_CODES = frozenset({"queue_full", "media_memory_full", "overloaded", "shutting_down"})
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def get_status(error: APIError) -> int:
    """Return the status that Anthropic's API has for an error.

    >>> get_status(APIError(429, "the queue is full", code="queue_full"))
    529
    """
    return OVERLOADED_STATUS if error.code in OVERLOADED_CODES else error.status


def build_error_body(error: APIError) -> dict[str, Any]:
    """Build Anthropic's error object.

    >>> build_error_body(APIError(404, "no such model"))["error"]
    {'type': 'not_found_error', 'message': 'no such model'}
    """
    status = get_status(error)
    error_type = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": error_type, "message": error.message},
        "request_id": get_record().id,
    }
