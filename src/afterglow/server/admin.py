"""Routes outside the OpenAI generation APIs: models, tokenization, templates, health, metrics and the prefix cache."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.api.model import Model, PromptInput
from afterglow.chat.prompt import ChatPrompt, ReplayReport
from afterglow.engine.host.remote_calls import CachedSequence
from afterglow.registry.discovery import get_modified_time
from afterglow.server.adapters import Lora, build_lora
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import APIError, invalid_request_error
from afterglow.server.explain import explain_prompt_miss, format_entries
from afterglow.server.generation_requests import ConversationRequest, build_prompt
from afterglow.server.installed import ModelVariant, get_client_name
from afterglow.server.llamacpp.errors import not_supported_error
from afterglow.server.llamacpp.metrics import render_metrics
from afterglow.server.llamacpp.prompts import tokenize_prompt
from afterglow.server.metrics import CONTENT_TYPE
from afterglow.server.models import ModelSlot, SlotState
from afterglow.server.openai.chat import build_prompt_options, find_reasoning_field
from afterglow.server.openai.formatting import format_replay_misses
from afterglow.server.openai.schema.chat import ChatFields, build_messages, build_tools
from afterglow.server.schema.admin import (
    ApplyTemplateRequest,
    ApplyTemplateResponse,
    ChangedModelCard,
    ClearRequest,
    ClearResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    ExplainRequest,
    HealthResponse,
    LoadModelRequest,
    LoadStatus,
    ModelCard,
    ModelList,
    ModelMeta,
    ModelStatus,
    PinRequest,
    PinResponse,
    SamplingDefault,
    TokenizeRequest,
    TokenizeResponse,
    UnloadModelRequest,
)
from afterglow.server.schema.base import StrictRoute
from afterglow.server.schema.sampling import SAMPLING_FIELD_NAMES
from afterglow.server.state import ServerState, name_fields

ResultT = TypeVar("ResultT")
DIFFERENCE_CONTEXT_TOKENS = 16  # tokens shown on each side of a difference
LOAD_STATUSES: dict[SlotState, LoadStatus] = {"not loaded": "unloaded", "warm": "unloaded", "loading": "loading"}
HEALTHY_STATES = frozenset({"not loaded", "loading", "ready", "warm", "unloading"})


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)
    for add_routes in (_add_model_routes, _add_text_routes, _add_state_routes, _add_cache_routes):
        add_routes(router, state)
    return router


def _add_model_routes(router: APIRouter, state: ServerState) -> None:
    async def models() -> ModelList:
        cards = [card for slot in state.models.slots.values() for card in build_model_cards(slot)]
        return ModelList(data=[*cards, *await state.run_text_work(lambda: list_unserved_cards(state))])

    for path in ("/v1/models", "/models"):
        router.get(path, summary="List the served models")(models)

    @router.get("/v1/models/{name:path}", summary="Retrieve a model")
    async def model(name: str) -> ModelCard:
        cards = {card.id: card for slot in state.models.slots.values() for card in build_model_cards(slot)}
        if name in cards:
            return cards[name]
        card, variant = build_model_card(await state.get_slot(name)), state.models.find_variant(name)
        return card if variant is None else build_variant_card(variant, card)

    @router.post("/models/load", summary="Load a model; others are unloaded if there is no room")
    async def load_model(body: LoadModelRequest) -> ChangedModelCard:
        slot = await get_listed_slot(state, body.model)
        await asyncio.wrap_future(slot.start_load())
        if body.keep_alive is not None:
            slot.set_keep_alive(body.keep_alive)
        return ChangedModelCard(**build_model_card(slot).model_dump())

    @router.post("/models/unload", summary="Store the KV cache of a model on disk and unload it")
    async def unload_model(body: UnloadModelRequest) -> ChangedModelCard:
        slot = await get_listed_slot(state, body.model)
        await state.run_engine_call(slot.name, lambda: slot.unload(body.timeout))
        return ChangedModelCard(**build_model_card(slot).model_dump())


async def get_listed_slot(state: ServerState, name: str | None) -> ModelSlot:
    """Return the slot of a model, also by a name of the list that selects one of its adapters."""
    for slot in state.models.slots.values():
        if any(card.id == name for card in build_model_cards(slot)):
            return slot
    return await state.get_slot(name)


def build_model_card(slot: ModelSlot) -> ModelCard:
    """Build the OpenAI model object of a slot."""
    model = slot.model
    return ModelCard(
        id=slot.name,
        created=slot.created,
        parent=None,
        context_length=None if model is None else model.context_length,
        loaded=slot.is_usable,
        state=slot.state,
        status=ModelStatus(value=LOAD_STATUSES.get(slot.state, "loaded")),
        meta=None if model is None else build_model_meta(model),
        bytes=dict(slot.nbytes) if slot.has_room else {},
        pinned=slot.served.pinned,
        active_requests=slot.active_requests,
        last_used=None if model is None else to_unix_time(slot.last_used),
        expires_at=None if (expires_at := slot.expires_at) is None else to_unix_time(expires_at),
        capabilities=[] if model is None else list_capabilities(model),
        sampling=None if model is None or not model.can_generate else list_sampling_defaults(model),
    )


def build_model_cards(slot: ModelSlot) -> list[ModelCard]:
    """Build the model object of a slot, and one for each of its adapters under the name that selects it."""
    card = build_model_card(slot)
    names = [f"{slot.name}+{adapter}" for adapter in slot.served.adapters]
    return [card, *(card.model_copy(update={"id": name, "parent": slot.name}) for name in names)]


def list_unserved_cards(state: ServerState) -> list[ModelCard]:
    """Build the model objects of created models, and of those on this machine that are served when they are named.

    Blocking.
    """
    cards = []
    for variant, slot in state.models.list_variants():
        card = build_unserved_card(variant.source, variant.created) if slot is None else build_model_card(slot)
        cards.append(build_variant_card(variant, card))
    for model in state.models.list_addable():
        cards.append(build_unserved_card(get_client_name(model.name), get_modified_time(model.path)))
    return cards


def build_variant_card(variant: ModelVariant, card: ModelCard) -> ModelCard:
    """Build the model object of a variant from that of its model."""
    own = {
        name: SamplingDefault(value=value, source="created model")
        for name, value in variant.defaults.sampling.items()
        if name in SAMPLING_FIELD_NAMES and isinstance(value, int | float)
    }
    sampling = None if card.sampling is None else {**card.sampling, **own}
    return card.model_copy(
        update={"id": variant.name, "parent": card.id, "created": int(variant.created), "sampling": sampling}
    )


def build_unserved_card(name: str, created: float) -> ModelCard:
    """Build the model object of a model without a slot."""
    return ModelCard(
        id=name,
        created=int(created),
        parent=None,
        meta=None,
        last_used=None,
        expires_at=None,
        sampling=None,
        loaded=False,
        state="not loaded",
        status=ModelStatus(value="unloaded"),
        bytes={},
        pinned=False,
        active_requests=0,
        capabilities=[],
    )


def build_model_meta(model: Model) -> ModelMeta:
    """Build the facts about a model that llama-server lists."""
    info = model.info
    return ModelMeta(
        n_vocab=info.vocabulary_size,
        n_ctx_train=info.trained_context_length,
        n_embd=model.engine_info.embedding_width,
        n_params=info.parameter_count,
        size=info.nbytes,
    )


def to_unix_time(moment: float) -> float:
    """Convert a moment of the monotonic clock."""
    return round(time.time() + moment - time.monotonic(), 3)


def list_sampling_defaults(model: Model) -> dict[str, SamplingDefault]:
    """List the sampling of requests that do not set it, with the source of each value."""
    described = model.sampling_defaults.describe()
    return {name: SamplingDefault(value=value, source=source) for name, (value, source) in described.items()}


def list_capabilities(model: Model) -> list[str]:
    """List the capabilities of a model."""
    infill = {"fim_pre", "fim_suf", "fim_mid"} <= model.vocabulary.special_tokens.keys()
    generation = ["chat", "completion"] if model.can_generate else []
    retrieval = [name for name in ("embeddings", "rerank") if model.supports(name)]
    return [*retrieval, *generation, *(["infill"] if infill else []), *sorted(model.engine_info.media)]


def _add_text_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/tokenize", summary="Tokenize a text")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        model = await state.get_model(body.model)
        work = state.run_text_work(
            lambda: tokenize_prompt(model, body.content, special=body.parse_special, bos=body.add_special)
        )
        tokens = await name_fields(work, {"prompt": "content"})
        if not body.with_pieces:
            return TokenizeResponse(tokens=tokens)
        return TokenizeResponse(tokens=[{"id": token, "piece": format_piece(model, token)} for token in tokens])

    @router.post("/detokenize", summary="Convert tokens to text")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        model = await state.get_model(body.model)
        work = state.run_text_work(lambda: model.detokenize(body.tokens, special=True))
        content = await name_fields(work, {"token": "tokens"})
        return DetokenizeResponse(content=content)

    @router.post("/apply-template", summary="Render a conversation with the chat template of the model")
    async def apply_template(body: ApplyTemplateRequest, request: Request) -> ApplyTemplateResponse:
        model = await state.get_model(body.model)
        with contextlib.ExitStack() as resources:
            conversation = build_conversation_request(end_with_message(body), get_tenant_salt(request))
            prompt = await build_prompt(state, body.model, model, conversation, resources)
            return ApplyTemplateResponse(prompt=prompt.text, tokens=prompt.cells)


def end_with_message(body: ApplyTemplateRequest) -> ApplyTemplateRequest:
    """Return the body with `add_generation_prompt: false` as a variable of the template: nothing is generated here."""
    if body.add_generation_prompt is not False or body.messages[-1].role == "assistant":
        return body
    variables = {**(body.chat_template_kwargs or {}), "add_generation_prompt": False}
    return body.model_copy(update={"add_generation_prompt": None, "chat_template_kwargs": variables})


def format_piece(model: Model, token: int) -> str | list[int]:
    """Return the text of a token, or its bytes if they are not valid UTF-8."""
    data = model.vocabulary.token_to_piece(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def build_conversation_request(body: ChatFields, salt: str) -> ConversationRequest:
    """Convert the fields that determine the prompt."""
    return ConversationRequest(
        messages=build_messages(body.messages),
        tools=build_tools(body.tools),
        prompt_options=build_prompt_options(body),
        reasoning_field=find_reasoning_field(body),
        sampling_fields=body,
        salt=salt,
    )


def _add_state_routes(router: APIRouter, state: ServerState) -> None:
    async def health() -> Response:
        slot_states = {name: slot.state for name, slot in state.models.slots.items()}
        for slot in state.models.slots.values():  # a failed server may get no other requests
            slot.retry_failed()
        ready = all(slot_state in HEALTHY_STATES for slot_state in slot_states.values())
        # A swap is normal operation: a load counts only if no model is ready.
        if "loading" in slot_states.values() and "ready" not in slot_states.values():
            ready = False
        body = HealthResponse(status="ok" if ready else "starting", models=slot_states)
        return JSONResponse(body.model_dump(), 200 if ready else 503)

    for path in ("/health", "/v1/health"):
        router.get(path, summary="Check whether all models are ready", response_model=HealthResponse)(health)

    @router.get("/metrics", summary="Prometheus metrics, also with the names of llama-server", response_class=Response)
    async def metrics() -> Response:
        if not state.settings.metrics:
            raise not_supported_error("metrics are not served: start the server without --no-metrics")
        await state.update_metrics()
        headers = {"Process-Start-Time-Unix": str(state.metrics.started)}
        return Response(state.metrics.render() + render_metrics(state.metrics), 200, headers, media_type=CONTENT_TYPE)

    @router.get("/stats", summary="Engine counters, speculative decoding statistics and cache tiers")
    async def stats() -> dict[str, Any]:
        with hold_loaded_models(state) as models:
            return {"models": {model.name: await collect_stats(state, model) for model in models}}


@contextlib.contextmanager
def hold_loaded_models(state: ServerState) -> Iterator[list[Model]]:
    """Keep the models that are loaded now from being unloaded. It does not count as a use."""
    with contextlib.ExitStack() as stack:
        models = []
        for slot in state.models.slots.values():
            if (model := slot.try_acquire()) is not None:
                stack.callback(slot.release, is_use=False)
                models.append(model)
        yield models


async def collect_stats(state: ServerState, model: Model) -> dict[str, Any]:
    """Collect the statistics of one engine. They contain numbers only, no text of any request."""
    engine_stats, queue = await state.run_engine_call(model.name, model.get_stats), state.get_admission_queue(model)
    choices = {"in_flight": queue.in_flight, "waiting": queue.waiting}
    return {"restarts": model.restarts, "choices": choices, **asdict(engine_stats)}


def _add_cache_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/cache", summary="Contents of the prefix caches")
    async def cache(request: Request) -> dict[str, Any]:
        salt = get_tenant_salt(request)
        with hold_loaded_models(state) as models:
            return {"models": {model.name: await collect_cache_contents(state, model, salt) for model in models}}

    async def run_with_prompt(
        body: ExplainRequest, request: Request, work: Callable[[Model, PromptInput, str, Lora], ResultT]
    ) -> ResultT:
        model, salt = await state.get_model(body.model), get_tenant_salt(request)
        lora = build_lora(state.models, model, body.model, body.lora)
        with contextlib.ExitStack() as resources:
            prompt = await build_prompt_input(state, model, body, resources, salt)
            return await state.run_engine_call(model.name, lambda: work(model, prompt, salt, lora))

    @router.post("/cache/explain", summary="Explain how much of a prompt is cached and why not more")
    async def explain(body: ExplainRequest, request: Request) -> dict[str, Any]:
        return await run_with_prompt(body, request, explain_prompt)

    @router.post("/cache/pin", summary="Pin a prefix: it is never evicted, whether it is cached now or later")
    async def pin(body: PinRequest, request: Request) -> PinResponse:
        return await run_with_prompt(body, request, pin_prompt)

    @router.post("/cache/unpin", summary="Remove the pin on a prefix")
    async def unpin(body: PinRequest, request: Request) -> PinResponse:
        return await run_with_prompt(body, request, unpin_prompt)

    @router.post("/cache/clear", summary="Clear the prefix cache of a model in all tiers, for all clients")
    async def clear(body: ClearRequest) -> ClearResponse:
        model = await state.get_model(body.model)
        await state.run_engine_call(model.name, model.clear_cache)
        return ClearResponse(model=model.name)


async def build_prompt_input(
    state: ServerState, model: Model, body: ExplainRequest, resources: contextlib.ExitStack, salt: str
) -> PromptInput:
    """Return the prompt of a body with either `messages` or `prompt`. Its media are released with `resources`."""
    if (body.messages is None) == (body.prompt is None):
        raise invalid_request_error("prompt", "set either `messages` or `prompt`")
    if body.prompt is not None:
        return body.prompt
    return await build_prompt(state, body.model, model, build_conversation_request(body, salt), resources)


def pin_prompt(model: Model, prompt: PromptInput, salt: str, lora: Lora) -> PinResponse:
    """Pin a prefix."""
    tokenized = model.tokenize_prompt(prompt)
    model.pin(tokenized, salt=salt, lora=lora)
    return PinResponse(model=model.name, tokens=len(tokenized.entries), pinned=True)


def unpin_prompt(model: Model, prompt: PromptInput, salt: str, lora: Lora) -> PinResponse:
    """Unpin a prefix; raise status 404 if it is not pinned."""
    tokenized = model.tokenize_prompt(prompt)
    tokens = len(tokenized.entries)
    if not model.unpin(tokenized, salt=salt, lora=lora):
        raise APIError(404, f"exactly this prefix of {tokens:,} tokens is not pinned", code="pin_not_found")
    return PinResponse(model=model.name, tokens=tokens, pinned=False)


async def collect_cache_contents(state: ServerState, model: Model, salt: str) -> dict[str, Any]:
    """Collect the cache contents of one engine, with text previews of the sequences of this tenant."""
    contents = await state.run_engine_call(model.name, lambda: model.get_cache_contents(salt))
    return {
        "context_length": model.context_length,
        "memory_kind": model.engine_info.memory,
        "busy": contents.busy,
        "restarts": model.restarts,
        "counters": contents.counters,
        "tiers": {name: asdict(tier) for name, tier in contents.tiers.items()},
        "sequences": [_format_sequence(model, sequence) for sequence in contents.sequences],
        "checkpoints": [asdict(checkpoint) for checkpoint in contents.checkpoints],
    }


def _format_sequence(model: Model, sequence: CachedSequence) -> dict[str, Any]:
    fields = asdict(sequence)
    first_entries, last_entries = fields.pop("first_entries"), fields.pop("last_entries")
    del fields["request"]  # /requests has them
    return {
        **fields,
        "first_text": format_entries(model, first_entries),
        "last_text": format_entries(model, last_entries),
    }


def explain_prompt(model: Model, prompt: PromptInput, salt: str, lora: Lora) -> dict[str, Any]:
    """Compare a prompt with the nearest cached prefix: token counts, the texts at the difference, and the reason."""
    explained = explain_prompt_miss(model, prompt, salt, lora)
    entries, miss, report = explained.entries, explained.miss, explained.report
    explanation, position, cached_entries = miss.explanation, miss.common_length, miss.cached_entries
    return {
        "prompt_tokens": explanation.prompt_entries,
        "reused_tokens": explanation.reused_entries,
        "shared_tokens": explanation.shared_entries,
        "evicted_tokens": explanation.evicted_entries,
        "computed_tokens": explanation.computed_entries,
        "cause": explanation.cause,
        "shared_text": format_entries(model, entries[max(0, position - DIFFERENCE_CONTEXT_TOKENS) : position]),
        "prompt_text": format_entries(model, entries[position : position + DIFFERENCE_CONTEXT_TOKENS]),
        "cached_text": format_entries(model, cached_entries[:DIFFERENCE_CONTEXT_TOKENS]),
        "reason": report.reason,
        "message": report.message,
        **({"replay": format_replay(prompt.replay)} if isinstance(prompt, ChatPrompt) else {}),
    }


def format_replay(report: ReplayReport) -> dict[str, Any]:
    """Format which messages of the assistant have the tokens that the model sampled."""
    return {
        "replayed_tokens": report.replayed_tokens,
        "replayed_messages": list(report.replayed_messages),
        "misses": format_replay_misses(report.misses.items()),
    }
