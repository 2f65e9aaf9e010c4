"""Route /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.response import ChatResponse, Delta
from afterglow.server import limits
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import invalid_request_error
from afterglow.server.generation import (
    Generation,
    GenerationRequest,
    build_token_logprobs,
    build_usage,
    start_generation,
)
from afterglow.server.schema.base import StrictRoute
from afterglow.server.schema.chat import ChatFields, ChatRequest, dump_fields, dump_message
from afterglow.server.sse import DONE_EVENT, EventTemplate, stream_response
from afterglow.server.state import ServerState

FINISH_REASONS = {"deadline": "length"}  # OpenAI has no such reason; `stop_reason` reports it


def build_router(state: ServerState) -> APIRouter:
    """Return the router of this route."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", summary="Create a chat completion")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request, create_chat_completion(state, body, get_tenant_salt(request)), "messages"
        )

    return router


async def create_chat_completion(state: ServerState, body: ChatRequest, salt: str) -> Response:
    """Generate a chat completion and return it whole or as a stream."""
    check_fields(body)
    generation = await start_generation(state, body.model, build_generation_request(state, body, salt))
    formatter = ChatFormatter(body, generation)
    if not body.stream:
        try:
            return JSONResponse(formatter.build_response(await generation.collect_responses()))
        finally:
            generation.close()
    return await stream_response(
        generation.stream_deltas(),
        formatter.stream_events,
        ping_seconds=state.settings.ping_seconds,
        on_close=generation.close,
    )


def check_fields(body: ChatRequest) -> None:
    """Reject combinations of fields that exclude each other."""
    if body.stream_options is not None and not body.stream:
        raise invalid_request_error("stream_options", "`stream_options` requires `stream`")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_request_error("top_logprobs", "`top_logprobs` requires `logprobs`")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid_request_error(
            "max_tokens", "`max_tokens` is the old name of `max_completion_tokens`: set only one of them"
        )


def build_generation_request(state: ServerState, body: ChatRequest, salt: str) -> GenerationRequest:
    """Convert the body to a generation request."""
    return GenerationRequest(
        messages=[dump_message(message) for message in body.messages],
        chat_options=build_chat_options(body),
        sampling_fields=body,
        n=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stop=limits.parse_stops(body.stop, state.settings),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        overflow=body.overflow or "refuse",
        salt=salt,
    )


def build_chat_options(body: ChatFields) -> dict[str, Any]:
    """Build the keyword arguments of `TextModel.plan_chat`."""
    if body.reasoning_effort is not None and body.reasoning_budget is not None:
        raise invalid_request_error(
            "reasoning_budget", "`reasoning_budget` and `reasoning_effort` exclude each other: set only one of them"
        )
    if body.tools is None and (body.tool_choice is not None or body.parallel_tool_calls is not None):
        raise invalid_request_error(
            "tool_choice" if body.tool_choice else "parallel_tool_calls", "the request has no `tools`"
        )
    reasoning = body.reasoning_effort if body.reasoning_budget is None else body.reasoning_budget
    return {
        "tools": [dump_fields(tool) for tool in body.tools or ()],
        "tool_choice": dump_fields(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "response_format": dump_fields(body.response_format),
        "reasoning": reasoning,
        "chat_template_kwargs": body.chat_template_kwargs,
    }


class ChatFormatter:
    """Formats a generation as a chat completion, whole or in chunks."""

    def __init__(self, body: ChatRequest, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": generation.created,
            "model": generation.model.name,
            "system_fingerprint": generation.model.fingerprint,
            "service_tier": "default",
        }
        self._chunk_template = EventTemplate({**self._head, "object": "chat.completion.chunk"})

    def build_response(self, responses: list[ChatResponse]) -> dict[str, Any]:
        """Build the whole chat completion."""
        completion: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._build_choice(index, response) for index, response in enumerate(responses)],
            "usage": build_usage(responses, self._generation.reasoning_counters),
        }
        if self._body.metadata is not None:
            completion["metadata"] = self._body.metadata
        return completion | self._build_truncation()

    async def stream_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Yield the events of the stream."""
        for index in range(self._body.n or 1):
            yield self._format_chunk(index, {"role": "assistant", "content": ""}, extra=self._build_truncation())
        async for index, delta in deltas:
            logprobs = self._build_logprobs([delta.token] if delta.token else [])
            if delta.parts or (logprobs and logprobs["content"]):
                yield self._format_chunk(index, build_delta(delta.parts), logprobs=logprobs)
        responses = self._generation.get_responses()
        for index, response in enumerate(responses):
            yield self._format_chunk(index, {}, **build_finish(response))
        if self._include_usage:
            usage = build_usage(responses, self._generation.reasoning_counters)
            yield self._chunk_template.format({"choices": [], "usage": usage})
        yield DONE_EVENT

    def _build_choice(self, index: int, response: ChatResponse) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": response.text, "refusal": None}
        if response.reasoning:
            message["reasoning_content"] = response.reasoning
        if response.tool_calls:
            message["content"] = response.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in response.tool_calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._build_logprobs(response.tokens),
            **build_finish(response),
        }

    def _format_chunk(
        self, index: int, delta: dict[str, Any], *, extra: dict[str, Any] | None = None, **choice: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
        fields = {"choices": [choice], **(extra or {})}
        return self._chunk_template.format({**fields, "usage": None} if self._include_usage else fields)

    def _build_logprobs(self, tokens: Sequence[Any]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        model, is_visible = self._generation.model, self._generation.is_visible_token
        content = [build_token_logprobs(model, token) for token in tokens if is_visible(token)]
        return {"content": content, "refusal": None}

    def _build_truncation(self) -> dict[str, Any]:
        truncation = self._generation.truncation
        return {} if truncation is None else {"overflow": truncation.report}


def build_finish(response: ChatResponse) -> dict[str, Any]:
    """Build OpenAI's `finish_reason` and the extension `stop_reason`."""
    stop_reason = response.stop_reason if isinstance(response.stop_reason, str) else None
    return {
        "finish_reason": FINISH_REASONS.get(response.finish_reason, response.finish_reason),
        "stop_reason": "deadline" if response.finish_reason == "deadline" else stop_reason,
    }


def build_delta(parts: Sequence[OutputPart]) -> dict[str, Any]:
    """Build the delta of a chunk from output parts."""
    delta: dict[str, Any] = {}
    for part in parts:
        match part:
            case TextDelta(text):
                delta["content"] = delta.get("content", "") + text
            case ReasoningDelta(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case ToolCallDelta():
                delta.setdefault("tool_calls", []).append(build_call_delta(part))
    return delta


def build_call_delta(part: ToolCallDelta) -> dict[str, Any]:
    """Build the delta of a tool call. The first delta of a call has its id and name."""
    delta: dict[str, Any] = {"index": part.index, "function": {"arguments": part.arguments}}
    if part.id is not None:
        delta |= {"id": part.id, "type": "function"}
    if part.name is not None:
        delta["function"]["name"] = part.name
    return delta
