"""Chat completions under llama-server's own path, and the routes that count input tokens."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import APIError
from afterglow.server.generation import start_generation
from afterglow.server.generation_requests import ConversationRequest, build_prompt
from afterglow.server.llamacpp.formatting import STREAM_FORMAT, format_stream_error
from afterglow.server.openai.chat import ChatFormatter, build_generation_request, check_fields
from afterglow.server.openai.schema.chat import ChatRequest
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/chat/completions", summary="llama-server: create a chat completion")
    async def complete_chat(body: ChatRequest, request: Request) -> Response:
        work = create_chat_completion(state, body, get_tenant_salt(request))
        return await state.run_while_connected(request, work, "messages", STREAM_FORMAT if body.stream else None)

    async def count_input_tokens(body: ChatRequest, request: Request) -> Response:
        conversation = build_generation_request(state, body, get_tenant_salt(request))
        return JSONResponse(await count_tokens(state, body.model, conversation))

    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        router.post(path, summary="llama-server: count the tokens of a conversation")(count_input_tokens)

    return router


async def create_chat_completion(state: ServerState, body: ChatRequest, salt: str) -> Response:
    """Generate a chat completion in llama-server's format."""
    check_fields(body)
    generation = await start_generation(state, body.model, build_generation_request(state, body, salt))
    return await generation.respond(LlamaChatFormatter(body, generation), stream=bool(body.stream))


async def count_tokens(state: ServerState, model_name: str | None, request: ConversationRequest) -> dict[str, Any]:
    """Count the tokens of a conversation with its tools and media, without running it."""
    model = await state.get_generating_model(model_name)
    with contextlib.ExitStack() as resources:
        prompt = await build_prompt(state, model_name, model, request, resources)
    return {"object": "response.input_tokens", "input_tokens": prompt.cells}


class LlamaChatFormatter(ChatFormatter):
    """Formats a generation as llama-server does: the first chunk of a stream has no text at all."""

    FIRST_DELTA: ClassVar[dict[str, Any]] = {"role": "assistant", "content": None}

    def format_error(self, error: APIError) -> bytes:
        """Format the error that ends a stream."""
        return format_stream_error(error)
