"""The smaller routes: which models there are, tokens and templates, health, numbers, and what memory holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.api.served_model import ServedModel
from afterglow.chat.miss_reasons import explain_miss
from afterglow.chat.multimodal import get_media_label
from afterglow.chat.prompt import ChatPrompt
from afterglow.engine.types.entries import Entry, Media
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import invalid_request_error
from afterglow.server.media import RequestMessages, load_media
from afterglow.server.metrics import CONTENT_TYPE
from afterglow.server.models import ModelSlot
from afterglow.server.openai.chat import build_chat_options
from afterglow.server.schema.admin import (
    ApplyTemplateRequest,
    ApplyTemplateResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    ExplainRequest,
    HealthResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from afterglow.server.schema.base import StrictRoute
from afterglow.server.schema.chat import ChatFields, dump_message
from afterglow.server.state import ServerState

DIFFERENCE_CONTEXT_TOKENS = 16  # tokens shown before a difference


def build_router(state: ServerState) -> APIRouter:
    """The routes, for an application."""
    router = APIRouter(route_class=StrictRoute)
    for add in (_add_model_routes, _add_text_routes, _add_state_routes, _add_cache_routes):
        add(router, state)
    return router


def _add_model_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/v1/models", summary="Which models are served")
    async def models() -> ModelList:
        return ModelList(data=[build_model_card(place) for place in state.models.slots.values()])

    @router.get("/v1/models/{name:path}", summary="One of them")
    async def model(name: str) -> ModelCard:
        return build_model_card(state.models.get_slot(name))


def build_model_card(slot: ModelSlot) -> ModelCard:
    """A model as OpenAI's clients list it."""
    model = slot.model
    return ModelCard(
        id=slot.name,
        created=slot.created,
        context_length=None if model is None else model.context_length,
        loaded=model is not None,
        capabilities=[] if model is None else list_capabilities(model),
    )


def list_capabilities(model: ServedModel) -> list[str]:
    """What can be asked of a model."""
    infill = {"fim_pre", "fim_suf", "fim_mid"} <= model.vocabulary.special_tokens.keys()
    texts = ["chat", "completion"] if model.can_generate else []
    return ["embeddings", *texts, *(["infill"] if infill else []), *sorted(model.engine_info.media)]


def _add_text_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/tokenize", summary="A text as tokens")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        model = await state.get_model(body.model)
        tokens = await state.run_text_work(
            lambda: model.tokenize(body.content, special=body.parse_special, bos=body.add_special)
        )
        if not body.with_pieces:
            return TokenizeResponse(tokens=tokens)
        return TokenizeResponse(tokens=[{"id": token, "piece": format_piece(model, token)} for token in tokens])

    @router.post("/detokenize", summary="Tokens as a text")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        model = await state.get_model(body.model)
        return DetokenizeResponse(
            content=await state.run_text_work(lambda: model.detokenize(body.tokens, special=True))
        )

    @router.post("/apply-template", summary="A conversation as the model's template writes it")
    async def apply_template(body: ApplyTemplateRequest) -> ApplyTemplateResponse:
        model = await state.get_model(body.model)
        messages = await load_media(state, model, [dump_message(one) for one in body.messages])
        prompt = await state.run_text_work(lambda: build_prompt(model, body, messages))
        return ApplyTemplateResponse(prompt=prompt.text, tokens=prompt.cells)


