"""Routes /slots: the sequences of the KV cache, and saving, restoring and erasing one of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Query, Request

from afterglow.api.model import Model
from afterglow.engine.host.remote_calls import RunningRequest
from afterglow.errors import InvalidArgument, InvalidState
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import APIError, invalid_request_error
from afterglow.server.llamacpp.errors import not_supported_error
from afterglow.server.llamacpp.formatting import UNLIMITED, build_parameters
from afterglow.server.llamacpp.schema import SlotFileRequest
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState

MAX_FILE_NAME_BYTES = 200  # file systems allow 255; the file is written under a longer name first
FORBIDDEN_CHARACTERS = frozenset('/\\:*?"<>|')  # separators, and what other systems do not allow


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)

    @router.get("/slots", summary="llama-server: list the sequences of the KV cache")
    async def list_slots(
        request: Request, model: str | None = None, fail_on_no_slot: str | None = None
    ) -> list[dict[str, Any]]:
        if not state.settings.slots:
            raise not_supported_error("slots are not served: start the server without --no-slots")
        salt, served = get_tenant_salt(request), await state.get_model(model)
        slots = await state.run_engine_call(served.name, lambda: build_slots(served, salt))
        if fail_on_no_slot and all(slot["is_processing"] for slot in slots):
            raise APIError(503, "no slot is idle", error_type="server_error", code="no_slot", retry_after=1)
        return slots

    @router.post("/slots/{id_slot}", include_in_schema=False)  # erase needs no file name, the others do
    async def change_slot(
        request: Request,
        id_slot: int,
        action: Literal["save", "restore", "erase"] = Query(),
        body: SlotFileRequest | None = None,
    ) -> dict[str, Any]:
        directory, salt = get_directory(state, request), get_tenant_salt(request)
        model = await state.get_generating_model(None if body is None else body.model)
        if not 0 <= id_slot < model.engine_info.sequences:
            message = f"`id_slot` must be from 0 to {model.engine_info.sequences - 1}, not {id_slot}"
            raise invalid_request_error("id_slot", message)
        if action == "erase":
            erase = functools.partial(erase_slot, model, id_slot, salt)
            return await state.run_engine_call(model.name, lambda: report_busy(id_slot, erase))
        if body is None or body.filename is None:
            message = f"`filename` is missing: {action} needs the name of a file"
            raise invalid_request_error("filename", message, "missing_required_parameter")
        path = directory / check_file_name(body.filename)
        change = functools.partial(save_slot if action == "save" else restore_slot, model, id_slot, path, salt)
        return await state.run_engine_call(model.name, lambda: report_busy(id_slot, change))

    return router


def get_directory(state: ServerState, request: Request) -> Path:
    """Return the directory of the slot files of a tenant."""
    directory = state.settings.slot_save_path
    if directory is None:
        raise not_supported_error("actions on slots need a directory: start the server with --slot-save-path")
    return directory.expanduser() / get_tenant_salt(request)[:32]


def check_file_name(name: str) -> str:
    """Return the name of a file; raise status 400 for one that could leave the directory.

    >>> check_file_name("slot1.bin")
    'slot1.bin'
    """
    if not name.isprintable() or FORBIDDEN_CHARACTERS & set(name) or name != name.strip(". "):
        message = "`filename` must be the name of a file without a directory, and not start or end with a dot or space"
        raise invalid_request_error("filename", message)
    if len(name.encode()) > MAX_FILE_NAME_BYTES:
        message = f"`filename` must have at most {MAX_FILE_NAME_BYTES} bytes, not {len(name.encode())}"
        raise invalid_request_error("filename", message)
    return name


def build_slots(model: Model, salt: str) -> list[dict[str, Any]]:
    """Build the state of each sequence. Sequences of other tenants show only whether they are in use."""
    contents = model.get_cache_contents(salt)
    speculates = "speculative_decoding" in model.capabilities
    slots: list[dict[str, Any]] = []
    for sequence in contents.sequences:
        slot = {
            "id": sequence.number,
            "n_ctx": model.context_length,
            "speculative": speculates,
            "is_processing": sequence.busy,
        }
        own = {"n_prompt_tokens": sequence.tokens} if sequence.first_entries else {}
        task = {} if sequence.request is None else build_task(sequence.request, model)
        slots.append(slot | own | task)
    return slots


def build_task(request: RunningRequest, model: Model) -> dict[str, Any]:
    """Build the fields of a slot about the request that uses it."""
    remaining = UNLIMITED if request.max_tokens is None else request.max_tokens - request.generated_tokens
    return {
        "id_task": int(request.id),
        "n_prompt_tokens_processed": request.computed_tokens,
        "n_prompt_tokens_cache": request.cached_tokens,
        "params": build_parameters(request, model),
        "next_token": [
            {
                "has_next_token": True,
                "has_new_line": request.has_new_line,
                "n_remain": remaining,
                "n_decoded": request.generated_tokens,
            }
        ],
    }


def build_busy_error(slot: int) -> APIError:
    """Return the error of an action on a slot that a request uses."""
    return APIError(503, f"slot {slot} is processing a request: retry later", code="slot_busy", retry_after=1)


def report_busy(slot: int, change: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Change a slot; raise status 503 also if a request began to use it after it was found idle."""
    try:
        return change()
    except InvalidArgument as error:
        if error.name != "sequence":
            raise
        raise build_busy_error(slot) from None


def count_own_tokens(model: Model, slot: int, salt: str) -> int:
    """Return the tokens of a sequence, 0 if they are of another tenant; raise status 503 if a request uses it."""
    sequence = next(sequence for sequence in model.get_cache_contents(salt).sequences if sequence.number == slot)
    if sequence.busy:
        raise build_busy_error(slot)
    return sequence.tokens if sequence.first_entries else 0


def save_slot(model: Model, slot: int, path: Path, salt: str) -> dict[str, Any]:
    """Write the state of a sequence to a file."""
    started = time.monotonic()
    if not count_own_tokens(model, slot, salt):
        raise invalid_request_error("id_slot", f"slot {slot} is empty: there is nothing to save")
    if path.is_dir():
        raise invalid_request_error("filename", f"{path.name!r} is a directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = model.save_sequence(path, slot)
    return {
        "id_slot": slot,
        "filename": path.name,
        "n_saved": tokens,
        "n_written": path.stat().st_size,
        "timings": {"save_ms": (time.monotonic() - started) * 1000},
    }


def restore_slot(model: Model, slot: int, path: Path, salt: str) -> dict[str, Any]:
    """Load the state of a sequence from a file."""
    started = time.monotonic()
    count_own_tokens(model, slot, salt)
    if not path.is_file():
        raise APIError(404, f"there is no saved slot {path.name!r}", param="filename", code="file_not_found")
    try:
        tokens = model.load_sequence(path, slot)
    except InvalidState as error:
        reason = str(error).replace(str(path), "the file")  # clients do not learn where files are
        raise invalid_request_error("filename", f"{path.name!r} cannot be restored: {reason}") from None
    return {
        "id_slot": slot,
        "filename": path.name,
        "n_restored": tokens,
        "n_read": path.stat().st_size,
        "timings": {"restore_ms": (time.monotonic() - started) * 1000},
    }


def erase_slot(model: Model, slot: int, salt: str) -> dict[str, Any]:
    """Clear a sequence. What the RAM and disk tiers hold of it stays."""
    tokens = count_own_tokens(model, slot, salt)
    if tokens:
        model.clear_cache(slot)
    return {"id_slot": slot, "n_erased": tokens}
