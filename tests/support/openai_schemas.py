"""OpenAI's published types as a judge: what they do not accept as it stands is wrong."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import pydantic
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

T = TypeVar("T")
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)

__all__ = ["ChatCompletion", "ChatCompletionChunk", "Completion", "CreateEmbeddingResponse", "Model", "Response"]


def valid(kind: type[T], value: Any) -> T:
    """`value` as OpenAI's type, which takes nothing of another kind for its own."""
    read: T = pydantic.TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    return read


def valid_event(value: dict[str, Any]) -> Any:
    """An event of /v1/responses as one of OpenAI's."""
    read = EVENTS.validate_json(json.dumps(value), strict=True)
    assert read.type == value["type"]
    return read
