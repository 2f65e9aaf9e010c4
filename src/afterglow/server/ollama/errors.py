"""Error bodies of the Ollama API."""

from __future__ import annotations

from typing import Any

from afterglow.server.errors import APIError

# Names of options in messages that Ollama's API spells differently.
FIELD_NAMES = {
    "`reasoning`": "`think`",
    "`reasoning_effort`": "`think`",
    "`response_format`": "`format`",
    "`max_tokens`": "`options.num_predict`",
    "`stop`": "`options.stop`",
    "`chat_template`": "`template`",
}


def build_error_body(error: APIError) -> dict[str, Any]:
    """Build Ollama's error object, with the names of its own fields.

    >>> build_error_body(APIError(400, "`reasoning` is not supported: the model does not reason"))
    {'error': '`think` is not supported: the model does not reason'}
    >>> build_error_body(APIError(400, "`stop` is not a field of this request", code="unknown_parameter"))
    {'error': '`stop` is not a field of this request'}
    """
    message = error.message
    for name, field in FIELD_NAMES.items():
        if message.startswith(name) and error.code != "unknown_parameter":  # which is named as the client did
            message = field + message.removeprefix(name)
    return {"error": message}
