"""Route /v1/chat/completions."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from afterglow.api.options import PromptOptions
from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.output.response import ChatResponse, Delta
from afterglow.server import limits
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import invalid_request_error
from afterglow.server.generation import Generation, start_generation
from afterglow.server.generation_requests import ConversationRequest
from afterglow.server.openai.formatting import (
    STREAM_FORMAT,
    ChunkFormatter,
    build_finish,
    build_timings,
    build_token_logprobs,
    build_truncation,
    build_usage,
    build_verbose,
    build_violations,
)
from afterglow.server.openai.schema.chat import (
    ChatFields,
    ChatRequest,
    OpenRouterReasoning,
    Thinking,
    build_messages,
    build_tools,
    dump_fields,
)
from afterglow.server.openai.schema.foreign import build_response_format, find_format_field
from afterglow.server.priority import get_served_tier
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState


def build_router(state: ServerState) -> APIRouter:
    """Return the router of this route."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", summary="Create a chat completion")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request,
            create_chat_completion(state, body, get_tenant_salt(request)),
            "messages",
            STREAM_FORMAT if body.stream else None,
            {"response_format": find_format_field(body)},
        )

    return router


async def create_chat_completion(state: ServerState, body: ChatRequest, salt: str) -> Response:
    """Generate a chat completion and return it whole or as a stream."""
    check_fields(body)
    generation = await start_generation(state, body.model, build_generation_request(state, body, salt))
    return await generation.respond(ChatFormatter(body, generation), stream=bool(body.stream))


def check_fields(body: ChatRequest) -> None:
    """Reject combinations of fields that exclude each other."""
    if body.stream_options is not None and not body.stream:
        raise invalid_request_error("stream_options", "`stream_options` requires `stream`")
    if body.top_logprobs and not body.logprobs:
        raise invalid_request_error("top_logprobs", "`top_logprobs` requires `logprobs`")


def build_generation_request(state: ServerState, body: ChatRequest, salt: str) -> ConversationRequest:
    """Convert the body to a generation request."""
    return ConversationRequest(
        messages=build_messages(body.messages),
        tools=build_tools(body.tools),
        prompt_options={**build_prompt_options(body), "response_format": build_response_format(body)},
        reasoning_field=find_reasoning_field(body),
        sampling_fields=body,
        n=body.n or 1,
        max_tokens=body.max_tokens,
        stop=limits.parse_stops(body.stop, state.settings),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        overflow=body.overflow or "refuse",
        salt=salt,
        service_tier=body.service_tier,
        keep_alive=body.keep_alive,
    )


