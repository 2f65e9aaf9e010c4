"""/v1/responses: answers that remember what was said before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.chat.messages import to_openai_message as plain_message
from afterglow.chat.output.parts import TextDelta
from afterglow.chat.response import Delta
from afterglow.errors import AfterglowError
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import APIError, invalid_request_error, to_api_error
from afterglow.server.generation import (
    Generation,
    GenerationRequest,
    build_token_logprobs,
    build_usage,
    start_generation,
)
from afterglow.server.openai.response_items import OutputItemBuilder, generate_id, parse_input_items
from afterglow.server.openai.response_store import ResponseStore, StoredResponse
from afterglow.server.schema.base import StrictRoute
from afterglow.server.schema.chat import dump_fields
from afterglow.server.schema.responses import FunctionTool, ResponseRequest
from afterglow.server.sse import format_event, stream_response
from afterglow.server.state import ServerState

INCLUDE_LOGPROBS = "message.output_text.logprobs"


def build_router(state: ServerState) -> APIRouter:
    """The routes, for an application."""
    router = APIRouter(route_class=StrictRoute)
    store = ResponseStore(
        max_responses=state.settings.max_stored_responses, max_bytes=state.settings.max_stored_response_bytes
    )

    @router.post("/v1/responses", summary="Answer, after what was said before")
    async def create(body: ResponseRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request, create_response(state, store, body, get_tenant_salt(request)), "input"
        )

    @router.get("/v1/responses/{id}", summary="A response that is remembered")
    async def retrieve(id: str, request: Request) -> dict[str, Any]:
        return find_response(store, id, get_tenant_salt(request), 404, "id").response

    @router.delete("/v1/responses/{id}", summary="Forget a response")
    async def delete(id: str, request: Request) -> dict[str, Any]:
        find_response(store, id, get_tenant_salt(request), 404, "id")
        store.remove(id)
        return {"id": id, "object": "response", "deleted": True}

    return router


def find_response(store: ResponseStore, id: str, salt: str, status: int, param: str) -> StoredResponse:
    """A response that is remembered, or a refusal."""
    stored = store.get(id)
    if stored is None or stored.salt != salt:
        code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
        raise APIError(status, f"there is no response {id[:80]!r} here, or it was forgotten", param=param, code=code)
    return stored


async def create_response(state: ServerState, store: ResponseStore, body: ResponseRequest, salt: str) -> Response:
    """Answer, whole or as it comes."""
    past: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        past = find_response(store, body.previous_response_id, salt, 400, "previous_response_id").messages
    if body.stream_options is not None and not body.stream:
        raise invalid_request_error("stream_options", "`stream_options` is for streams: set `stream`")
    said = [*past, *parse_input_items(body.input)]
    if not said:
        raise invalid_request_error("input", "`input` must not be empty")
    running = await start_generation(state, body.model, build_generation_request(body, said, salt))
    page = ResponseFormatter(body, running, store, said, salt)
    if not body.stream:
        try:
            async for index, delta in running.stream_deltas():
                page.add_delta(index, delta)
            return JSONResponse(page.finish()[-1]["response"])
        finally:
            running.close()
    return await stream_response(
        running.stream_deltas(), page.stream_events, ping_seconds=state.settings.ping_seconds, on_close=running.close
    )


def build_generation_request(body: ResponseRequest, messages: list[dict[str, Any]], salt: str) -> GenerationRequest:
    """What the library is asked for."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    wanted = body.top_logprobs is not None or INCLUDE_LOGPROBS in (body.include or ())
    overflow = body.overflow or ("shift" if body.truncation == "auto" else "refuse")
    return GenerationRequest(
        messages=[*system, *messages],
        chat_options=build_chat_options(body),
        sampling_fields=body,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wanted else None,
        overflow=overflow,
        salt=salt,
    )


def build_chat_options(body: ResponseRequest) -> dict[str, Any]:
    """What leads the answer, as `Answering.plan` has it."""
    if not body.tools and (body.tool_choice not in (None, "none", "auto")):
        raise invalid_request_error("tool_choice", "there are no `tools` to call")
    choice = dump_fields(body.tool_choice)
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": choice["tools"]}}
    return {
        "tools": [{"type": "function", "function": _dump_function(tool)} for tool in body.tools or ()],
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "response_format": build_response_format(body),
        "reasoning": None if body.reasoning is None else body.reasoning.effort,
    }


