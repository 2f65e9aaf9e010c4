"""Runs the lines of one batch: as many at once as there are free sequences, each like a request to its route."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import FastAPI

from afterglow.errors import AfterglowError, Closed
from afterglow.server.batches.lines import BatchLine, InvalidLine, parse_item, parse_lines
from afterglow.server.batches.ordering import find_slot, order_lines, read_line
from afterglow.server.batches.store import BatchStore, LineResult, StoredBatch
from afterglow.server.errors import CLIENT_CLOSED_REQUEST, APIError, to_api_error
from afterglow.server.held_models import hold_models
from afterglow.server.logs import start_record
from afterglow.server.openai.errors import build_error_body
from afterglow.server.priority import run_as_batch_line
from afterglow.server.state import ServerState

POLL_SECONDS = 0.2  # interval of the checks for free sequences and for cancellation
QUEUE_FULL, UNAVAILABLE = 429, 503
MAX_ATTEMPTS = 3  # of a line that fails because the model is not available
MAX_DESCRIBED_ERRORS = 100  # invalid lines that the batch itself describes


@dataclass(frozen=True, slots=True)
class RouteResponse:
    """Response of a route to a line."""

    status: int
    request_id: str
    body: Any


async def call_route(app: FastAPI, url: str, body: bytes, salt: str, *, refuses_hints: bool = False) -> RouteResponse:
    """Send a request to a route of this server without a connection, at the lowest priority."""
    record = start_record("BATCH", url, refuses_hints=refuses_hints)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {"salt": salt},
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # the client of a batch does not disconnect

    async def send(message: Any) -> None:
        sent.append(message)

    status = CLIENT_CLOSED_REQUEST
    try:
        with hold_models(), run_as_batch_line():
            try:
                await app(scope, receive, send)
            except Exception as error:  # FastAPI has sent a response, and raises it again for the log
                if not sent:
                    api_error = to_api_error(error)
                    return RouteResponse(api_error.status, record.id, build_error_body(api_error))
        status = sent[0]["status"]
        content = b"".join(message.get("body", b"") for message in sent)
        return RouteResponse(status, record.id, json.loads(content))
    finally:
        record.log(status)


class BatchExecution:
    """One batch from validation to its last result. Its process must have claimed it."""

    def __init__(
        self,
        app: FastAPI,
        state: ServerState,
        store: BatchStore,
        batch: StoredBatch,
        *,
        max_lines: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        on_result: Callable[[LineResult], None] = lambda result: None,
    ) -> None:
        """`is_stopped` is asked between lines; running ones are then cancelled and have no result."""
        self._app, self._state, self._store, self._batch = app, state, store, batch
        self._max_lines = max_lines
        self._is_stopped = is_stopped
        self._on_result = on_result
        self._path: Path = store.get_path(batch.input_file_id)
        self._attempts: dict[int, int] = {}

    async def validate(self) -> None:
        """Store the lines, unless that was done before. Also a batch that does not run has a result for each line."""
        if self._batch.in_progress_at is None:
            await asyncio.to_thread(self._store_lines)

    async def prepare(self) -> bool:
        """Validate and order the lines, unless that was done before; return False if there is no valid line."""
        batch, store = self._batch, self._store
        await self.validate()
        lines = await asyncio.to_thread(store.list_lines, batch.id)
        if not lines:
            return False
        current = await asyncio.to_thread(store.get_batch, batch.id)
        assert current is not None
        if not current.is_ordered:
            with hold_models():
                numbers = await order_lines(self._state, self._path, lines, batch.salt)
            await asyncio.to_thread(store.set_order, batch.id, numbers)
        return True

    def _store_lines(self) -> None:
        """Store all lines, and the results of invalid ones. A stopped batch needs no models."""
        batch, limit = self._batch, self._max_lines
        lines: list[BatchLine] = []
        invalid: list[InvalidLine] = []
        descriptions: list[dict[str, Any]] = []
        checks_models = not self._is_stopped()
        with open(self._path, "rb") as source:
            for line in parse_lines(source, batch.endpoint, refuses_hints=self._state.settings.strict):
                if (
                    checks_models
                    and isinstance(line, BatchLine)
                    and (error := self._find_model_error(line)) is not None
                ):
                    line = InvalidLine(line.number, line.custom_id, error)
                (lines if isinstance(line, BatchLine) else invalid).append(line)  # type: ignore[arg-type]
                if limit is not None and len(lines) + len(invalid) > limit:
                    message = f"the file has more than {limit:,} lines (server setting `max_batch_lines`)"
                    descriptions = [build_description("too_many_lines", message, line.number)]
                    lines, invalid = [], []
                    break
        if not lines and not invalid and not descriptions:
            descriptions = [build_description("empty_file", "the file has no lines")]
        for line in invalid[:MAX_DESCRIBED_ERRORS]:
            code = line.error.code or "invalid_request"
            descriptions.append(build_description(code, line.error.message, line.number, line.error.param))
        model = lines[0].model if lines else None
        self._store.add_lines(batch.id, lines, map(build_invalid_result, invalid), descriptions, model)

    def _find_model_error(self, line: BatchLine) -> APIError | None:
        """Return the error of a line whose model is not served."""
        try:
            self._state.models.add_named(line.model)
            self._state.models.get_requested_slot(line.model)
        except (APIError, AfterglowError) as error:
            return to_api_error(error)
        return None

    async def run(self) -> bool:
        """Run all lines that have no result; return False if it was stopped. Raises `Closed` if the server stops."""
        pending = deque(await asyncio.to_thread(self._store.list_lines, self._batch.id, pending=True))
        running: dict[asyncio.Task[LineResult | None], BatchLine] = {}
        with open(self._path, "rb") as source:
            try:
                while pending or running:
                    if self._is_stopped():
                        return False
                    while pending and self._can_start(pending[0], list(running.values())):
                        line = pending.popleft()
                        running[asyncio.ensure_future(self._run_line(source, line))] = line
                    if running:
                        await asyncio.wait(running, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    else:
                        await asyncio.sleep(POLL_SECONDS)
                    for task in [task for task in running if task.done()]:
                        line = running.pop(task)
                        if (result := task.result()) is None:
                            pending.appendleft(line)
                        else:
                            self._on_result(result)
                return True
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def _can_start(self, line: BatchLine, running: list[BatchLine]) -> bool:
        """Whether the model of a line has a sequence that no other request uses."""
        slot = find_slot(self._state, line)
        if running and find_slot(self._state, running[0]) is not slot:
            return False  # the models of a batch are used one after the other
        if slot is None or slot.model is None or not slot.is_usable:
            return not running  # it is loaded for this line
        queue = self._state.get_admission_queue(slot.model)
        others = max(0, queue.in_flight - len(running))
        return len(running) < slot.model.engine_info.sequences - others

    async def _run_line(self, source: BinaryIO, line: BatchLine) -> LineResult | None:
        """Run a line and store its result; return None if it has to run again."""
        item = parse_item(read_line(source, line))
        body = json.dumps(item.body).encode()
        response = await call_route(
            self._app, line.url, body, self._batch.salt, refuses_hints=self._state.settings.strict
        )
        if response.status in (QUEUE_FULL, UNAVAILABLE, CLIENT_CLOSED_REQUEST):
            error = response.body.get("error", {})
            if error.get("code") == "shutting_down":
                raise Closed("server")
            self._attempts[line.number] = self._attempts.get(line.number, 0) + (response.status != QUEUE_FULL)
            if self._attempts[line.number] < MAX_ATTEMPTS:
                await asyncio.sleep(POLL_SECONDS)
                return None
        result = build_result(line, response)
        await asyncio.shield(asyncio.to_thread(self._store.add_result, self._batch.id, result))
        return result


# --- results


def build_result(line: BatchLine, response: RouteResponse) -> LineResult:
    """Build the result of a line that ran."""
    document = {
        "id": f"batch_req_{response.request_id.removeprefix('req_')}",
        "custom_id": line.custom_id,
        "response": {"status_code": response.status, "request_id": response.request_id, "body": response.body},
        "error": None,
    }
    usage = response.body.get("usage") or {}
    input_details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    output_details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return LineResult(
        number=line.number,
        is_error=response.status >= 400,
        document=json.dumps(document, ensure_ascii=False),
        input_tokens=usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        cached_tokens=input_details.get("cached_tokens", 0),
        output_tokens=usage.get("completion_tokens", usage.get("output_tokens", 0)),
        reasoning_tokens=output_details.get("reasoning_tokens", 0),
    )


def build_invalid_result(line: InvalidLine) -> LineResult:
    """Build the result of a line that cannot run."""
    return build_error_result(
        line.number, line.custom_id, line.error.code or "invalid_request", f"line {line.number}: {line.error.message}"
    )


def build_error_result(number: int, custom_id: str | None, code: str, message: str) -> LineResult:
    """Build the result of a line that did not run.

    >>> build_error_result(3, "a", "batch_expired", "too late").is_error
    True
    """
    error = {"code": code, "message": message, "line": number}
    document = {
        "id": f"batch_req_{time.time_ns():x}{number:x}",
        "custom_id": custom_id,
        "response": None,
        "error": error,
    }
    return LineResult(number=number, is_error=True, document=json.dumps(document, ensure_ascii=False))


def build_description(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """Build an error of a batch.

    >>> build_description("empty_file", "the file has no lines")["line"] is None
    True
    """
    return {"code": code, "line": line, "message": message, "param": param}
