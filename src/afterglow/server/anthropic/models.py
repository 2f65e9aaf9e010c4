"""Routes /v1/models for clients of the Anthropic API, which send the header `anthropic-version`."""

from __future__ import annotations

import datetime
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope

from afterglow.errors import ModelNotFound
from afterglow.registry.discovery import get_modified_time
from afterglow.server.anthropic.errors import build_error_body
from afterglow.server.errors import to_api_error
from afterglow.server.installed import get_client_name
from afterglow.server.models import ModelSlot
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState

VERSION_HEADER = "anthropic-version"


class AnthropicRoute(StrictRoute):
    """Route that matches only requests with Anthropic's version header."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether the route matches a request."""
        if VERSION_HEADER not in Headers(scope=scope):
            return Match.NONE, {}
        return super().matches(scope)


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter(route_class=AnthropicRoute, include_in_schema=False)

    @router.get("/v1/models", summary="List the served models")
    async def list_models() -> dict[str, Any]:
        data = [info for slot in state.models.slots.values() for info in build_model_infos(slot)]
        for variant, slot in await state.run_text_work(state.models.list_variants):
            length = None if slot is None or slot.model is None else slot.model.context_length
            data.append(build_info(variant.name, variant.created, length))
        for model in await state.run_text_work(state.models.list_addable):
            data.append(build_info(get_client_name(model.name), get_modified_time(model.path), None))
        ids = [model["id"] for model in data] or [None]
        return {"data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}

    @router.get("/v1/models/{name:path}", summary="Retrieve a model", response_model=None)
    async def retrieve_model(name: str) -> dict[str, Any] | JSONResponse:
        try:
            info = build_model_info(await state.get_slot(name))
            if (variant := state.models.find_variant(name)) is not None:
                info = build_info(variant.name, variant.created, info["max_input_tokens"])
            return info
        except ModelNotFound as error:
            return JSONResponse(build_error_body(to_api_error(error)), 404)

    return router


def build_model_infos(slot: ModelSlot) -> list[dict[str, Any]]:
    """Build Anthropic's model object of a slot, and one for each of its adapters under the name that selects it."""
    info = build_model_info(slot)
    names = [f"{slot.name}+{adapter}" for adapter in slot.served.adapters]
    return [info, *({**info, "id": name, "display_name": name} for name in names)]


def build_model_info(slot: ModelSlot) -> dict[str, Any]:
    """Build Anthropic's model object of a slot."""
    return build_info(slot.name, slot.created, None if slot.model is None else slot.model.context_length)


def build_info(name: str, created: float, context_length: int | None) -> dict[str, Any]:
    """Build Anthropic's model object."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.datetime.fromtimestamp(int(created), datetime.UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context_length,
        "max_tokens": context_length,
    }
