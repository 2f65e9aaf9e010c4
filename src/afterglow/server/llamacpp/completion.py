"""Routes /completion, /completions and /infill."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from afterglow.api.model import Model
from afterglow.server.auth import get_tenant_salt
from afterglow.server.generation import start_generation
from afterglow.server.llamacpp import conversion
from afterglow.server.llamacpp.formatting import STREAM_FORMAT, LlamaCompletionFormatter
from afterglow.server.llamacpp.infill import build_infill_prompt
from afterglow.server.llamacpp.prompts import list_prompts, tokenize_prompt
from afterglow.server.llamacpp.schema import LlamaCompletionRequest, LlamaGenerationFields, LlamaInfillRequest
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)

    async def complete(body: LlamaCompletionRequest, request: Request) -> Response:
        def tokenize(model: Model) -> list[list[int]]:
            return [tokenize_prompt(model, prompt) for prompt in list_prompts(body.prompt)]

        return await run(state, body, request, tokenize)

    for path in ("/completion", "/completions"):
        router.post(path, summary="llama-server: complete prompts")(complete)

    @router.post("/infill", summary="llama-server: generate the text between a prefix and a suffix")
    async def infill(body: LlamaInfillRequest, request: Request) -> Response:
        def tokenize(model: Model) -> list[list[int]]:
            return [build_infill_prompt(model, body, state.settings.default_max_tokens)]

        return await run(state, body, request, tokenize)

    return router


async def run(
    state: ServerState, body: LlamaGenerationFields, request: Request, tokenize: Callable[[Model], list[list[int]]]
) -> Response:
    """Generate while the client is connected. Errors name the fields of the body."""
    fields = {"response_format": "grammar" if body.json_schema is None else "json_schema", "n": "n_cmpl"}
    stream_format = STREAM_FORMAT if body.stream else None
    return await state.run_while_connected(
        request, generate(state, body, request, tokenize), "prompt", stream_format, fields
    )


async def generate(
    state: ServerState, body: LlamaGenerationFields, request: Request, tokenize: Callable[[Model], list[list[int]]]
) -> Response:
    """Complete the prompts that `tokenize` returns, whole or as a stream."""
    model = await state.get_generating_model(body.model)
    salt = get_tenant_salt(request)
    generation_request = await state.run_text_work(
        lambda: conversion.build_request(state, model, body, tokenize(model), salt)
    )
    generation = await start_generation(state, body.model, generation_request)
    return await generation.respond(LlamaCompletionFormatter(body, generation), stream=bool(body.stream))