def build_prompt_options(body: ChatFields) -> PromptOptions:
    """Build the keyword arguments of `Model.plan_chat`, except `tools` and `response_format`."""
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise invalid_request_error("tool_choice", "the request has no `tools`")
    check_continuation(body)
    return {
        "tool_choice": dump_fields(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": next(iter(list_reasoning_values(body).values()), None),
        "chat_template_kwargs": body.chat_template_kwargs,
        "replay": body.replay is not False,
    }


def check_continuation(body: ChatFields) -> None:
    """Reject fields that contradict how prompts end: a last assistant message is continued, others begin an answer."""
    if body.continue_final_message and body.add_generation_prompt:
        message = "`continue_final_message` and `add_generation_prompt` exclude each other"
        raise invalid_request_error("continue_final_message", message)
    is_continued = len(body.messages or ()) > 1 and body.messages[-1].role == "assistant"
    if body.continue_final_message is not None and body.continue_final_message != is_continued:
        reason = "the last message is of the assistant" if is_continued else "the last message is not of the assistant"
        raise invalid_request_error(
            "continue_final_message", f"`continue_final_message` must be {str(is_continued).lower()}: {reason}"
        )
    if body.add_generation_prompt is False and not is_continued:
        raise invalid_request_error(
            "add_generation_prompt", "`add_generation_prompt` must be true: the last message is not of the assistant"
        )


def list_reasoning_values(body: ChatFields) -> dict[str, bool | int | str]:
    """Return the value of each reasoning field that is set. Raises an error if two of them differ."""
    thinking, reasoning = body.thinking, body.reasoning or OpenRouterReasoning.model_validate({})
    fields: dict[str, bool | int | str | None] = {
        "reasoning_effort": body.reasoning_effort,
        "reasoning_budget": body.reasoning_budget if body.reasoning_budget != -1 else True,
        "enable_thinking": body.enable_thinking,
        "think": body.think,
        "thinking": None if thinking is None else parse_thinking(thinking),
        "reasoning.effort": reasoning.effort,
        "reasoning.max_tokens": reasoning.max_tokens,
        "reasoning.enabled": reasoning.enabled,
    }
    values = {name: value for name, value in fields.items() if value is not None}
    for (first, value), (second, other) in itertools.combinations(values.items(), 2):
        if are_contradictory(value, other):
            raise invalid_request_error(second, f"`{first}` and `{second}` exclude each other: set only one of them")
    return {name: value for name, value in values.items() if value is not True} or values


def are_contradictory(one: bool | int | str, other: bool | int | str) -> bool:
    """Whether two values ask for different reasoning. True adds nothing to how much.

    >>> are_contradictory(True, "low"), are_contradictory(True, "none"), are_contradictory("low", 100)
    (False, True, True)
    """
    is_off, is_other_off = one in ("none", False), other in ("none", False)  # 0 equals False
    return is_off != is_other_off or (not is_off and True not in (one, other) and one != other)


def parse_thinking(thinking: Thinking) -> bool | int | None:
    """Return whether to reason, or the budget; None if the model decides."""
    if thinking.type == "disabled":
        return False
    return (
        thinking.budget_tokens if thinking.budget_tokens is not None else True if thinking.type == "enabled" else None
    )


def find_reasoning_field(body: ChatFields) -> str:
    """Return the name of the field that asks for reasoning."""
    return next(iter(list_reasoning_values(body)), "reasoning_effort")


class ChatFormatter(ChunkFormatter):
    """Formats a generation as a chat completion, whole or in chunks."""

    FIRST_DELTA: ClassVar[dict[str, Any]] = {"role": "assistant", "content": ""}

    def __init__(self, body: ChatRequest, generation: Generation) -> None:
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "service_tier": get_served_tier(body.service_tier)}
        super().__init__(generation, head, "chat.completion.chunk", body, choices=body.n or 1)
        self._body = body

    async def build_response(self) -> dict[str, Any]:
        """Build the whole chat completion."""
        responses = await self._generation.collect_responses()
        completion: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._build_choice(index, response) for index, response in enumerate(responses)],
            "usage": build_usage(self._generation),
            "timings": build_timings(responses[0].usage),
        }
        if self._body.metadata is not None:
            completion["metadata"] = self._body.metadata
        return completion | build_truncation(self._generation) | build_verbose(self._generation, self._body)

    async def stream_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Yield the events of the stream."""
        truncation, choices = build_truncation(self._generation), range(self._body.n or 1)
        for index in choices:
            yield self._format_chunk(index, {"delta": self.FIRST_DELTA}, extra=truncation)
        is_plain = not self._has_extensions and not self._body.logprobs
        text_formatters = [self._build_text_formatter(index, build_text_delta) for index in choices]
        async for index, delta in deltas:
            if is_plain and len(delta.parts) == 1 and isinstance(part := delta.parts[0], TextDelta):
                yield text_formatters[index](part.text)
                continue
            extra = self._build_extra(index, delta)
            if "prompt_progress" in extra:
                yield self._format_chunk(index, {"delta": {}}, extra=extra)
            logprobs = self._build_logprobs([delta.token] if delta.token else [])
            if delta.parts or (logprobs and logprobs["content"]):
                extra.pop("prompt_progress", None)
                yield self._format_chunk(index, {"delta": build_delta(delta.parts)}, logprobs=logprobs, extra=extra)
        for event in self._format_end({"delta": {}}):
            yield event

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
            **build_violations(self._generation, response),
        }

    def _build_logprobs(self, tokens: Sequence[Any]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        model, is_visible = self._generation.model, self._generation.is_visible_token
        content = [build_token_logprobs(model, token) for token in tokens if is_visible(token)]
        return {"content": content, "refusal": None}


def build_text_delta(text: str) -> dict[str, Any]:
    """Build the content of a chunk with visible text only."""
    return {"delta": {"content": text}}


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
