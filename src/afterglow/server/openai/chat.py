"""/v1/chat/completions."""

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

FINISH_REASONS = {"deadline": "length"}  # OpenAI has no word for it; `stop_reason` says it


def build_router(state: ServerState) -> APIRouter:
    """The route, for an application."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request, create_chat_completion(state, body, get_tenant_salt(request)), "messages"
        )

    return router


async def create_chat_completion(state: ServerState, body: ChatRequest, salt: str) -> Response:
    """Answer a conversation, whole or as it comes."""
    check_fields(body)
    running = await start_generation(state, body.model, build_generation_request(state, body, salt))
    page = ChatFormatter(body, running)
    if not body.stream:
        try:
            return JSONResponse(page.build_response(await running.collect_responses()))
        finally:
            running.close()
    return await stream_response(
        running.stream_deltas(), page.stream_events, ping_seconds=state.settings.ping_seconds, on_close=running.close
    )


def check_fields(body: ChatRequest) -> None:
    """What fields have to do with each other."""
    if body.stream_options is not None and not body.stream:
        raise invalid_request_error("stream_options", "`stream_options` is for streams: set `stream`")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_request_error("top_logprobs", "`top_logprobs` needs `logprobs`")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid_request_error(
            "max_tokens", "`max_tokens` is the old name of `max_completion_tokens`: give one of them"
        )


def build_generation_request(state: ServerState, body: ChatRequest, salt: str) -> GenerationRequest:
    """What the library is asked for."""
    return GenerationRequest(
        messages=[dump_message(one) for one in body.messages],
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
    """What makes the prompt and what leads the answer, as `Answering.plan` has it."""
    if body.reasoning_effort is not None and body.reasoning_budget is not None:
        raise invalid_request_error(
            "reasoning_budget", "`reasoning_budget` and `reasoning_effort` say the same: give one of them"
        )
    if body.tools is None and (body.tool_choice is not None or body.parallel_tool_calls is not None):
        raise invalid_request_error(
            "tool_choice" if body.tool_choice else "parallel_tool_calls", "there are no `tools` to call"
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
    """An answer as OpenAI writes it, whole or in chunks."""

    def __init__(self, body: ChatRequest, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": generation.created,
            "model": body.model,
            "system_fingerprint": generation.model.fingerprint,
            "service_tier": "default",
        }
        self._chunk_template = EventTemplate({**self._head, "object": "chat.completion.chunk"})

    def build_response(self, responses: list[ChatResponse]) -> dict[str, Any]:
        """The answer at once."""
        written: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._build_choice(index, turn) for index, turn in enumerate(responses)],
            "usage": build_usage(responses, self._generation.reasoning_counters),
        }
        if self._body.metadata is not None:
            written["metadata"] = self._body.metadata
        return written | self._build_truncation()

    async def stream_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """The answer as it comes."""
        for index in range(self._body.n or 1):
            yield self._format_chunk(index, {"role": "assistant", "content": ""}, extra=self._build_truncation())
        async for index, delta in deltas:
            logprobs = self._build_logprobs([delta.token] if delta.token else [])
            if delta.parts or (logprobs and logprobs["content"]):
                yield self._format_chunk(index, build_delta(delta.parts), logprobs=logprobs)
        turns = self._generation.get_responses()
        for index, turn in enumerate(turns):
            yield self._format_chunk(index, {}, **build_finish(turn))
        if self._include_usage:
            yield self._chunk_template.format(
                {"choices": [], "usage": build_usage(turns, self._generation.reasoning_counters)}
            )
        yield DONE_EVENT

    def _build_choice(self, index: int, response: ChatResponse) -> dict[str, Any]:
        written: dict[str, Any] = {"role": "assistant", "content": response.text, "refusal": None}
        if response.reasoning:
            written["reasoning_content"] = response.reasoning
        if response.tool_calls:
            written["content"] = response.text or None
            written["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in response.tool_calls
            ]
        return {
            "index": index,
            "message": written,
            "logprobs": self._build_logprobs(response.tokens),
            **build_finish(response),
        }

    def _format_chunk(
        self, index: int, delta: dict[str, Any], *, extra: dict[str, Any] | None = None, **choice: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
        rest = {"choices": [choice], **(extra or {})}
        return self._chunk_template.format({**rest, "usage": None} if self._include_usage else rest)

    def _build_logprobs(self, tokens: Sequence[Any]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        running = self._generation
        shown = [build_token_logprobs(running.model, token) for token in tokens if running.is_visible_token(token)]
        return {"content": shown, "refusal": None}

    def _build_truncation(self) -> dict[str, Any]:
        cut = self._generation.truncation
        return {} if cut is None else {"overflow": cut.report}


def build_finish(response: ChatResponse) -> dict[str, Any]:
    """Why an answer ended: OpenAI's word, and ours beside it."""
    reason = (
        "deadline"
        if response.finish_reason == "deadline"
        else response.stop_reason
        if isinstance(response.stop_reason, str)
        else None
    )
    return {"finish_reason": FINISH_REASONS.get(response.finish_reason, response.finish_reason), "stop_reason": reason}


def build_delta(parts: Sequence[OutputPart]) -> dict[str, Any]:
    """Parts of an answer as OpenAI's delta."""
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
    """A piece of a call; the first has its id and name."""
    written: dict[str, Any] = {"index": part.index, "function": {"arguments": part.arguments}}
    if part.id is not None:
        written |= {"id": part.id, "type": "function"}
    if part.name is not None:
        written["function"]["name"] = part.name
    return written
