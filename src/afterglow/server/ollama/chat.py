"""Route /api/chat."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.server.auth import get_tenant_salt
from afterglow.server.generation import start_generation
from afterglow.server.generation_requests import ConversationRequest
from afterglow.server.ollama import conversion
from afterglow.server.ollama.details import format_time
from afterglow.server.ollama.formatting import ChatLineFormatter, LineStreamResponse
from afterglow.server.ollama.library import ModelLibrary
from afterglow.server.ollama.schema import OllamaChatRequest, OllamaGenerationBody
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState

EMPTY_MESSAGE = {"role": "assistant", "content": ""}


def build_router(state: ServerState) -> APIRouter:
    """Return the router of this route."""
    router = APIRouter(route_class=StrictRoute)
    library = ModelLibrary(state)

    @router.post("/api/chat", summary="Ollama: continue a conversation")
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        work = create_chat(state, library, body, get_tenant_salt(request))
        return await state.run_while_connected(request, work, "messages", other_fields=conversion.FORMAT_FIELDS)

    return router


async def create_chat(state: ServerState, library: ModelLibrary, body: OllamaChatRequest, salt: str) -> Response:
    """Generate the next message of a conversation."""
    if not body.messages:
        return await load_or_unload(state, library, body, {"message": EMPTY_MESSAGE})
    num_ctx = body.options.num_ctx if body.options else None
    opened = await library.open(body.model, num_ctx=num_ctx)
    options = conversion.merge_options(opened.created, body.options, opened.defaults)
    request = ConversationRequest(
        messages=conversion.build_messages(body.messages),
        defaults=conversion.build_defaults(opened.created, opened.defaults),
        tools=conversion.build_tools(body.tools),
        prompt_options={**conversion.build_prompt_options(body, opened.created), "tool_choice": body.tool_choice},
        reasoning_field="think",
        overflow=conversion.get_overflow(body, options),
        **conversion.build_generation_fields(state, body, options, opened.model, salt),
    )
    generation = await start_generation(state, opened.slot_name, request)
    formatter = ChatLineFormatter(opened, generation, logprobs=bool(body.logprobs))
    return await generation.respond(formatter, stream=body.stream is not False, build_stream=LineStreamResponse)


async def load_or_unload(
    state: ServerState, library: ModelLibrary, body: OllamaGenerationBody, content: dict[str, Any]
) -> Response:
    """Respond to a request without a prompt: load the model, or unload it if `keep_alive` is 0."""
    name = library.get_name(body.model)
    if body.keep_alive == 0:
        found = await state.run_text_work(lambda: library.find(library.split_adapters(name)[0]))
        if found.slot is not None:
            await state.run_engine_call(found.slot.name, found.slot.unload)
        reason = "unload"
    else:
        num_ctx = body.options.num_ctx if body.options else None
        await library.open(name, num_ctx=num_ctx, keep_alive=body.keep_alive)
        reason = "load"
    head = {"model": name, "created_at": format_time()}
    return JSONResponse({**head, **content, "done": True, "done_reason": reason})
