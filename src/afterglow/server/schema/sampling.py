"""Sampling fields of requests: those of OpenAI and those of llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pydantic

from afterglow.chat.prompt import TruncationPolicy
from afterglow.llama.sampling import Sampling
from afterglow.server.errors import invalid_request_error
from afterglow.server.schema.base import StrictModel

FORBIDDEN_BIAS = -100.0  # forbids the token


class SamplingFields(StrictModel):
    """Fields of all generation requests. Absent fields have the sampling defaults of the model."""

    temperature: float | None = pydantic.Field(None, ge=0, le=100, description="0 selects the most likely token.")
    top_p: float | None = pydantic.Field(None, ge=0, le=1)
    presence_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    frequency_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = pydantic.Field(
        None, description="Maps token numbers to a bias from -100 to 100; -100 forbids the token."
    )
    seed: int | None = pydantic.Field(None, ge=-(2**63), le=2**63 - 1)

    top_k: int | None = pydantic.Field(None, ge=0, le=2**31 - 1)
    min_p: float | None = pydantic.Field(None, ge=0, le=1)
    typical_p: float | None = pydantic.Field(None, ge=0, le=1)
    top_n_sigma: float | None = pydantic.Field(None, ge=-1e6, le=1e6)
    repeat_penalty: float | None = pydantic.Field(None, ge=1e-6, le=1e6)
    repeat_last_n: int | None = pydantic.Field(
        None,
        ge=0,
        le=1_000_000,
        description="Window of the penalties in tokens; default: 64, or the context with OpenAI's two.",
    )
    xtc_probability: float | None = pydantic.Field(None, ge=0, le=1)
    xtc_threshold: float | None = pydantic.Field(None, ge=0, le=1)
    dry_multiplier: float | None = pydantic.Field(None, ge=0, le=1e6)
    dry_base: float | None = pydantic.Field(None, ge=1, le=1e6)
    dry_allowed_length: int | None = pydantic.Field(None, ge=0, le=1_000_000)
    dynatemp_range: float | None = pydantic.Field(None, ge=0, le=100)
    dynatemp_exponent: float | None = pydantic.Field(None, ge=0, le=100)
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: float | None = pydantic.Field(None, ge=0, le=1e6)
    mirostat_eta: float | None = pydantic.Field(None, ge=0, le=1e6)

    deadline: float | None = pydantic.Field(
        None, gt=0, le=1e6, description="Seconds until generation stops with what has been generated."
    )
    overflow: TruncationPolicy | None = pydantic.Field(
        None, description="Policy for prompts that leave no space for the response; default: refuse."
    )


SAMPLING_FIELD_NAMES = tuple(
    name for name in SamplingFields.model_fields if name not in ("logit_bias", "deadline", "overflow")
)


def build_sampling(
    fields: SamplingFields, defaults: Sampling, *, context_length: int, vocabulary_size: int
) -> Sampling:
    """Build the sampling parameters of a request: those of the model, with the fields that are set.

    >>> build_sampling(SamplingFields(top_k=5), Sampling(), context_length=4096, vocabulary_size=32000).temperature
    0.8
    """
    values = {name: value for name in SAMPLING_FIELD_NAMES if (value := getattr(fields, name)) is not None}
    if (fields.presence_penalty or fields.frequency_penalty) and fields.repeat_last_n is None:
        values["repeat_last_n"] = min(context_length, 1_000_000)
    return replace(defaults, **values, logit_bias=parse_logit_bias(fields.logit_bias or {}, vocabulary_size))


def parse_logit_bias(bias: dict[str, float], vocabulary_size: int) -> dict[int, float]:
    """Parse biases by token. Rejects tokens that do not exist."""
    biases = {}
    for name, value in bias.items():
        if not name.isascii() or not name.isdigit() or int(name) >= vocabulary_size:
            raise invalid_request_error(
                "logit_bias", f"`logit_bias` keys must be tokens from 0 to {vocabulary_size - 1}, not {name[:40]!r}"
            )
        if not FORBIDDEN_BIAS <= value <= -FORBIDDEN_BIAS:
            raise invalid_request_error("logit_bias", f"`logit_bias` values must be from -100 to 100, not {value:g}")
        biases[int(name)] = float("-inf") if value == FORBIDDEN_BIAS else value
    return biases
