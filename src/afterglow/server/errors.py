"""Mapping of exceptions to `APIError`: HTTP status, type, parameter and code. Each API formats its own error bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

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
    InvalidModel,
    InvalidTemplate,
    KVCacheFull,
    LoadError,
    LoadVetoed,
    MediaRefused,
    ModelNotFound,
    PromptTooLong,
    RequestError,
    UnsupportedMedia,
    UnsupportedOption,
)
from afterglow.server.logs import get_record, logger

CLIENT_CLOSED_REQUEST = 499  # never sent, only counted in the metrics

# Library argument names that differ from the request field.
WIRE_PARAM_NAMES = {
    "reasoning": "reasoning_effort",
    "json_schema": "response_format",
    "entries": "prompt",
    "tokens": "prompt",
    "text": "messages",  # a part of the prompt that cannot be tokenized
    "logprobs": "top_logprobs",
}


class APIError(Exception):
    """Error response. `param` names the invalid field, `code` is machine-readable."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        details: Mapping[str, int] | None = None,
    ) -> None:
        """`details` are numbers that some APIs have in their error bodies."""
        super().__init__(message)
        self.status, self.message, self.error_type = status, message, error_type
        self.param, self.code, self.retry_after = param, code, retry_after
        self.details = dict(details or {})


ErrorFormat: TypeAlias = Callable[[APIError], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ErrorFormats:
    """Error bodies by path prefix: each API formats the errors of its own paths, the default all others."""

    default: ErrorFormat
    by_prefix: Mapping[str, ErrorFormat] = field(default_factory=dict)
    status_by_prefix: Mapping[str, Callable[[APIError], int]] = field(default_factory=dict)  # if an API differs

    def build_response(self, error: APIError, path: str) -> JSONResponse:
        """Return the HTTP response for an error of a request to `path`."""
        formats = [build_body for prefix, build_body in self.by_prefix.items() if path.startswith(prefix)]
        statuses = [
            get_status(error) for prefix, get_status in self.status_by_prefix.items() if path.startswith(prefix)
        ]
        get_record().finish_reason = error.code or error.error_type
        headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
        return JSONResponse((formats or [self.default])[0](error), (statuses or [error.status])[0], headers)


class ReceiveError(HTTPException):
    """An `APIError` that occurs while the body is received. FastAPI converts all other exceptions there."""

    def __init__(self, error: APIError) -> None:
        super().__init__(error.status, error.message)
        self.api_error = error


def invalid_request_error(param: str, message: str, code: str = "invalid_value") -> APIError:
    """Return a 400 error for one field of the request."""
    return APIError(400, message, param=param, code=code)


def report_hint(name: str, reason: str) -> None:
    """Record a field that has no effect; raise status 400 if the server is strict."""
    if not get_record().accept_hint(name):
        raise invalid_request_error(name, f"`{name}` has no effect: {reason}; leave it out", "unsupported_parameter")


def to_api_error(error: BaseException) -> APIError:
    """Convert any exception to the error that the client receives."""
    match error:
        case APIError():
            return error
        case PromptTooLong():
            message = (
                f"The prompt has {error.cells:,} tokens; the context length is {error.limit:,}. Shorten the prompt."
            )
            details = {"n_prompt_tokens": error.cells, "n_ctx": error.limit}
            return APIError(400, message, param="messages", code="context_length_exceeded", details=details)
        case InvalidArgument() | UnsupportedOption() | UnsupportedMedia():
            root, dot, rest = error.name.partition(".")
            codes = {InvalidArgument: "invalid_value", UnsupportedMedia: "unsupported_media"}
            code = codes.get(type(error), "unsupported_value")
            return APIError(400, str(error), param=WIRE_PARAM_NAMES.get(root, root) + dot + rest, code=code)
        case InvalidModel() | LoadVetoed():  # clients do not see the directories of this machine
            message = str(error).replace(error.path, Path(error.path).name)
            return APIError(503, message, error_type="server_error", code="not_loaded")
        case Closed():
            return APIError(
                503, "the server is shutting down", error_type="server_error", code="shutting_down", retry_after=5
            )
    for exception_type, status, param, code in ERROR_STATUSES:
        if isinstance(error, exception_type):
            error_type = "invalid_request_error" if status < CLIENT_CLOSED_REQUEST else "server_error"
            return APIError(status, str(error), error_type=error_type, param=param, code=code)
    logger.error("unexpected error in a request", exc_info=error)
    return APIError(500, f"internal error: {type(error).__name__}", error_type="server_error", code="internal_error")


# Status, parameter and code of errors whose own message is sent. The first matching type applies.
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
    """Convert the first validation error of a body."""
    if not errors:
        return APIError(400, "the body is not readable")
    # Of a union, pydantic reports an error for each member: the deepest one belongs to the member that was meant.
    same_field = (error for error in errors if error["loc"][:2] == errors[0]["loc"][:2])
    first = max(same_field, key=lambda error: len(error["loc"]))
    if first["loc"][0] != "body":
        return _build_parameter_error(".".join(map(str, first["loc"][1:])), first)
    location = first["loc"]
    missing = location[-1:] if first["type"] == "missing" and len(location) > 1 else ()
    param = format_param_path(location[: len(location) - len(missing)], body, *missing) or None
    match first["type"]:
        case "json_invalid":
            return APIError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
        case "unknown_parameter":
            param = format_param_path(location, body, first["ctx"]["name"])
            return APIError(400, f"`{param}` {first['msg']}", param=param, code="unknown_parameter")
        case "missing_field":  # of several fields, one must be present
            param = format_param_path(location, body, first["ctx"]["name"])
            return APIError(400, f"`{param}` is missing", param=param, code="missing_required_parameter")
        case _ if param is None:
            kind = "list" if first["type"] == "list_type" else "JSON object"
            return APIError(400, f"the body must be a {kind}")
        case "missing":
            return APIError(400, f"`{param}` is missing", param=param, code="missing_required_parameter")
        case "unsupported_parameter" | "same_field":
            code = "unsupported_parameter" if first["type"] == "unsupported_parameter" else "invalid_value"
            return APIError(400, f"`{param}` {first['msg']}", param=param, code=code)
    return APIError(400, f"`{param}`: {first['msg']}", param=param, code="invalid_value")


def _build_parameter_error(param: str, error: Mapping[str, Any]) -> APIError:
    """Convert a validation error of a query, a path or a header."""
    if error["type"] == "extra_forbidden":
        message, code = f"`{param}` is not a parameter of this request", "unknown_parameter"
    elif error["type"] == "missing":
        message, code = f"`{param}` is missing", "missing_required_parameter"
    else:
        message, code = f"`{param}`: {error['msg']}", "invalid_value"
    return APIError(400, message, param=param, code=code)


def format_param_path(location: Sequence[str | int], body: Any, *missing: str | int) -> str:
    """Format a pydantic error location as a path into the body, without the type names that pydantic inserts.

    `missing` is the name of a field that the body does not have, or the index of an item.

    >>> format_param_path(("body", "messages", 0, "user", "content"), {"messages": [{"role": "user", "content": 5}]})
    'messages[0].content'
    >>> format_param_path(("body", "input", "str"), {"input": None}), format_param_path(("body",), {}, "input")
    ('input', 'input')
    >>> part = {"type": "image_url", "image_url": {"url": ""}, "id": 5}
    >>> format_param_path(("body", "content", 0, "image_url", "id"), {"content": [part]})
    'content[0].id'
    """
    path = ""
    for step in (*_find_keys(location[1:], body), *missing):
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _find_keys(steps: Sequence[str | int], value: Any) -> list[str | int]:
    """Return the steps that lead into a value. The others are type names, which may look like keys of the value.

    A path to the last step is preferred, then the longest one.
    """
    if not steps:
        return []
    step, *rest = steps
    skipped = _find_keys(rest, value)
    is_key = isinstance(step, str) and isinstance(value, Mapping) and step in value
    if not is_key and not (isinstance(step, int) and isinstance(value, list) and step < len(value)):
        return skipped
    taken = [step, *_find_keys(rest, value[step])]
    return max(taken, skipped, key=lambda keys: (keys[-1:] == [steps[-1]], len(keys)))


def install_error_handlers(app: FastAPI, formats: ErrorFormats) -> None:
    """Register handlers that respond to every exception with the error body of the API."""

    async def handle_error(request: Request, error: Exception) -> JSONResponse:
        match error:
            case RequestValidationError():
                api_error = validation_to_api_error(error.errors(), error.body)
            case ReceiveError():
                api_error = error.api_error
            case HTTPException():
                api_error = APIError(error.status_code, str(error.detail))
            case _:
                api_error = to_api_error(error)
        return formats.build_response(api_error, request.url.path)

    for exception_type in (RequestValidationError, HTTPException, APIError, AfterglowError, Exception):
        app.add_exception_handler(exception_type, handle_error)
