"""Routes /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import sqlite3
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.datastructures import UploadFile

from afterglow.errors import InvalidArgument
from afterglow.paths import get_data_directory
from afterglow.server.auth import get_tenant_salt
from afterglow.server.batches.runner import BatchRunner
from afterglow.server.batches.schema import BatchRequest, FileFields
from afterglow.server.batches.store import BatchStore, StoredBatch, StoredFile
from afterglow.server.errors import APIError, invalid_request_error, validation_to_api_error
from afterglow.server.logs import logger
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState

MAX_WINDOW_SECONDS = 30 * 24 * 3600.0
MAX_LISTED_FILES, MAX_LISTED_BATCHES, DEFAULT_LISTED_BATCHES = 10_000, 100, 20
FORM_FIELD_PATTERN = re.compile(r"(\w+)\[(\w+)\]")  # `expires_after[seconds]`
NUMBER_PATTERN = re.compile(r"[0-9]{1,18}")  # Python reads no integers of thousands of digits
FORM = {  # OpenAPI of the body of an upload
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": ["batch"]},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer"},
                },
                "required": ["file", "purpose"],
                "additionalProperties": False,
            }
        }
    },
}
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
ItemT = TypeVar("ItemT", StoredFile, StoredBatch)


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes. It runs batches while the application runs."""
    store = BatchStore(get_data_directory("batches"))
    runner = BatchRunner(state, store)

    @contextlib.asynccontextmanager
    async def run_batches(app: FastAPI) -> AsyncIterator[None]:
        runner.start(app)
        try:
            yield
        finally:
            await runner.stop()

    router = APIRouter(lifespan=run_batches, dependencies=[Depends(report_store_errors)])
    router.include_router(build_file_router(state, store))
    router.include_router(build_batch_router(state, store, runner))
    return router


async def report_store_errors() -> AsyncIterator[None]:
    """Respond with status 503 if the directory or the database of the batches cannot be used."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        logger.error("the files and batches in %s cannot be used: %s", get_data_directory("batches"), error)
        reason = error.strerror if isinstance(error, OSError) else error  # clients do not learn where files are
        message = f"the files and batches cannot be used: {reason}"
        advice = "free some space, or set AFTERGLOW_DATA to a directory that can be written"
        raise APIError(503, f"{message}; {advice}", error_type="server_error", code="batches_unavailable") from error


# --- files


def build_file_router(state: ServerState, store: BatchStore) -> APIRouter:
    """Return the router of /v1/files."""
    router = APIRouter()
    settings = state.settings

    @router.post("/v1/files", summary="Upload a file", openapi_extra={"requestBody": FORM})
    async def upload(request: Request) -> dict[str, Any]:
        async with request.form(max_files=1, max_fields=8) as form:
            file, fields = parse_form(form.multi_items())
            seconds = fields.expires_after.seconds if fields.expires_after else int(settings.file_retention)
            if (file.size or 0) > settings.max_file_bytes:
                limit = f"{settings.max_file_bytes:,} (server setting `max_file_bytes`)"
                raise APIError(413, f"`file` has {file.size:,} bytes; the limit is {limit}", code="file_too_large")
            try:
                stored = await asyncio.to_thread(
                    store.add_file,
                    file.file,
                    salt=get_tenant_salt(request),
                    filename=file.filename or "upload",
                    purpose=fields.purpose,
                    seconds=min(seconds, int(settings.file_retention)),
                    max_total_bytes=settings.max_stored_file_bytes,
                )
            except InvalidArgument as error:
                message = f"{error} (server setting `max_stored_file_bytes`): delete files first"
                raise invalid_request_error("file", message, "limit_exceeded") from None
            return build_file(stored)

    @router.get("/v1/files", summary="List files")
    async def list_files(
        request: Request,
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED_FILES)] = MAX_LISTED_FILES,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        salt = get_tenant_salt(request)
        files = await asyncio.to_thread(store.list_files, salt=salt, purpose=purpose, is_ascending=order == "asc")
        page, has_more = get_page(files, after, limit)
        return build_list([build_file(file) for file in page], has_more=has_more)

    @router.get("/v1/files/{id}", summary="Retrieve a file")
    async def retrieve(id: str, request: Request) -> dict[str, Any]:
        return build_file(await find_file(store, id, request))

    @router.get("/v1/files/{id}/content", summary="Download a file")
    async def download(id: str, request: Request) -> Response:
        file = await find_file(store, id, request)
        return FileResponse(store.get_path(file.id), media_type="application/octet-stream", filename=file.filename)

    @router.delete("/v1/files/{id}", summary="Delete a file")
    async def delete(id: str, request: Request) -> dict[str, Any]:
        file = await find_file(store, id, request)
        try:
            await asyncio.to_thread(store.delete_file, file.id, salt=file.salt)
        except InvalidArgument as error:
            raise APIError(409, str(error), param="id", code="file_in_use") from None
        return {"id": file.id, "object": "file", "deleted": True}

    return router


def parse_form(items: Sequence[tuple[str, Any]]) -> tuple[UploadFile, FileFields]:
    """Return the file and the other fields of a form, or raise status 400."""
    file: UploadFile | None = None
    fields: dict[str, Any] = {}
    for name, value in items:
        nested = FORM_FIELD_PATTERN.fullmatch(name)
        if name == "file" and isinstance(value, UploadFile):
            file = value
        elif nested:
            is_number = isinstance(value, str) and NUMBER_PATTERN.fullmatch(value)
            if not isinstance(fields.setdefault(nested[1], {}), dict):
                raise invalid_request_error(nested[1], f"`{nested[1]}` is set twice")
            fields[nested[1]][nested[2]] = int(value) if is_number else value
        else:
            fields[name] = value
    if "purpose" not in fields:
        raise invalid_request_error("purpose", "`purpose` is missing", "missing_required_parameter")
    if file is None:
        raise invalid_request_error("file", "`file` is missing", "missing_required_parameter")
    try:
        return file, FileFields.model_validate(fields)
    except pydantic.ValidationError as error:
        errors: list[Any] = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise validation_to_api_error(errors, fields) from None


async def find_file(store: BatchStore, id: str, request: Request) -> StoredFile:
    """Return a file of the tenant or raise status 404."""
    salt = get_tenant_salt(request)
    if (file := await asyncio.to_thread(store.get_file, id, salt=salt)) is None:
        raise APIError(404, f"the file {id[:80]!r} does not exist or has expired", param="id", code="file_not_found")
    return file


def build_file(file: StoredFile) -> dict[str, Any]:
    """Build OpenAI's file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.nbytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


