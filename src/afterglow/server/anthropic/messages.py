"""Routes /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from afterglow.server import limits
from afterglow.server.anthropic.conversion import (
    build_prompt_options,
    convert_conversation,
    convert_tools,
    omits_thinking,
)
from afterglow.server.anthropic.formatting import MessageFormatter
from afterglow.server.anthropic.schema import CountTokensRequest, MessageRequest
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
    generation = await start_generation(
        state,
        body.model,
        ConversationRequest(
            messages=conversation.messages,
            breakpoints=conversation.breakpoints,
            tools=tools,
            prompt_options=build_prompt_options(body, tools, can_reason=model.can_reason),
            sampling_fields=body,
            max_tokens=body.max_tokens,
            stop=limits.parse_stops(body.stop_sequences, state.settings),
            overflow=body.overflow or "refuse",
            salt=salt,
        ),
    )
    formatter = MessageFormatter(generation, max_tokens=body.max_tokens, salt=salt, omit_thinking=omits_thinking(body))
    return await generation.respond(formatter, stream=bool(body.stream))


async def count_tokens(state: ServerState, body: CountTokensRequest, salt: str) -> int:
    """Count the prompt tokens that /v1/messages would report. Nothing is computed by the model."""
    model = await state.get_generating_model(body.model)
    messages, tools = convert_conversation(body, salt).messages, convert_tools(body)
    options = build_prompt_options(body, tools, can_reason=model.can_reason)
    with contextlib.ExitStack() as resources:
        loaded = await load_media(state, model, messages, resources)
        plan = await state.run_text_work(lambda: model.plan_chat(loaded, tools=tools, salt=salt, **options))
    return plan.prompt.cells
