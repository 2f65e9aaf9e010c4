"""Routes /v1/responses: stored responses that can be continued by id."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from afterglow.api.options import PromptOptions
from afterglow.chat.messages import Message, locate_attachments
from afterglow.chat.output.parts import TextDelta
from afterglow.chat.output.response import Delta
from afterglow.chat.prompt import Breakpoint
from afterglow.chat.template.capabilities import reads_variable
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import APIError, invalid_request_error
from afterglow.server.generation import Generation, start_generation
from afterglow.server.generation_requests import ConversationRequest, build_prompt
from afterglow.server.logs import get_record
from afterglow.server.openai.formatting import (
    RunningUsage,
    build_timings,
    build_token_logprobs,
    build_truncation,
    build_usage,
)
from afterglow.server.openai.response_items import (
    InputItemParser,
    OutputItemBuilder,
    OutputItemOptions,
    ResponseEvent,
    dump_input_item,
    generate_id,
)
from afterglow.server.openai.response_store import ResponseStore, StoredResponse
from afterglow.server.openai.response_tools import ResponseToolSet, dump_tools
from afterglow.server.openai.schema.chat import dump_fields
from afterglow.server.openai.schema.responses import (
    INCLUDE_ENCRYPTED_REASONING,
    INCLUDE_LOGPROBS,
    ResponseRequest,
)
from afterglow.server.priority import get_served_tier
from afterglow.server.schema.base import StrictRoute
from afterglow.server.sse import StreamFormat, format_event
from afterglow.server.state import ServerState

RETENTION_SECONDS = {"24h": 24 * 3600.0}
DEFAULT_LISTED_ITEMS, MAX_LISTED_ITEMS = 20, 100


def format_early_error(error: APIError) -> bytes:
    """Format the error of a stream that has no response yet."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return format_event({"type": "error", "sequence_number": 0, **fields}, "error")


STREAM_FORMAT = StreamFormat(format_early_error)


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)
    store = ResponseStore(
        max_responses=state.settings.max_stored_responses, max_bytes=state.settings.max_stored_response_bytes
    )

    async def create(body: ResponseRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request,
            create_response(state, store, body, get_tenant_salt(request)),
            "input",
            STREAM_FORMAT if body.stream else None,
            {"response_format": "text.format"},
        )

    async def count_input_tokens(body: ResponseRequest, request: Request) -> dict[str, Any]:
        return await count_tokens(state, store, body, get_tenant_salt(request))

    for prefix in ("/v1", ""):  # llama-server has both
        router.post(f"{prefix}/responses", summary="Create a response")(create)
        router.post(f"{prefix}/responses/input_tokens", summary="Count the input tokens of a response")(
            count_input_tokens
        )

    @router.get("/v1/responses/{id}", summary="Retrieve a stored response")
    async def retrieve(id: str, request: Request) -> dict[str, Any]:
        return find_response(store, id, get_tenant_salt(request), 404, "id").response

    @router.get("/v1/responses/{id}/input_items", summary="List the input items of a stored response")
    async def list_input_items(
        id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED_ITEMS)] = DEFAULT_LISTED_ITEMS,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        items = find_response(store, id, get_tenant_salt(request), 404, "id").input_items
        return list_items(items if order == "asc" else items[::-1], after, limit)

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


