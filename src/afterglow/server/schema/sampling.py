"""How the next token is chosen, as requests write it: OpenAI's fields, and llama.cpp's beside them."""

from __future__ import annotations

from typing import Literal, TypeAlias

import pydantic

from afterglow.llama.sampling import Sampling
from afterglow.server.errors import invalid_request_error
from afterglow.server.schema.base import StrictModel

FORBIDDEN_BIAS = -100.0  # a bias that forbids a token
OverflowPolicy: TypeAlias = Literal["refuse", "shift", "truncate_middle"]


class SamplingFields(StrictModel):
    """What all requests for answers share. Absent fields are OpenAI's defaults: temperature 1, nothing cut off."""

    temperature: float | None = pydantic.Field(None, ge=0, le=100, description="0 takes the most likely token.")
    top_p: float | None = pydantic.Field(None, ge=0, le=1)
    presence_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    frequency_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = pydantic.Field(
        None, description="Token numbers with what is added to their logits, -100 to 100; -100 forbids the token."
    )
    seed: int | None = pydantic.Field(None, ge=-(2**63), le=2**63 - 1)

    top_k: int | None = pydantic.Field(None, ge=0, le=2**31 - 1)
    min_p: float | None = pydantic.Field(None, ge=0, le=1)
    typical_p: float | None = pydantic.Field(None, ge=0, le=1)
    top_n_sigma: float | None = pydantic.Field(None, ge=-1e6, le=1e6)
    repeat_penalty: float | None = pydantic.Field(None, ge=1e-6, le=1e6)
    repeat_last_n: int | None = pydantic.Field(
        None, ge=0, le=1_000_000, description="Tokens that penalties look back; absent: 64, or all for OpenAI's two."
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
        None, gt=0, le=1e6, description="Seconds; what there is by then is the answer."
    )
    overflow: OverflowPolicy | None = pydantic.Field(
        None, description="What to do with a prompt that is too long; absent: refuse it."
    )


SAMPLING_FIELD_NAMES = (
    *("temperature", "top_p", "seed", "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability"),
    *("xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length", "mirostat", "mirostat_tau", "mirostat_eta"),
    *(
        "presence_penalty",
        "frequency_penalty",
        "repeat_penalty",
        "repeat_last_n",
        "dynatemp_range",
        "dynatemp_exponent",
    ),
)


def build_sampling(fields: SamplingFields, *, context_length: int, vocabulary_size: int) -> Sampling:
    """The choice that a request asks for.

    >>> sampling_of(SamplingFields(top_k=5), context_length=4096, vocabulary=32000).temperature
    1.0
    """
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for name in SAMPLING_FIELD_NAMES:
        if (value := getattr(fields, name)) is not None:
            values[name] = value
    if (fields.presence_penalty or fields.frequency_penalty) and fields.repeat_last_n is None:
        values["repeat_last_n"] = min(context_length, 1_000_000)
    return Sampling(**values, logit_bias=parse_logit_bias(fields.logit_bias or {}, vocabulary_size))  # type: ignore[arg-type]


def parse_logit_bias(bias: dict[str, float], vocabulary_size: int) -> dict[int, float]:
    """Biases by token. Names of tokens that do not exist are refused."""
    read = {}
    for name, value in bias.items():
        if not name.isascii() or not name.isdigit() or int(name) >= vocabulary_size:
            raise invalid_request_error(
                "logit_bias", f"`logit_bias` must name tokens from 0 to {vocabulary_size - 1}, not {name[:40]!r}"
            )
        if not FORBIDDEN_BIAS <= value <= -FORBIDDEN_BIAS:
            raise invalid_request_error("logit_bias", f"`logit_bias` must be from -100 to 100, not {value:g}")
        read[int(name)] = float("-inf") if value == FORBIDDEN_BIAS else value
    return read
