"""The smaller routes: which models there are, tokens and templates, health, numbers, and what memory holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.chat.missing import explain_words
from afterglow.chat.prompt import Prompt
from afterglow.chat.seeing import stand_in
from afterglow.engine.entries import Entry, Media
from afterglow.server.chat import chat_options
from afterglow.server.errors import invalid
from afterglow.server.media import Messages, brought
from afterglow.server.metrics import TYPE
from afterglow.server.roster import Place
from afterglow.server.security import tenant
from afterglow.server.service import Service
from afterglow.server.types.chat import ChatFields, message
from afterglow.server.types.other import (
    Detokenized,
    DetokenizeRequest,
    ExplainRequest,
    Health,
    ModelCard,
    ModelList,
    Templated,
    TemplateRequest,
    TokenizeRequest,
    Tokens,
)
from afterglow.server.wire import StrictRoute
from afterglow.serving import ServedModel

BEFORE = 16  # tokens shown before a difference


def routes(service: Service) -> APIRouter:
    """The routes, for an application."""
    router = APIRouter(route_class=StrictRoute)
    for add in (_models, _text, _state, _cache):
        add(router, service)
    return router


def _models(router: APIRouter, service: Service) -> None:
    @router.get("/v1/models", summary="Which models are served")
    async def models() -> ModelList:
        return ModelList(data=[card(place) for place in service.roster.places.values()])

    @router.get("/v1/models/{name:path}", summary="One of them")
    async def model(name: str) -> ModelCard:
        return card(service.roster.place(name))


def card(place: Place) -> ModelCard:
    """A model as OpenAI's clients list it."""
    model = place.model
    return ModelCard(
        id=place.name,
        created=place.created,
        context_length=None if model is None else model.context_length,
        loaded=model is not None,
        capabilities=[] if model is None else capabilities(model),
    )


def capabilities(model: ServedModel) -> list[str]:
    """What can be asked of a model."""
    infill = {"fim_pre", "fim_suf", "fim_mid"} <= model.vocabulary.special.keys()
    texts = ["chat", "completion"] if model.generates else []
    return ["embeddings", *texts, *(["infill"] if infill else []), *sorted(model.facts.media)]