def list_items(items: list[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """Return a page of items: those after the item with the id `after`."""
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid_request_error("after", f"`after` is {after[:80]!r}, which is no input item of this response")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": start + limit < len(items),
    }


async def create_response(state: ServerState, store: ResponseStore, body: ResponseRequest, salt: str) -> Response:
    """Generate a response and return it whole or as a stream."""
    if body.stream_options is not None and not body.stream:
        raise invalid_request_error("stream_options", "`stream_options` requires `stream`")
    tools = ResponseToolSet(body.tools or ())
    conversation = build_conversation(store, body, tools, salt)
    report_vacuous_includes(body)
    request = await build_request(state, body, conversation, tools, salt)
    generation = await start_generation(state, body.model, request)
    formatter = ResponseFormatter(body, generation, store, conversation, tools, salt)
    return await generation.respond(formatter, stream=bool(body.stream))


async def count_tokens(state: ServerState, store: ResponseStore, body: ResponseRequest, salt: str) -> dict[str, Any]:
    """Count the tokens of the prompt of a response, without running it."""
    tools = ResponseToolSet(body.tools or ())
    request = await build_request(state, body, build_conversation(store, body, tools, salt), tools, salt)
    model = await state.get_generating_model(body.model)
    with contextlib.ExitStack() as resources:
        prompt = await build_prompt(state, body.model, model, request, resources)
    return {"object": "response.input_tokens", "input_tokens": prompt.cells}


async def build_request(
    state: ServerState, body: ResponseRequest, conversation: ResponseConversation, tools: ResponseToolSet, salt: str
) -> ConversationRequest:
    """Convert a body with its conversation to a generation request."""
    if not conversation.messages:
        raise invalid_request_error("input", "`input` must not be empty")
    variables = await build_template_variables(state, body)
    return build_generation_request(body, conversation.messages, tools, variables, salt)


@dataclass(frozen=True, slots=True)
class ResponseConversation:
    """Conversation of a request without the instructions: as messages and as stored items."""

    messages: list[Message]
    items: list[dict[str, Any]]


def build_conversation(
    store: ResponseStore, body: ResponseRequest, tools: ResponseToolSet, salt: str
) -> ResponseConversation:
    """Return the conversation of the previous response, if any, and the input."""
    messages: list[Message] = []
    items: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        previous = find_response(store, body.previous_response_id, salt, 400, "previous_response_id")
        messages = [locate_attachments(message, "previous_response_id") for message in previous.messages]
        items = previous.items
    parser = InputItemParser(tools, salt, lambda id: store.find_item(id, salt))
    input_items = parser.resolve_references(body.input)
    return ResponseConversation(
        [*messages, *parser.build_messages(input_items)], [*items, *map(dump_input_item, input_items)]
    )


def report_vacuous_includes(body: ResponseRequest) -> None:
    """Report values of `include` that are about items which no response here has."""
    for value in body.include or ():
        if value not in (INCLUDE_LOGPROBS, INCLUDE_ENCRYPTED_REASONING):
            if get_record().refuses_hints:
                raise invalid_request_error("include", f"`include` has {value!r}, which has no effect here")
            get_record().add_ignored(f"include ({value})")


async def build_template_variables(state: ServerState, body: ResponseRequest) -> dict[str, Any]:
    """Return variables of the chat template. Those that the template does not read are reported."""
    if body.text is None or body.text.verbosity is None:
        return {}
    model = await state.get_generating_model(body.model)
    if reads_variable(model.chat_template or "", "verbosity"):
        return {"verbosity": body.text.verbosity}
    if body.text.verbosity != "medium":
        if get_record().refuses_hints:
            raise invalid_request_error("text.verbosity", "`text.verbosity` has no effect with this chat template")
        get_record().add_ignored("text.verbosity")
    return {}


def build_generation_request(
    body: ResponseRequest, messages: list[Message], tools: ResponseToolSet, variables: dict[str, Any], salt: str
) -> ConversationRequest:
    """Convert the body to a generation request."""
    system = [Message(role="system", content=body.instructions)] if body.instructions else []
    include_logprobs = body.top_logprobs is not None or INCLUDE_LOGPROBS in (body.include or ())
    return ConversationRequest(
        messages=[*system, *messages],
        tools=tools.tools,
        prompt_options={**build_prompt_options(body, tools), "chat_template_kwargs": variables},
        sampling_fields=body,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if include_logprobs else None,
        overflow=body.overflow or ("shift" if body.truncation == "auto" else "refuse"),
        breakpoints=build_breakpoints(body, len(system) + len(messages)),
        salt=salt,
        service_tier=body.service_tier,
    )


def build_breakpoints(body: ResponseRequest, message_count: int) -> list[Breakpoint]:
    """Return the position to pin: `prompt_cache_retention` keeps the prompt for a time after its last use."""
    seconds = RETENTION_SECONDS.get(body.prompt_cache_retention or "")
    return [] if seconds is None else [Breakpoint(message=message_count - 1, retention_seconds=seconds)]


def build_prompt_options(body: ResponseRequest, tools: ResponseToolSet) -> PromptOptions:
    """Build the keyword arguments of `Model.plan_chat`, except `tools`."""
    choice = tools.build_choice(body.tool_choice)
    if not tools.tools and (choice not in (None, "none", "auto")):
        raise invalid_request_error("tool_choice", "the request has no `tools`")
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
        conversation: ResponseConversation,
        tools: ResponseToolSet,
        salt: str,
    ) -> None:
        self._body = body
        self._generation = generation
        self._store = store
        self._conversation = conversation
        self._salt = salt
        self._item_builder = OutputItemBuilder(
            OutputItemOptions(
                tools=tools,
                salt=salt,
                has_summary=get_summary_mode(body) is not None,
                has_encrypted_reasoning=INCLUDE_ENCRYPTED_REASONING in (body.include or ()),
            )
        )
        self._pending_logprobs: list[dict[str, Any]] = []  # of tokens whose text has not been emitted yet
        self._sequence_number = 0
        self._head = build_response_head(body, generation, tools)

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
        usage = RunningUsage()
        async for _, delta in deltas:
            is_progress = delta.progress is not None or (delta.token is not None and usage.is_prefill)
            usage.add_delta(delta)
            if self._body.return_progress and is_progress and (progress := usage.build_progress()):
                yield self._format_event({"type": "response.in_progress", "response": initial, **progress})
            timings = usage.build_timings() if self._body.timings_per_token else {}
            for event in self.add_delta(delta):
                yield self._format_event({**event, **timings})
        *events, end = self.finish()
        for event in events:
            yield self._format_event(event)
        timings = {"timings": build_timings(self._generation.get_responses()[0].usage)}
        yield self._format_event({**end, **timings} if self._body.timings_per_token else end)

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
            messages = [*self._conversation.messages, chat_response.message]
            self._store.put(response, messages, self._salt, self._conversation.items)
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


def get_summary_mode(body: ResponseRequest) -> str | None:
    """Return the requested kind of summary of the reasoning."""
    return None if body.reasoning is None else body.reasoning.summary or body.reasoning.generate_summary


def build_response_head(body: ResponseRequest, generation: Generation, tools: ResponseToolSet) -> dict[str, Any]:
    """Build the fields of a response that are known before generation."""
    format = {"type": "text"} if body.text is None or body.text.format is None else dump_fields(body.text.format)
    verbosity = {} if body.text is None or body.text.verbosity is None else {"verbosity": body.text.verbosity}
    sampling = generation.prompts[0].request.sampling
    head = {
        "id": generate_id("resp"),
        "object": "response",
        "created_at": generation.created,
        "model": generation.model_name,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning else None,
            "summary": get_summary_mode(body),
        },
        "service_tier": get_served_tier(body.service_tier),
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": format, **verbosity},
        "tool_choice": dump_fields(body.tool_choice) or "auto",
        "tools": dump_tools(tools.offered),
        "top_logprobs": body.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "safety_identifier": body.safety_identifier,
        "max_tool_calls": body.max_tool_calls,
        "system_fingerprint": generation.model.fingerprint,
    }
    return head | build_truncation(generation)
