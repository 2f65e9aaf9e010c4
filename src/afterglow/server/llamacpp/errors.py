"""Error bodies of the llama-server API."""

from __future__ import annotations

from typing import Any

from afterglow.server.errors import APIError

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def build_error_body(error: APIError) -> dict[str, Any]:
    """Build llama-server's error object. `param` is an extension: the field that is wrong.

    >>> build_error_body(APIError(501, "slots are not served"))["error"]
    {'code': 501, 'message': 'slots are not served', 'type': 'not_supported_error'}
    """
    default = "invalid_request_error" if error.status < 500 else "server_error"
    body: dict[str, Any] = {
        "code": error.status,
        "message": error.message,
        "type": ERROR_TYPES.get(error.status, default),
    }
    if error.code == "context_length_exceeded" and error.details:
        prompt, context = error.details["n_prompt_tokens"], error.details["n_ctx"]
        # Clients look for the words of llama-server.
        message = f"the prompt has {prompt:,} tokens, which exceeds the available context size of {context:,} tokens"
        body |= {"message": message, "type": "exceed_context_size_error", **error.details}
    return {"error": body | ({} if error.param is None else {"param": error.param})}


def not_supported_error(message: str) -> APIError:
    """Return the error of a route or an action that the server does not offer with its settings."""
    return APIError(501, message, error_type="not_supported_error", code="not_supported")
