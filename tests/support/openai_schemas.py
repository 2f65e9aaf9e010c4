"""Strict validation of responses against the types of the `openai` package."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import pydantic
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

OpenAIType = TypeVar("OpenAIType")
EVENT_ADAPTER: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)

__all__ = ["ChatCompletion", "ChatCompletionChunk", "Completion", "CreateEmbeddingResponse", "Model", "Response"]


def validate(openai_type: type[OpenAIType], value: Any) -> OpenAIType:
    """Parse `value` as an OpenAI type without any conversion."""
    parsed: OpenAIType = pydantic.TypeAdapter(openai_type).validate_json(json.dumps(value), strict=True)
    return parsed


def validate_event(value: dict[str, Any]) -> Any:
    """Parse an event of /v1/responses as an OpenAI type."""
    parsed = EVENT_ADAPTER.validate_json(json.dumps(value), strict=True)
    assert parsed.type == value["type"]
    return parsed
