"""Sampling fields of requests: those of OpenAI and those of llama.cpp."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Annotated, Literal, Self, TypeAlias

import pydantic
from pydantic_core import PydanticCustomError

from afterglow.chat.prompt import TruncationPolicy
from afterglow.engine.types.adapters import MAX_SCALE
from afterglow.llama.sampling import SAMPLER_NAMES, Sampling
from afterglow.server.errors import invalid_request_error
from afterglow.server.priority import PriorityField
from afterglow.server.schema.base import StrictModel, same_as

LLAMA_FIELD_NAMES = {field.name for field in fields(Sampling)}
WHOLE_CONTEXT = -1  # window of the penalties
FORBIDDEN_BIAS = -100.0  # forbids the token
TOKEN_PATTERN = re.compile(r"[0-9]{1,10}")  # Python reads no integers of thousands of digits


RepeatPenalty: TypeAlias = Annotated[
    Annotated[float, pydantic.Field(ge=1e-6, le=1e6)] | None,
    pydantic.Field(description="Divides the logits of tokens that occurred; 1: off."),
]


# llama-server's other names of samplers: without underscores or with hyphens, and single letters in one text.
SAMPLER_ALIASES = {name.replace("_", ""): name for name in SAMPLER_NAMES} | {
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    "typical": "typ_p",
    "typicalp": "typ_p",
}
SAMPLER_LETTERS = dict(zip("edskypmxti", SAMPLER_NAMES, strict=True))


def parse_samplers(value: str | list[str]) -> list[str]:
    """Return the names of samplers from other names of them, or from a text with a letter for each.

    >>> parse_samplers(["top-k", "temp"]), parse_samplers("kpi")
    (['top_k', 'temperature'], ['top_k', 'top_p', 'infill'])
    """
    known = SAMPLER_LETTERS if isinstance(value, str) else SAMPLER_ALIASES
    names = []
    for given in value:
        name = known.get(given if isinstance(value, str) else re.sub("[_-]", "", given.lower()))
        if name is None:
            choices = ", ".join(SAMPLER_LETTERS if isinstance(value, str) else SAMPLER_NAMES)
            raise PydanticCustomError(
                "sampler", "has {given}, which is not one of {choices}", {"given": repr(given[:40]), "choices": choices}
            )
        names.append(name)
    return names


class LoraField(StrictModel):
    """A LoRA adapter of the model and its scale."""

    name: str | None = pydantic.Field(None, max_length=256, description="Name of the adapter.")
    id: int | None = pydantic.Field(None, ge=0, description="Its number in the order of declaration, from 0.")
    scale: float | None = pydantic.Field(
        None, ge=-MAX_SCALE, le=MAX_SCALE, description="Default: as declared; 0: not used."
    )

    @pydantic.model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.name is None) == (self.id is None):
            raise PydanticCustomError("lora_name", "must have either `name` or `id`")
        return self


class SamplingFields(StrictModel):
    """Fields of all generation requests. Absent fields have the sampling defaults of the model."""

    temperature: float | None = pydantic.Field(None, ge=0, le=100, description="0 selects the most likely token.")
    top_p: float | None = pydantic.Field(
        None, ge=0, le=1, description="Sample from the most likely tokens that together have this probability."
    )
    presence_penalty: float | None = pydantic.Field(
        None, ge=-2, le=2, description="Lowers the logits of tokens that occurred."
    )
    frequency_penalty: float | None = pydantic.Field(
        None, ge=-2, le=2, description="Lowers the logits of tokens by how often they occurred."
    )
    logit_bias: dict[str, float] | None = pydantic.Field(
        None, description="Maps token numbers to a bias from -100 to 100; -100 forbids the token."
    )
    seed: int | None = pydantic.Field(None, ge=-(2**63), le=2**63 - 1, description="Makes sampling repeatable.")

    top_k: int | None = pydantic.Field(
        None, ge=-1, le=2**31 - 1, description="Sample from the k most likely tokens; 0 or -1: from all."
    )
    min_p: float | None = pydantic.Field(
        None, ge=0, le=1, description="Sample from tokens with at least this fraction of the highest probability."
    )
    typical_p: float | None = pydantic.Field(None, ge=0, le=1, description="Locally typical sampling; 1: off.")
    top_n_sigma: float | None = pydantic.Field(
        None,
        ge=-1e6,
        le=1e6,
        description="Sample from tokens within n standard deviations of the highest logit; negative: off.",
    )
    repeat_penalty: RepeatPenalty = None
    repetition_penalty: RepeatPenalty = same_as("repeat_penalty")
    repeat_last_n: int | None = pydantic.Field(
        None,
        ge=-1,
        le=1_000_000,
        description="Window of the penalties in tokens; -1: the context. Default: 64; with OpenAI's two, the context.",
    )
    xtc_probability: float | None = pydantic.Field(
        None, ge=0, le=1, description="XTC: probability of removing the most likely tokens."
    )
    xtc_threshold: float | None = pydantic.Field(
        None, ge=0, le=1, description="XTC: only tokens above this probability are removed."
    )
    dry_multiplier: float | None = pydantic.Field(
        None, ge=0, le=1e6, description="DRY: strength of the penalty on repeated phrases; 0: off."
    )
    dry_base: float | None = pydantic.Field(
        None, ge=1, le=1e6, description="DRY: growth of the penalty with the length of the phrase."
    )
    dry_allowed_length: int | None = pydantic.Field(
        None, ge=0, le=1_000_000, description="DRY: longest phrase without a penalty."
    )
    dry_penalty_last_n: int | None = pydantic.Field(
        None, ge=-1, le=1_000_000, description="DRY: window in tokens; -1: the context."
    )
    dry_sequence_breakers: list[str] | None = pydantic.Field(
        None, max_length=64, description="DRY: texts that end a phrase."
    )
    dynatemp_range: float | None = pydantic.Field(
        None, ge=0, le=100, description="The temperature varies by this with the entropy; 0: off."
    )
    dynatemp_exponent: float | None = pydantic.Field(
        None, ge=0, le=100, description="Exponent of the dynamic temperature."
    )
    mirostat: Literal[0, 1, 2] | None = pydantic.Field(None, description="Mirostat 1 or 2; 0: off.")
    mirostat_tau: float | None = pydantic.Field(None, ge=0, le=1e6, description="Mirostat: target of the surprise.")
    mirostat_eta: float | None = pydantic.Field(None, ge=0, le=1e6, description="Mirostat: learning rate.")

    samplers: Annotated[
        Annotated[str | Annotated[list[str], pydantic.Field(max_length=64)], pydantic.AfterValidator(parse_samplers)]
        | None,
        pydantic.Field(
            description="Samplers to apply, in this order; others have no effect: `penalties`, `dry`, `top_n_sigma`, "
            "`top_k`, `typ_p`, `top_p`, `min_p`, `xtc`, `temperature` (default), and `infill`. Or a text with the "
            "letters of llama-server."
        ),
    ] = None

    min_tokens: int | None = pydantic.Field(
        None, ge=0, le=2**31 - 1, description="End tokens are forbidden until this many tokens are generated."
    )
    stop_token_ids: list[int] | None = pydantic.Field(
        None,
        max_length=1024,
        description="Tokens that end the output. Their text is part of it, unless they are control tokens.",
    )
    ignore_eos: bool | None = pydantic.Field(None, description="Continue after the end-of-generation token.")
    cache_prompt: bool | None = pydantic.Field(
        None, description="False: compute the whole prompt, without the prefix cache. Default: true."
    )
    cache_salt: str | None = pydantic.Field(
        None, max_length=512, description="Requests with different salts share no cached state."
    )
    lora: list[LoraField] | None = pydantic.Field(
        None,
        max_length=64,
        description="LoRA adapters to use, each an object with `name` or `id`, and `scale`. Default: none.",
    )
    num_ctx: int | None = pydantic.Field(
        None, ge=1, description="Context length that the client needs; refused if that of the model is smaller."
    )
    deadline: float | None = pydantic.Field(
        None, gt=0, le=1e6, description="Seconds until generation stops with what has been generated."
    )
    priority: PriorityField = None
    overflow: TruncationPolicy | None = pydantic.Field(
        None, description="Policy for prompts that leave no space for the response; default: refuse."
    )


SAMPLING_FIELD_NAMES = tuple(name for name in SamplingFields.model_fields if name in LLAMA_FIELD_NAMES - {"logit_bias"})


def build_sampling(
    fields: SamplingFields, defaults: Sampling, *, context_length: int, vocabulary_size: int
) -> Sampling:
    """Build the sampling parameters of a request: those of the model, with the fields that are set.

    >>> build_sampling(SamplingFields(top_k=5), Sampling(), context_length=4096, vocabulary_size=32000).temperature
    0.8
    """
    values = {name: value for name in SAMPLING_FIELD_NAMES if (value := getattr(fields, name)) is not None}
    if (fields.presence_penalty or fields.frequency_penalty) and fields.repeat_last_n is None:
        values["repeat_last_n"] = WHOLE_CONTEXT
    for name in ("repeat_last_n", "dry_penalty_last_n"):
        if values.get(name) == WHOLE_CONTEXT:
            values[name] = min(context_length, 1_000_000)
    values["top_k"] = max(values.get("top_k", defaults.top_k), 0)
    for name in ("dry_sequence_breakers", "samplers"):
        values[name] = tuple(values.get(name, getattr(defaults, name)))
    return replace(defaults, **values, logit_bias=parse_logit_bias(fields.logit_bias or {}, vocabulary_size))


def parse_logit_bias(bias: dict[str, float], vocabulary_size: int) -> dict[int, float]:
    """Parse biases by token. Rejects tokens that do not exist."""
    biases = {}
    for name, value in bias.items():
        if not TOKEN_PATTERN.fullmatch(name) or int(name) >= vocabulary_size:
            raise invalid_request_error(
                "logit_bias", f"`logit_bias` keys must be tokens from 0 to {vocabulary_size - 1}, not {name[:40]!r}"
            )
        if not FORBIDDEN_BIAS <= value <= -FORBIDDEN_BIAS:
            raise invalid_request_error("logit_bias", f"`logit_bias` values must be from -100 to 100, not {value:g}")
        biases[int(name)] = float("-inf") if value == FORBIDDEN_BIAS else value
    return biases