def _dump_function(tool: FunctionTool) -> dict[str, Any]:
    return {key: value for key, value in dump_fields(tool).items() if key != "type"}


def build_response_format(body: ResponseRequest) -> dict[str, Any] | None:
    """`text.format` as chat has it."""
    if body.text is None or body.text.format is None:
        return None
    written: dict[str, Any] = dump_fields(body.text.format)
    kind = written.pop("type")
    return {"type": kind, "json_schema": written} if kind == "json_schema" else {"type": kind}


class ResponseFormatter:
    """A response as OpenAI writes it, whole or as events."""

    def __init__(
        self,
        body: ResponseRequest,
        generation: Generation,
        store: ResponseStore,
        messages: list[dict[str, Any]],
        salt: str,
    ) -> None:
        self._body = body
        self._generation = generation
        self._store = store
        self._messages = messages
        self._salt = salt
        self._item_builder = OutputItemBuilder()
        self._pending_logprobs: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is not certain yet
        self._sequence_number = 0
        self._head = build_response_head(body, generation)

    def add_delta(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The events that one delta makes."""
        token, running = delta.token, self._generation
        if token is not None and token.logprob is not None and running.is_visible_token(token):
            self._pending_logprobs.append(build_token_logprobs(running.model, token))
        events: list[dict[str, Any]] = []
        for part in delta.parts:
            logprobs, self._pending_logprobs = (
                (self._pending_logprobs, []) if isinstance(part, TextDelta) else ([], self._pending_logprobs)
            )
            events += self._item_builder.add_part(part, logprobs)
        return events

    async def stream_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """The response as it comes."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        for kind in ("response.created", "response.in_progress"):
            yield self._format_event({"type": kind, "response": begun})
        try:
            async for index, delta in deltas:
                for one in self.add_delta(index, delta):
                    yield self._format_event(one)
            for one in self.finish():
                yield self._format_event(one)
        except AfterglowError as error:
            for one in self._build_failure_events(error):
                yield self._format_event(one)

    def finish(self) -> list[dict[str, Any]]:
        """The last events; the very last has the whole response."""
        (turn,) = self._generation.get_responses()
        whole = turn.finish_reason in ("stop", "tool_calls")
        events = list(self._item_builder.finish("completed" if whole else "incomplete"))
        response = {
            **self._head,
            "status": "completed" if whole else "incomplete",
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": self._item_builder.items,
            "usage": self._build_usage(build_usage([turn], self._generation.reasoning_counters)),
        }
        if self._body.store is not False:
            self._store.put(response, [*self._messages, plain_message(turn.message)], self._salt)
        return [*events, {"type": "response.completed" if whole else "response.incomplete", "response": response}]

    def _build_failure_events(self, error: AfterglowError) -> Iterator[dict[str, Any]]:
        refusal = to_api_error(error)
        yield {"type": "error", "code": refusal.code, "message": refusal.message, "param": refusal.param}
        failure = {"code": "server_error", "message": refusal.message}
        response = {
            **self._head,
            "status": "failed",
            "error": failure,
            "output": self._item_builder.items,
            "usage": None,
        }
        yield {"type": "response.failed", "response": response}

    def _format_event(self, fields: dict[str, Any]) -> bytes:
        self._sequence_number += 1
        return format_event({**fields, "sequence_number": self._sequence_number - 1}, fields["type"])

    def _build_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        details = usage["prompt_tokens_details"]
        written = usage["prompt_tokens"] - details["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**details, "cache_write_tokens": written},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }


def build_response_head(body: ResponseRequest, generation: Generation) -> dict[str, Any]:
    """What a response says about its request."""
    format = {"type": "text"} if body.text is None or body.text.format is None else dump_fields(body.text.format)
    optional = {"description": None, "parameters": None, "strict": None}
    written = {
        "id": generate_id("resp"),
        "object": "response",
        "created_at": generation.created,
        "model": body.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": format},
        "tool_choice": dump_fields(body.tool_choice) or "auto",
        "tools": [{**optional, **dump_fields(tool)} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        "system_fingerprint": generation.model.fingerprint,
    }
    return written if generation.truncation is None else {**written, "overflow": generation.truncation.report}