def _text(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", summary="A text as tokens")
    async def tokenize(body: TokenizeRequest) -> Tokens:
        model = await service.model(body.model)
        tokens = await service.text(
            lambda: model.tokenize(body.content, special=body.parse_special, bos=body.add_special)
        )
        if not body.with_pieces:
            return Tokens(tokens=tokens)
        return Tokens(tokens=[{"id": token, "piece": piece(model, token)} for token in tokens])

    @router.post("/detokenize", summary="Tokens as a text")
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        model = await service.model(body.model)
        return Detokenized(content=await service.text(lambda: model.detokenize(body.tokens, special=True)))

    @router.post("/apply-template", summary="A conversation as the model's template writes it")
    async def apply_template(body: TemplateRequest) -> Templated:
        model = await service.model(body.model)
        messages = await brought(service, model, [message(one) for one in body.messages])
        prompt = await service.text(lambda: prompt_of(model, body, messages))
        return Templated(prompt=prompt.text, tokens=prompt.cells)


def piece(model: ServedModel, token: int) -> str | list[int]:
    """The text of a token, or its bytes where they are part of a character."""
    data = model.vocabulary.piece(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def prompt_of(model: ServedModel, body: ChatFields, messages: Messages) -> Prompt:
    """The prompt that a conversation becomes."""
    return model.chat_prompt(messages, **chat_options(body))


def _state(router: APIRouter, service: Service) -> None:
    async def health() -> Response:
        states = {name: place.state for name, place in service.roster.places.items()}
        ready = all(state in ("ready", "not loaded") for state in states.values())
        body = Health(status="ok" if ready else "starting", models=states)
        return JSONResponse(body.model_dump(), 200 if ready else 503)

    for path in ("/health", "/v1/health"):
        router.get(path, summary="Whether requests are served", response_model=Health)(health)

    @router.get("/metrics", summary="Numbers for Prometheus", response_class=Response)
    async def metrics() -> Response:
        await service.update_metrics()
        return Response(service.metrics.page(), media_type=TYPE)

    @router.get("/stats", summary="What the engines did: counters, guesses, tiers")
    async def stats() -> dict[str, Any]:
        loaded = [place.model for place in service.roster.places.values() if place.model is not None]
        return {"models": {model.name: await statistics(service, model) for model in loaded}}


async def statistics(service: Service, model: ServedModel) -> dict[str, Any]:
    """What one engine did so far. Numbers only: nothing of what anybody said."""
    numbers, gate = await service.waiting(model.numbers), service.gate(model)
    waiting = {"inside": gate.inside, "waiting": gate.waiting}
    return {"restarts": model.restarts, "answers": waiting, **asdict(numbers)}


def _cache(router: APIRouter, service: Service) -> None:
    @router.get("/cache", summary="What the engines hold in memory")
    async def cache(request: Request) -> dict[str, Any]:
        loaded = [place.model for place in service.roster.places.values() if place.model is not None]
        return {"models": {model.name: await holding(service, model, tenant(request)) for model in loaded}}

    @router.post("/cache/explain", summary="What of a prompt is in memory, and why not more")
    async def explain(body: ExplainRequest, request: Request) -> dict[str, Any]:
        model = await service.model(body.model)
        if (body.messages is None) == (body.prompt is None):
            raise invalid("prompt", "give `messages` or a `prompt`")
        messages = await brought(service, model, [message(one) for one in body.messages or ()])
        return await service.waiting(lambda: explanation(model, body, messages, tenant(request)))


def shown_text(model: ServedModel, entries: Sequence[Entry]) -> str:
    """Entries as people read them. Pictures and sounds are negative numbers where they come from an engine."""
    text, instead = "", stand_in(model.facts.media)
    for media, run in itertools.groupby(entries, key=lambda entry: isinstance(entry, Media) or entry < 0):
        shown = list(run)
        text += instead * len(shown) if media else model.detokenize(shown, special=True)  # type: ignore[arg-type]
    return text


async def holding(service: Service, model: ServedModel, salt: str) -> dict[str, Any]:
    """What one engine holds, with the beginnings and ends of the texts that are the asker's own."""
    held = await service.waiting(lambda: model.held(salt))

    def text(tokens: tuple[int, ...]) -> str:
        return shown_text(model, tokens)

    return {
        "context_length": model.context_length,
        "memory": model.facts.memory,
        "busy": held.busy,
        "restarts": model.restarts,
        "counters": held.counters,
        "tiers": {name: asdict(tier) for name, tier in held.tiers.items()},
        "sequences": [{**asdict(one), "begins": text(one.begins), "ends": text(one.ends)} for one in held.sequences],
        "checkpoints": [asdict(one) for one in held.checkpoints],
    }


def explanation(model: ServedModel, body: ExplainRequest, messages: Messages, salt: str) -> dict[str, Any]:
    """What is kept of a prompt, where they part, the texts there, and why, in words."""
    prompt = prompt_of(model, body, messages) if body.prompt is None else body.prompt
    request = model.request(prompt)
    entries = list(request.entries)
    difference = model.explain_difference(prompt, salt=salt)
    found, at, theirs = difference.explanation, difference.at, difference.theirs
    words = explain_words(
        found,
        before=shown_text(model, entries[:at]),
        ours=shown_text(model, entries[at:]),
        theirs=shown_text(model, theirs),
    )
    return {
        "prompt_tokens": found.prompt,
        "reused_tokens": found.reused,
        "shared_tokens": found.shared,
        "evicted_tokens": found.evicted,
        "computed_tokens": found.computed,
        "cause": found.cause,
        "before": shown_text(model, entries[max(0, at - BEFORE) : at]),
        "ours": shown_text(model, entries[at : at + BEFORE]),
        "theirs": shown_text(model, theirs[:BEFORE]),
        "likely": words.likely,
        "words": words.sentence,
    }
