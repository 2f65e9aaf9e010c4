"""Errors as OpenAI's error object: which status, type, parameter and code each of ours has."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from afterglow.errors import (
    AfterglowError,
    Cancelled,
    Closed,
    EngineCrashed,
    EngineError,
    InvalidArgument,
    InvalidGrammar,
    InvalidMedia,
    InvalidTemplate,
    KVCacheFull,
    LoadError,
    MediaRefused,
    ModelNotFound,
    PromptTooLong,
    RequestError,
    UnsupportedMedia,
    UnsupportedOption,
)

logger = logging.getLogger("afterglow.server")
CLIENT_CLOSED_REQUEST = 499  # nobody sees it; it stands in the metrics

# What a request calls the things that the library calls otherwise.
WIRE_PARAM_NAMES = {
    "reasoning": "reasoning_effort",
    "json_schema": "response_format",
    "entries": "prompt",
    "tokens": "prompt",
    "logprobs": "top_logprobs",
}


class APIError(Exception):
    """An answer that is an error. `param` is the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.error_type = status, message, error_type
        self.param, self.code, self.retry_after = param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return {"error": error}

    def to_response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse(self.body, self.status, headers)


def invalid_request_error(param: str, message: str, code: str = "invalid_value") -> APIError:
    """The request's own fault."""
    return APIError(400, message, param=param, code=code)


def to_api_error(error: BaseException) -> APIError:
    """What a client is told about an error."""
    match error:
        case APIError():
            return error
        case PromptTooLong():
            message = f"The prompt has {error.cells:,} tokens, and the context of this model holds {error.limit:,}."
            return APIError(400, f"{message} Shorten it.", param="messages", code="context_length_exceeded")
        case InvalidArgument() | UnsupportedOption() | UnsupportedMedia():
            root, dot, rest = error.name.partition(".")
            codes = {InvalidArgument: "invalid_value", UnsupportedMedia: "unsupported_media"}
            code = codes.get(type(error), "unsupported_value")
            return APIError(400, str(error), param=WIRE_PARAM_NAMES.get(root, root) + dot + rest, code=code)
        case Closed():
            return APIError(
                503, "the server is shutting down", error_type="server_error", code="shutting_down", retry_after=5
            )
    for kind, status, param, code in ERROR_STATUSES:
        if isinstance(error, kind):
            name = "invalid_request_error" if status < CLIENT_CLOSED_REQUEST else "server_error"
            return APIError(status, str(error), error_type=name, param=param, code=code)
    logger.error("a request ran into a bug", exc_info=error)
    return APIError(
        500, f"a bug in the server: {type(error).__name__}", error_type="server_error", code="internal_error"
    )


# Status, parameter and code of the errors that say all by themselves; the first that fits.
ERROR_STATUSES: tuple[tuple[type[AfterglowError], int, str | None, str], ...] = (
    (InvalidGrammar, 400, "response_format", "invalid_grammar"),
    (InvalidTemplate, 400, "messages", "invalid_messages"),
    (InvalidMedia, 400, "messages", "invalid_media"),
    (MediaRefused, 400, "messages", "media_refused"),
    (ModelNotFound, 404, "model", "model_not_found"),
    (RequestError, 400, None, "invalid_request"),
    (Cancelled, CLIENT_CLOSED_REQUEST, None, "cancelled"),
    (EngineCrashed, 500, None, "engine_crashed"),
    (KVCacheFull, 503, None, "overloaded"),
    (LoadError, 503, None, "not_loaded"),
    (EngineError, 500, None, "engine_error"),
)


def validation_to_api_error(errors: Sequence[Mapping[str, Any]], body: Any) -> APIError:
    """The first thing that is wrong with a body, as a refusal."""
    if not errors:
        return APIError(400, "the body cannot be read")
    first = max((one for one in errors if one["loc"][:2] == errors[0]["loc"][:2]), key=lambda one: len(one["loc"]))
    param = format_param_path(first["loc"], body) or None
    match first["type"]:
        case "json_invalid":
            return APIError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
        case "extra_forbidden":
            return APIError(400, f"`{param}` is not a field of this request", param=param, code="unknown_parameter")
        case _ if param is None:
            return APIError(400, "the request needs a JSON object, with the content type application/json")
        case "missing":
            return APIError(400, f"`{param}` is missing", param=param, code="missing_required_parameter")
        case "unsupported_parameter":
            return APIError(400, f"`{param}` {first['msg']}", param=param, code="unsupported_parameter")
    return APIError(400, f"`{param}`: {first['msg']}", param=param, code="invalid_value")


def format_param_path(location: Sequence[str | int], body: Any) -> str:
    """Where something is wrong, as a path into the body: names of types that pydantic puts between are left out.

    >>> parameter(("body", "messages", 0, "user", "content"), {"messages": [{"role": "user"}]})
    'messages[0].content'
    """
    path, here = "", body
    steps = list(location[1:])
    for index, step in enumerate(steps):
        inside = _get_child(here, step)
        if inside is None and index < len(steps) - 1:
            continue
        if inside is None and not isinstance(here, Mapping):
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
        here = inside
    return path


def _get_child(value: Any, step: str | int) -> Any:
    if isinstance(value, Mapping) and isinstance(step, str):
        return value.get(step)
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return value[step]
    return None


def install_error_handlers(app: FastAPI) -> None:
    """Have every error leave the server as OpenAI's object."""

    @app.exception_handler(RequestValidationError)
    async def on_validation(_: Request, error: RequestValidationError) -> JSONResponse:
        return validation_to_api_error(error.errors(), error.body).to_response()

    @app.exception_handler(HTTPException)
    async def on_http(_: Request, error: HTTPException) -> JSONResponse:
        return APIError(error.status_code, str(error.detail)).to_response()

    async def on_ours(_: Request, error: Exception) -> JSONResponse:
        return to_api_error(error).to_response()

    for kind in (APIError, AfterglowError, Exception):
        app.add_exception_handler(kind, on_ours)
