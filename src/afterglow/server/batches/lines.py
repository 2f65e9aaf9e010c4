"""Lines of a batch: parses a file with one request per line, and validates each of them before the batch starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import pydantic
from pydantic_core import from_json

from afterglow.server.errors import APIError, invalid_request_error, to_api_error, validation_to_api_error
from afterglow.server.logs import start_record
from afterglow.server.openai.schema.chat import ChatRequest
from afterglow.server.openai.schema.completions import CompletionRequest
from afterglow.server.openai.schema.embeddings import EmbeddingRequest
from afterglow.server.openai.schema.responses import ResponseRequest
from afterglow.server.schema.base import JsonObject, StrictModel

MAX_CUSTOM_ID_LENGTH = 512
ENDPOINTS: dict[str, type[StrictModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/v1/embeddings": EmbeddingRequest,
}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One valid line: where it is in the file, and what it asks for."""

    number: int  # in the file, from 1
    custom_id: str
    url: str
    model: str | None
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """One line that cannot run."""

    number: int
    custom_id: str | None
    error: APIError


class BatchItem(StrictModel):
    """Fields of a line."""

    custom_id: str = pydantic.Field(min_length=1, max_length=MAX_CUSTOM_ID_LENGTH)
    method: str = "POST"
    url: str | None = None
    body: JsonObject


def parse_lines(source: BinaryIO, endpoint: str, *, refuses_hints: bool = False) -> Iterator[BatchLine | InvalidLine]:
    """Yield the lines of a file. `endpoint` is that of all lines; if it is empty, each line needs a `url`.

    >>> import io
    >>> [line] = parse_lines(io.BytesIO(b'{"custom_id": "a", "body": {"input": "hello"}}'), "/v1/embeddings")
    >>> line.number, line.custom_id, line.url
    (1, 'a', '/v1/embeddings')
    """
    seen: dict[str, int] = {}
    offset = 0
    for number, content in enumerate(source, 1):
        start, offset = offset, offset + len(content)
        if not content.strip():
            continue
        custom_id = None
        try:
            fields = parse_json(content)
            custom_id = get_custom_id(fields)
            if custom_id in seen:
                message = f"`custom_id` is {custom_id[:80]!r}, which line {seen[custom_id]} has already"
                raise invalid_request_error("custom_id", message, "duplicate_custom_id")
            if custom_id is not None:
                seen[custom_id] = number
            item = check_fields(fields)
            url = check_item(item, endpoint, refuses_hints=refuses_hints)
        except APIError as error:
            yield InvalidLine(number, custom_id, error)
            continue
        yield BatchLine(number, item.custom_id, url, item.body.get("model"), start, len(content))


def parse_item(content: bytes) -> BatchItem:
    """Parse a line. Raises `APIError` if it is no JSON object with the fields of a line."""
    return check_fields(parse_json(content))


def parse_json(content: bytes) -> Any:
    """Parse the JSON of a line. Raises `APIError` if it is none."""
    try:
        return from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(400, f"the line is not JSON: {error}", code="invalid_json") from None


def get_custom_id(fields: Any) -> str | None:
    """Return the id of a line, whose other fields may be invalid; None if it has no valid one.

    >>> [get_custom_id(fields) for fields in ({"custom_id": "a", "body": 1}, {"custom_id": 1}, [])]
    ['a', None, None]
    """
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    return custom_id if isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_CUSTOM_ID_LENGTH else None


def check_fields(fields: Any) -> BatchItem:
    """Return a parsed line. Raises `APIError` if it has not the fields of a line."""
    try:
        return BatchItem.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _convert_error(error, fields) from None


def check_item(item: BatchItem, endpoint: str, *, refuses_hints: bool = False) -> str:
    """Return the route of a line. Raises `APIError` if the line cannot run."""
    url = item.url or endpoint
    if item.method != "POST":
        raise invalid_request_error("method", f"`method` must be POST, not {item.method[:40]!r}")
    if endpoint and url != endpoint:
        message = f"`url` is {url[:80]!r}, and the endpoint of the batch is {endpoint}"
        raise invalid_request_error("url", message, "mismatched_endpoint")
    if url not in ENDPOINTS:
        raise invalid_request_error("url", f"`url` must be one of {', '.join(ENDPOINTS)}, not {url[:80]!r}")
    if item.body.get("stream"):
        raise invalid_request_error("body.stream", "`body.stream` must be false: the lines of a batch do not stream")
    start_record("BATCH", url, refuses_hints=refuses_hints)
    try:
        ENDPOINTS[url].model_validate(item.body)
    except pydantic.ValidationError as error:
        raise _convert_error(error, item.body) from None
    return url


def _convert_error(error: pydantic.ValidationError, body: Any) -> APIError:
    errors: list[Any] = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
    return to_api_error(validation_to_api_error(errors, body))
