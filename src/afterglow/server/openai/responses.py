"""Routes /v1/responses: stored responses that can be continued by id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from afterglow.api.options import PromptOptions
from afterglow.chat.messages import Message
from afterglow.chat.output.parts import TextDelta
from afterglow.chat.output.response import Delta
from afterglow.chat.tools.tool import build_tool
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import APIError, invalid_request_error
from afterglow.server.generation import ConversationRequest, Generation, start_generation
from afterglow.server.openai.formatting import build_token_logprobs, build_truncation, build_usage
from afterglow.server.openai.response_items import (
    OutputItemBuilder,
    ResponseEvent,
    generate_id,
    parse_input_items,
)
from afterglow.server.openai.response_store import ResponseStore, StoredResponse
from afterglow.server.openai.schema.chat import dump_fields
from afterglow.server.openai.schema.responses import ResponseRequest
from afterglow.server.schema.base import StrictRoute
from afterglow.server.sse import format_event
from afterglow.server.state import ServerState

INCLUDE_LOGPROBS = "message.output_text.logprobs"


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)
    store = ResponseStore(
        max_responses=state.settings.max_stored_responses, max_bytes=state.settings.max_stored_response_bytes
    )

    @router.post("/v1/responses", summary="Create a response")
    async def create(body: ResponseRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request, create_response(state, store, body, get_tenant_salt(request)), "input"
        )

    @router.get("/v1/responses/{id}", summary="Retrieve a stored response")
    async def retrieve(id: str, request: Request) -> dict[str, Any]:
        return find_response(store, id, get_tenant_salt(request), 404, "id").response

    @router.delete("/v1/responses/{id}", summary="Delete a stored response")
    async def delete(id: str, request: Request) -> dict[str, Any]:
        find_response(store, id, get_tenant_salt(request), 404, "id")
        store.remove(id)
        return {"id": id, "object": "response", "deleted": True}

    return router


def find_response(store: ResponseStore, id: str, salt: str, status: int, param: str) -> StoredResponse:
    """Return a stored response of this tenant or raise an error."""
    stored = store.get(id)
    if stored is None or stored.salt != salt:
        code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
        raise APIError(status, f"the response {id[:80]!r} does not exist or was evicted", param=param, code=code)
    return stored


async def create_response(state: ServerState, store: ResponseStore, body: ResponseRequest, salt: str) -> Response:
    """Generate a response and return it whole or as a stream."""
    history: list[Message] = []
    if body.previous_response_id is not None:
        history = find_response(store, body.previous_response_id, salt, 400, "previous_response_id").messages
    if body.stream_options is not None and not body.stream:
        raise invalid_request_error("stream_options", "`stream_options` requires `stream`")
    messages = [*history, *parse_input_items(body.input)]
    if not messages:
        raise invalid_request_error("input", "`input` must not be empty")
    generation = await start_generation(state, body.model, build_generation_request(body, messages, salt))
    formatter = ResponseFormatter(body, generation, store, messages, salt)
    return await generation.respond(formatter, stream=bool(body.stream))


def build_generation_request(body: ResponseRequest, messages: list[Message], salt: str) -> ConversationRequest:
    """Convert the body to a generation request."""
    system = [Message(role="system", content=body.instructions)] if body.instructions else []
    include_logprobs = body.top_logprobs is not None or INCLUDE_LOGPROBS in (body.include or ())
    tools = [
        build_tool(tool.name, tool.description, tool.parameters, tool.strict, where=f"tools[{index}]")
        for index, tool in enumerate(body.tools or ())
    ]
    return ConversationRequest(
        messages=[*system, *messages],
        tools=tools,
        prompt_options=build_prompt_options(body),
        sampling_fields=body,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if include_logprobs else None,
        overflow=body.overflow or ("shift" if body.truncation == "auto" else "refuse"),
        salt=salt,
    )


def build_prompt_options(body: ResponseRequest) -> PromptOptions:
    """Build the keyword arguments of `Model.plan_chat`, except `tools`."""
    if not body.tools and (body.tool_choice not in (None, "none", "auto")):
        raise invalid_request_error("tool_choice", "the request has no `tools`")
    choice = dump_fields(body.tool_choice)
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": choice["tools"]}}
    return {
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "response_format": build_response_format(body),
        "reasoning": None if body.reasoning is None else body.reasoning.effort,
        "replay": body.replay is not False,
    }


def build_response_format(body: ResponseRequest) -> dict[str, Any] | None:
    """Convert `text.format` to the `response_format` of chat completions."""
    if body.text is None or body.text.format is None:
        return None
    fields: dict[str, Any] = dump_fields(body.text.format)
    format_type = fields.pop("type")
    return {"type": format_type, "json_schema": fields} if format_type == "json_schema" else {"type": format_type}


class ResponseFormatter:
    """Formats a generation as a response, whole or as events."""

    def __init__(
        self,
        body: ResponseRequest,
        generation: Generation,
        store: ResponseStore,
        messages: list[Message],
        salt: str,
    ) -> None:
        self._body = body
        self._generation = generation
        self._store = store
        self._messages = messages
        self._salt = salt
        self._item_builder = OutputItemBuilder()
        self._pending_logprobs: list[dict[str, Any]] = []  # of tokens whose text has not been emitted yet
        self._sequence_number = 0
        self._head = build_response_head(body, generation)

    def add_delta(self, delta: Delta) -> list[ResponseEvent]:
        """Add a delta to the output items and return its events."""
        token, generation = delta.token, self._generation
        if token is not None and token.logprob is not None and generation.is_visible_token(token):
            self._pending_logprobs.append(build_token_logprobs(generation.model, token))
        events: list[ResponseEvent] = []
        for part in delta.parts:
            logprobs: list[dict[str, Any]] = []
            if isinstance(part, TextDelta):
                logprobs, self._pending_logprobs = self._pending_logprobs, []
            events += self._item_builder.add_part(part, logprobs)
        return events

    async def build_response(self) -> dict[str, Any]:
        """Build the whole response."""
        async for _, delta in self._generation.stream_deltas():
            self.add_delta(delta)
        response: dict[str, Any] = self.finish()[-1]["response"]
        return response

    async def stream_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Yield the events of the stream."""
        initial = {**self._head, "status": "in_progress", "output": [], "usage": None}
        for event_type in ("response.created", "response.in_progress"):
            yield self._format_event({"type": event_type, "response": initial})
        async for _, delta in deltas:
            for event in self.add_delta(delta):
                yield self._format_event(event)
        for event in self.finish():
            yield self._format_event(event)

    def finish(self) -> list[ResponseEvent]:
        """Store the response and return the last events. The very last contains the whole response."""
        (chat_response,) = self._generation.get_responses()
        status = "completed" if chat_response.finish_reason in ("stop", "tool_calls") else "incomplete"
        events = list(self._item_builder.finish(status))
        response = {
            **self._head,
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": self._item_builder.items,
            "usage": self._build_usage(build_usage(self._generation)),
        }
        if self._body.store is not False:
            self._store.put(response, [*self._messages, chat_response.message], self._salt)
        return [*events, {"type": f"response.{status}", "response": response}]

    def format_error(self, error: APIError) -> bytes:
        """Format the two events that end a failed stream."""
        response = {
            **self._head,
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
            "output": self._item_builder.items,
            "usage": None,
        }
        fields = {"code": error.code, "message": error.message, "param": error.param}
        events: list[ResponseEvent] = [{"type": "error", **fields}, {"type": "response.failed", "response": response}]
        return b"".join(map(self._format_event, events))

    def _format_event(self, event: ResponseEvent) -> bytes:
        self._sequence_number += 1
        return format_event({**event, "sequence_number": self._sequence_number - 1}, event["type"])

    def _build_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        details = usage["prompt_tokens_details"]
        computed = usage["prompt_tokens"] - details["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**details, "cache_write_tokens": computed},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }


def build_response_head(body: ResponseRequest, generation: Generation) -> dict[str, Any]:
    """Build the fields of a response that are known before generation."""
    format = {"type": "text"} if body.text is None or body.text.format is None else dump_fields(body.text.format)
    optional = {"description": None, "parameters": None, "strict": None}
    head = {
        "id": generate_id("resp"),
        "object": "response",
        "created_at": generation.created,
        "model": generation.model.name,
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
    return head | build_truncation(generation)
