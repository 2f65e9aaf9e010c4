"""Limits on the size of one request."""

from __future__ import annotations

import json
from typing import Any

from afterglow.server.errors import APIError, invalid_request_error
from afterglow.server.settings import ServerSettings

UNLIMITED_TOKENS = -1  # `max_tokens` of a request that no default limits


def parse_max_tokens(max_tokens: int | None) -> int | None:
    """Return the limit of generated tokens; None if there is none.

    >>> parse_max_tokens(-1), parse_max_tokens(0)
    (None, 0)
    """
    return None if max_tokens == UNLIMITED_TOKENS else max_tokens


def check_limit(settings: ServerSettings, setting: str, param: str, count: int) -> None:
    """Raise a `limit_exceeded` error that names the setting if `count` exceeds it."""
    if count > (limit := getattr(settings, setting)):
        raise build_limit_error(param, count, limit, setting)


def build_limit_error(param: str, count: int, limit: int, setting: str) -> APIError:
    """Return the error for a count that exceeds a setting."""
    message = f"`{param}` is {count:,}; the limit is {limit:,} (server setting `{setting}`)"
    return invalid_request_error(param, message, "limit_exceeded")


def parse_stops(value: str | list[str] | None, settings: ServerSettings) -> list[str]:
    """Return the stop strings of a request as a list, after checking their limits."""
    texts = [value] if isinstance(value, str) else value or []
    check_limit(settings, "max_stops", "stop", len(texts))
    for text in texts:
        if not text:
            raise invalid_request_error("stop", "`stop` must not contain empty strings")
        if len(text) > settings.max_stop_length:
            raise build_limit_error("stop", len(text), settings.max_stop_length, "max_stop_length")
    return texts


def check_grammar_size(param: str, value: Any, settings: ServerSettings) -> None:
    """Check the size of a schema, a grammar or tools, serialized as JSON."""
    if value:
        check_limit(settings, "max_grammar_bytes", param, len(json.dumps(value).encode()))
