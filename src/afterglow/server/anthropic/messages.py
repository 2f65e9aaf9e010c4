"""Routes /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from afterglow.api.model import Model
from afterglow.chat.prompt import ChatPrompt
from afterglow.server import limits
from afterglow.server.anthropic.conversion import (
    build_prompt_options,
    convert_conversation,
    convert_tools,
    omits_thinking,
)
from afterglow.server.anthropic.diagnostics import diagnose
from afterglow.server.anthropic.formatting import MessageFormatter, format_ping
from afterglow.server.anthropic.schema import CountTokensRequest, MessagePromptFields, MessageRequest
from afterglow.server.auth import get_tenant_salt
from afterglow.server.generation import ConversationRequest, start_generation
from afterglow.server.media import load_media
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
            request, create_message(state, body, get_tenant_salt(request)), "messages"
        )

    @router.post("/v1/messages/count_tokens", summary="Count the prompt tokens of a message")
    async def count(body: CountTokensRequest, request: Request) -> TokenCount:
        return TokenCount(input_tokens=await count_tokens(state, body, get_tenant_salt(request)))

    return router


async def create_message(state: ServerState, body: MessageRequest, salt: str) -> Response:
    """Generate a message and return it whole or as a stream."""
    model = await state.get_generating_model(body.model)
    conversation, tools = convert_conversation(body, salt), convert_tools(body)
    request = ConversationRequest(
        messages=conversation.messages,
        breakpoints=conversation.breakpoints,
        tools=tools,
        prompt_options=build_prompt_options(body, tools, can_reason=model.can_reason),
        sampling_fields=body,
        max_tokens=body.max_tokens,
        stop=limits.parse_stops(body.stop_sequences, state.settings),
        overflow=body.overflow or "refuse",
        salt=salt,
    )
    diagnostics = None
    if body.diagnostics is not None and body.diagnostics.previous_message_id is not None:
        prompt = await build_prompt(state, model, body, salt)  # what is cached is compared before it changes
        diagnostics = await state.run_engine_call(lambda: diagnose(model, prompt, salt))
    generation = await start_generation(state, body.model, request)
    formatter = MessageFormatter(
        generation,
        max_tokens=body.max_tokens,
        salt=salt,
        omit_thinking=omits_thinking(body),
        diagnostics=diagnostics,
    )
    return await generation.respond(formatter, stream=bool(body.stream), format_ping=format_ping)


async def count_tokens(state: ServerState, body: CountTokensRequest, salt: str) -> int:
    """Count the prompt tokens that /v1/messages would report. Nothing is computed by the model."""
    model = await state.get_generating_model(body.model)
    return (await build_prompt(state, model, body, salt)).cells


async def build_prompt(state: ServerState, model: Model, body: MessagePromptFields, salt: str) -> ChatPrompt:
    """Render the prompt of a body."""
    messages, tools = convert_conversation(body, salt).messages, convert_tools(body)
    options = build_prompt_options(body, tools, can_reason=model.can_reason)
    with contextlib.ExitStack() as resources:
        loaded = await load_media(state, model, messages, resources)
        plan = await state.run_text_work(lambda: model.plan_chat(loaded, tools=tools, salt=salt, **options))
    return plan.prompt
