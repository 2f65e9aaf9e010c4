"""Routes /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from afterglow.api.model import Model
from afterglow.server import limits
from afterglow.server.adapters import build_lora
from afterglow.server.anthropic.conversion import (
    build_prompt_options,
    convert_conversation,
    convert_tools,
    omits_thinking,
)
from afterglow.server.anthropic.diagnostics import diagnose
from afterglow.server.anthropic.formatting import STREAM_FORMAT, MessageFormatter, format_ping
from afterglow.server.anthropic.schema import CountTokensRequest, MessagePromptFields, MessageRequest
from afterglow.server.auth import get_tenant_salt
from afterglow.server.generation import start_generation
from afterglow.server.generation_requests import ConversationRequest, build_prompt
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState


class TokenCount(BaseModel):
    """Number of prompt tokens of a request."""

    input_tokens: int


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/messages", summary="Create a message")
    async def create(body: MessageRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request,
            create_message(state, body, get_tenant_salt(request)),
            "messages",
            STREAM_FORMAT if body.stream else None,
        )

    @router.post("/v1/messages/count_tokens", summary="Count the prompt tokens of a message")
    async def count(body: CountTokensRequest, request: Request) -> TokenCount:
        return TokenCount(input_tokens=await count_tokens(state, body, get_tenant_salt(request)))

    return router


async def create_message(state: ServerState, body: MessageRequest, salt: str) -> Response:
    """Generate a message and return it whole or as a stream."""
    model = await state.get_generating_model(body.model)
    request = replace(
        build_conversation_request(body, model, salt),
        max_tokens=body.max_tokens,
        stop=limits.parse_stops(body.stop_sequences, state.settings),
        overflow=body.overflow or "refuse",
    )
    omit_thinking = omits_thinking(body)
    diagnostics = None
    if body.diagnostics is not None and body.diagnostics.previous_message_id is not None:
        with contextlib.ExitStack() as resources:  # what is cached is compared before it changes
            prompt = await build_prompt(state, body.model, model, request, resources)
        lora = build_lora(state.models, model, body.model, body.lora)
        diagnostics = await state.run_engine_call(model.name, lambda: diagnose(model, prompt, salt, lora))
    generation = await start_generation(state, body.model, request)
    formatter = MessageFormatter(
        generation,
        max_tokens=body.max_tokens,
        salt=salt,
        omit_thinking=omit_thinking,
        diagnostics=diagnostics,
    )
    return await generation.respond(formatter, stream=bool(body.stream), format_ping=format_ping)


async def count_tokens(state: ServerState, body: CountTokensRequest, salt: str) -> int:
    """Count the prompt tokens that /v1/messages would report. Nothing is computed by the model."""
    model = await state.get_generating_model(body.model)
    with contextlib.ExitStack() as resources:
        request = build_conversation_request(body, model, salt)
        return (await build_prompt(state, body.model, model, request, resources)).cells


def build_conversation_request(body: MessagePromptFields, model: Model, salt: str) -> ConversationRequest:
    """Convert the fields that determine the prompt."""
    conversation, tools = convert_conversation(body, salt), convert_tools(body)
    return ConversationRequest(
        messages=conversation.messages,
        breakpoints=conversation.breakpoints,
        tools=tools,
        prompt_options=build_prompt_options(body, tools, can_reason=model.can_reason),
        sampling_fields=body,
        salt=salt,
    )
