"""The body of /v1/completions."""

from __future__ import annotations

from typing import TypeAlias, cast

import pydantic

from afterglow.server.schema.base import Label, NameField
from afterglow.server.schema.chat import StreamOptions
from afterglow.server.schema.sampling import SamplingFields

CompletionPrompt: TypeAlias = str | list[str] | list[int] | list[list[int]]


class PromptFields(SamplingFields):
    """What is to be continued: the part of the body that makes the prompt."""

    model: NameField
    prompt: CompletionPrompt = pydantic.Field(description="Text or tokens, or a list of either.")
    suffix: str | None = pydantic.Field(None, description="What comes after; for models that can fill in.")


class CompletionRequest(PromptFields):
    """A text to be continued."""

    max_tokens: int | None = pydantic.Field(None, ge=0, le=2**31 - 1, description="Absent: 16, as OpenAI has it.")
    n: int | None = pydantic.Field(None, ge=1)
    best_of: int | None = pydantic.Field(None, ge=1, description="So many are made, the `n` likeliest returned.")
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = pydantic.Field(None, description="Give the prompt back before the answer.")
    logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    user: Label = None
    ignore_eos: bool | None = pydantic.Field(None, description="Go on after the model's own end.")


def list_prompts(request: PromptFields) -> list[str | list[int]]:
    """The prompts of a request, each a text or tokens."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return cast(list[str | list[int]], list(prompt))
