"""Routes /props and /lora-adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import fastapi
from fastapi import APIRouter

from afterglow.api.model import Model
from afterglow.engine.types.request import Request
from afterglow.llama.library.loader import get_library
from afterglow.llama.sampling import Sampling
from afterglow.server.adapters import set_default_lora
from afterglow.server.llamacpp.errors import not_supported_error
from afterglow.server.llamacpp.formatting import build_parameters
from afterglow.server.llamacpp.schema import LoraAdapterItem
from afterglow.server.models import ModelSlot
from afterglow.server.schema.base import StrictRoute
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=StrictRoute)

    @router.get("/props", summary="llama-server: properties of a model and of the server")
    async def get_properties(model: str | None = None) -> dict[str, Any]:
        await state.add_named_model(model)
        return build_properties(state, state.models.get_requested_slot(model))

    @router.post("/props", include_in_schema=False)
    async def set_properties(request: fastapi.Request) -> None:
        raise not_supported_error("properties cannot be changed: set them in the settings of the server")

    @router.get("/lora-adapters", summary="llama-server: list the loaded adapters")
    async def get_adapters(model: str | None = None) -> list[dict[str, Any]]:
        loaded = await state.get_model(model)
        return list_adapters(loaded, dict(state.models.get_requested_slot(model).default_lora))

    @router.post("/lora-adapters", summary="llama-server: set the adapters of requests without `lora`")
    async def set_adapters(body: list[LoraAdapterItem], model: str | None = None) -> dict[str, bool]:
        fields = [item.to_field() for item in body]
        set_default_lora(state.models, await state.get_model(model), model, fields)
        return {"success": True}

    return router


def list_adapters(model: Model, scales: Mapping[str, float]) -> list[dict[str, Any]]:
    """List the adapters of a model with their numbers and their `scales` in requests that name none, by default 0."""
    return [
        {"id": number, "path": str(adapter.path), "scale": scales.get(adapter.name, 0.0), "name": adapter.name}
        for number, adapter in enumerate(model.adapters)
    ]


def build_properties(state: ServerState, slot: ModelSlot) -> dict[str, Any]:
    """Build the properties of a model. They load no model: one that was never loaded has only those of the server."""
    settings, model = state.settings, slot.model
    properties: dict[str, Any] = {
        "model_alias": slot.name,
        "model_path": "" if slot.served.path is None else str(slot.served.path),
        "endpoint_slots": settings.slots,
        "endpoint_props": False,
        "endpoint_metrics": settings.metrics,
        "build_info": get_library().build,
        "is_sleeping": not slot.is_usable,
    }
    if model is None:
        return properties
    return properties | build_model_properties(model, settings)


def build_model_properties(model: Model, settings: ServerSettings) -> dict[str, Any]:
    """Build the properties that a loaded model has, also after it was unloaded."""
    info, vocabulary = model.engine_info, model.vocabulary
    sampling = model.sampling_defaults.sampling if model.can_generate else Sampling()
    if settings.default_seed is not None:
        sampling = replace(sampling, seed=settings.default_seed)
    request = Request(id="", entries=(), sampling=sampling, max_tokens=settings.default_max_tokens)

    def format_token(name: str) -> str:
        token = vocabulary.special_tokens.get(name)
        return "" if token is None else vocabulary.token_to_piece(token).decode("utf-8", "replace")

    return {
        "default_generation_settings": {"params": build_parameters(request, model), "n_ctx": model.context_length},
        "total_slots": info.sequences,
        "modalities": {"vision": "image" in info.media, "audio": "audio" in info.media, "video": False},
        "chat_template": model.chat_template or "",
        "bos_token": format_token("bos"),
        "eos_token": format_token("eos"),
    }