# --- batches


def build_batch_router(state: ServerState, store: BatchStore, runner: BatchRunner) -> APIRouter:
    """Return the router of /v1/batches."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/batches", summary="Create a batch")
    async def create(body: BatchRequest, request: Request) -> dict[str, Any]:
        salt = get_tenant_salt(request)
        if (await asyncio.to_thread(store.get_file, body.input_file_id, salt=salt)) is None:
            message = f"the file {body.input_file_id[:80]!r} does not exist or has expired"
            raise invalid_request_error("input_file_id", message, "file_not_found")
        batch = await asyncio.to_thread(
            store.add_batch,
            salt=salt,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            window_seconds=parse_window(body),
            metadata=body.metadata,
            served=sorted(slot.name for slot in state.models.list_own_slots()),
            output_seconds=body.output_expires_after.seconds if body.output_expires_after else None,
        )
        runner.wake()
        return build_batch(batch, await asyncio.to_thread(store.count_results, batch))

    @router.get("/v1/batches", summary="List batches")
    async def list_batches(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED_BATCHES)] = DEFAULT_LISTED_BATCHES,
        after: str | None = None,
    ) -> dict[str, Any]:
        batches = await asyncio.to_thread(store.list_batches, salt=get_tenant_salt(request))
        page, has_more = get_page(batches, after, limit)
        counts = await asyncio.to_thread(lambda: list(map(store.count_results, page)))
        return build_list(list(map(build_batch, page, counts)), has_more=has_more)

    @router.get("/v1/batches/{id}", summary="Retrieve a batch")
    async def retrieve(id: str, request: Request) -> dict[str, Any]:
        batch = await find_batch(store, id, request)
        return build_batch(batch, await asyncio.to_thread(store.count_results, batch))

    @router.post("/v1/batches/{id}/cancel", summary="Cancel a batch")
    async def cancel(id: str, request: Request) -> dict[str, Any]:
        batch = await find_batch(store, id, request)
        if batch.is_final:
            message = f"the batch is {batch.status}: only one that has not ended can be cancelled"
            raise APIError(409, message, param="id", code="batch_ended")
        batch = await asyncio.to_thread(store.set_status, id, "cancelling")
        runner.cancel(id)
        return build_batch(batch, await asyncio.to_thread(store.count_results, batch))

    return router


def parse_window(body: BatchRequest) -> float:
    """Return the seconds of the completion window or raise status 400."""
    try:
        seconds = body.window_seconds
    except ValueError:
        seconds = math.inf
    if not 0 < seconds <= MAX_WINDOW_SECONDS:
        message = "`completion_window` must be a duration of at most 720h, such as 24h or 90m"
        raise invalid_request_error("completion_window", message)
    return seconds


async def find_batch(store: BatchStore, id: str, request: Request) -> StoredBatch:
    """Return a batch of the tenant or raise status 404."""
    if (batch := await asyncio.to_thread(store.get_batch, id, salt=get_tenant_salt(request))) is None:
        raise APIError(404, f"the batch {id[:80]!r} does not exist", param="id", code="batch_not_found")
    return batch


def build_batch(batch: StoredBatch, counts: dict[str, int]) -> dict[str, Any]:
    """Build OpenAI's batch object."""
    errors = None if batch.errors is None else {"object": "list", "data": batch.errors}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{name}_at": getattr(batch, f"{name}_at") for name in TIMES},
        "request_counts": {name: counts[name] for name in ("total", "completed", "failed")},
        "usage": {
            "input_tokens": counts["input_tokens"],
            "input_tokens_details": {"cached_tokens": counts["cached_tokens"]},
            "output_tokens": counts["output_tokens"],
            "output_tokens_details": {"reasoning_tokens": counts["reasoning_tokens"]},
            "total_tokens": counts["input_tokens"] + counts["output_tokens"],
        },
        "metadata": batch.metadata,
    }


# --- lists


def get_page(items: Sequence[ItemT], after: str | None, limit: int) -> tuple[Sequence[ItemT], bool]:
    """Return the items after the one with the id `after`, and whether there are more."""
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise invalid_request_error("after", f"`after` is {after[:80]!r}, which is not in the list")
    start = 0 if after is None else ids.index(after) + 1
    return items[start : start + limit], start + limit < len(items)


def build_list(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Build a page of OpenAI's lists."""
    ids = [item["id"] for item in data]
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }
