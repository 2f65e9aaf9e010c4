"""Body of /v1/completions."""

from __future__ import annotations

from typing import TypeAlias, cast

import pydantic

from afterglow.server.openai.schema.foreign import ForeignFields, MaxTokens
from afterglow.server.schema.base import Label, OptionalModel, same_as
from afterglow.server.schema.sampling import SamplingFields

CompletionPrompt: TypeAlias = str | list[str] | list[int] | list[list[int]]


class PromptFields(SamplingFields):
    """Fields that determine the prompts."""

    model: OptionalModel = None
    prompt: CompletionPrompt = pydantic.Field(description="Text or tokens, or a list of either.")
    suffix: str | None = pydantic.Field(None, description="Text after the completion, for models with infill tokens.")


class CompletionRequest(ForeignFields, PromptFields):
    """Prompts to complete."""

    max_tokens: MaxTokens = None
    n_predict: MaxTokens = same_as("max_tokens")
    n: int | None = pydantic.Field(None, ge=1)
    best_of: int | None = pydantic.Field(
        None, ge=1, description="Generate this many choices and return the `n` most likely."
    )
    stop: str | list[str] | None = None
    echo: bool | None = pydantic.Field(None, description="Return the prompt before the completion.")
    logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    user: Label = None


def list_prompts(request: PromptFields) -> list[str | list[int]]:
    """Return the prompts of a request, each a text or a list of tokens."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return cast(list[str | list[int]], list(prompt))