def format_piece(model: ServedModel, token: int) -> str | list[int]:
    """The text of a token, or its bytes where they are part of a character."""
    data = model.vocabulary.token_to_piece(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def build_prompt(model: ServedModel, body: ChatFields, messages: RequestMessages) -> ChatPrompt:
    """The prompt that a conversation becomes."""
    return model.apply_chat_template(messages, **build_chat_options(body))


def _add_state_routes(router: APIRouter, state: ServerState) -> None:
    async def health() -> Response:
        states = {name: place.state for name, place in state.models.slots.items()}
        ready = all(state in ("ready", "not loaded") for state in states.values())
        body = HealthResponse(status="ok" if ready else "starting", models=states)
        return JSONResponse(body.model_dump(), 200 if ready else 503)

    for path in ("/health", "/v1/health"):
        router.get(path, summary="Whether requests are served", response_model=HealthResponse)(health)

    @router.get("/metrics", summary="Numbers for Prometheus", response_class=Response)
    async def metrics() -> Response:
        await state.update_metrics()
        return Response(state.metrics.render(), media_type=CONTENT_TYPE)

    @router.get("/stats", summary="What the engines did: counters, guesses, tiers")
    async def stats() -> dict[str, Any]:
        loaded = [place.model for place in state.models.slots.values() if place.model is not None]
        return {"models": {model.name: await collect_stats(state, model) for model in loaded}}


async def collect_stats(state: ServerState, model: ServedModel) -> dict[str, Any]:
    """What one engine did so far. Numbers only: nothing of what anybody said."""
    numbers, gate = await state.run_engine_call(model.get_stats), state.get_admission_queue(model)
    waiting = {"inside": gate.in_flight, "waiting": gate.waiting}
    return {"restarts": model.restarts, "answers": waiting, **asdict(numbers)}


def _add_cache_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/cache", summary="What the engines hold in memory")
    async def cache(request: Request) -> dict[str, Any]:
        loaded = [place.model for place in state.models.slots.values() if place.model is not None]
        return {
            "models": {
                model.name: await collect_cache_contents(state, model, get_tenant_salt(request)) for model in loaded
            }
        }

    @router.post("/cache/explain", summary="What of a prompt is in memory, and why not more")
    async def explain(body: ExplainRequest, request: Request) -> dict[str, Any]:
        model = await state.get_model(body.model)
        if (body.messages is None) == (body.prompt is None):
            raise invalid_request_error("prompt", "give `messages` or a `prompt`")
        messages = await load_media(state, model, [dump_message(one) for one in body.messages or ()])
        return await state.run_engine_call(lambda: explain_prompt(model, body, messages, get_tenant_salt(request)))


def format_entries(model: ServedModel, entries: Sequence[Entry]) -> str:
    """Entries as people read them. Pictures and sounds are negative numbers where they come from an engine."""
    text, instead = "", get_media_label(model.engine_info.media)
    for media, run in itertools.groupby(entries, key=lambda entry: isinstance(entry, Media) or entry < 0):
        shown = list(run)
        text += instead * len(shown) if media else model.detokenize(shown, special=True)  # type: ignore[arg-type]
    return text


async def collect_cache_contents(state: ServerState, model: ServedModel, salt: str) -> dict[str, Any]:
    """What one engine holds, with the beginnings and ends of the texts that are the asker's own."""
    held = await state.run_engine_call(lambda: model.get_cache_contents(salt))

    def text(tokens: tuple[int, ...]) -> str:
        return format_entries(model, tokens)

    return {
        "context_length": model.context_length,
        "memory": model.engine_info.memory,
        "busy": held.busy,
        "restarts": model.restarts,
        "counters": held.counters,
        "tiers": {name: asdict(tier) for name, tier in held.tiers.items()},
        "sequences": [
            {**asdict(one), "begins": text(one.first_entries), "ends": text(one.last_entries)} for one in held.sequences
        ],
        "checkpoints": [asdict(one) for one in held.checkpoints],
    }


def explain_prompt(model: ServedModel, body: ExplainRequest, messages: RequestMessages, salt: str) -> dict[str, Any]:
    """What is kept of a prompt, where they part, the texts there, and why, in words."""
    prompt = build_prompt(model, body, messages) if body.prompt is None else body.prompt
    request = model.build_request(prompt)
    entries = list(request.entries)
    difference = model.explain_miss(prompt, salt=salt)
    found, at, theirs = difference.explanation, difference.common_length, difference.cached_entries
    words = explain_miss(
        found,
        shared_text=format_entries(model, entries[:at]),
        prompt_text=format_entries(model, entries[at:]),
        cached_text=format_entries(model, theirs),
    )
    return {
        "prompt_tokens": found.prompt_entries,
        "reused_tokens": found.reused_entries,
        "shared_tokens": found.shared_entries,
        "evicted_tokens": found.evicted_entries,
        "computed_tokens": found.computed_entries,
        "cause": found.cause,
        "before": format_entries(model, entries[max(0, at - DIFFERENCE_CONTEXT_TOKENS) : at]),
        "ours": format_entries(model, entries[at : at + DIFFERENCE_CONTEXT_TOKENS]),
        "theirs": format_entries(model, theirs[:DIFFERENCE_CONTEXT_TOKENS]),
        "likely": words.reason,
        "words": words.message,
    }
