"""Conversion of llama-server bodies to generation requests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from afterglow.api.model import Model
from afterglow.api.options import GenerationOptions
from afterglow.api.prompts import FittedPrompt
from afterglow.chat.constraints.response_format import forbid_additional_properties
from afterglow.server import limits
from afterglow.server.errors import invalid_request_error
from afterglow.server.generation_requests import PlannedPrompt, PromptRequest
from afterglow.server.llamacpp.schema import LlamaGenerationFields, LogitBias
from afterglow.server.schema.base import list_synonyms
from afterglow.server.schema.sampling import FORBIDDEN_BIAS, SamplingFields
from afterglow.server.state import ServerState

RANDOM_SEED = 2**32 - 1  # llama.cpp's value
WHOLE_PROMPT = -1  # value of `n_keep`


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPromptRequest(PromptRequest):
    """Prompts to complete in a given sequence, until a line ends them."""

    sequence: int | None = None  # None: the planner chooses
    line_deadline: float | None = None  # as in `Request`, like the next
    min_indent: int = 0

    def build_options(self, state: ServerState, model: Model) -> GenerationOptions:
        """Build the options of `Model.build_request`."""
        return {**PromptRequest.build_options(self, state, model), "sequence": self.sequence}

    def plan(self, model: Model, options: GenerationOptions, cancel: threading.Event) -> list[PlannedPrompt]:
        """Build the engine requests. Blocking."""
        limits = {"line_deadline": self.line_deadline, "min_indent": self.min_indent}
        return [
            replace(prompt, request=replace(prompt.request, **limits))  # type: ignore[arg-type]
            for prompt in PromptRequest.plan(self, model, options, cancel)
        ]


def build_request(
    state: ServerState, model: Model, body: LlamaGenerationFields, prompts: Sequence[list[int]], salt: str
) -> SlotPromptRequest:
    """Convert a body with tokenized prompts to a generation request. Blocking."""
    if not prompts or not all(prompts):
        raise invalid_request_error("prompt", "`prompt` must not be empty")
    limits.check_limit(state.settings, "max_prompts", "prompt", len(prompts))
    slots = model.engine_info.sequences
    if body.id_slot is not None and body.id_slot >= slots:
        raise invalid_request_error("id_slot", f"`id_slot` must be from -1 to {slots - 1}, not {body.id_slot}")
    return SlotPromptRequest(
        prompts=[fit_prompt(model, body, tokens) for tokens in prompts],
        sampling_fields=build_sampling_fields(body, model),
        n=body.n_cmpl or 1,
        max_tokens=get_max_tokens(body),
        response_format=build_response_format(body),
        stop=limits.parse_stops(drop_empty_stops(body.stop), state.settings),
        logprobs=body.n_probs or None,
        salt=salt,
        keep_alive=body.keep_alive,
        sequence=None if body.id_slot in (None, -1) else body.id_slot,
        line_deadline=get_line_deadline(body.t_max_predict_ms),
        min_indent=body.n_indent or 0,
    )


def fit_prompt(model: Model, body: LlamaGenerationFields, tokens: list[int]) -> FittedPrompt:
    """Check the length of a prompt, or truncate it by the overflow policy, which keeps the first `n_keep` tokens."""
    keep = None if not body.n_keep else len(tokens) if body.n_keep == WHOLE_PROMPT else body.n_keep
    return model.fit_prompt(tokens, body.overflow or "refuse", get_max_tokens(body), keep_start=keep)


def get_max_tokens(body: LlamaGenerationFields) -> int | None:
    """Return the maximum number of generated tokens; None for llama-server's -1 and -2.

    >>> get_max_tokens(LlamaGenerationFields(n_predict=-1)), get_max_tokens(LlamaGenerationFields(n_predict=8))
    (None, 8)
    """
    return None if body.n_predict is None or body.n_predict < 0 else body.n_predict


def get_line_deadline(milliseconds: int | None) -> float | None:
    """Return the seconds of `t_max_predict_ms`; None for llama-server's -1 and 0.

    >>> get_line_deadline(500), get_line_deadline(0)
    (0.5, None)
    """
    return milliseconds / 1000 if milliseconds is not None and milliseconds > 0 else None


def drop_empty_stops(stop: str | list[str] | None) -> list[str]:
    """Return the stop strings that are not empty: llama-server ignores the others."""
    return [text for text in ([stop] if isinstance(stop, str) else stop or []) if text]


def build_response_format(body: LlamaGenerationFields) -> dict[str, Any] | None:
    """Convert `grammar` or `json_schema` to a response format.

    As in llama-server, objects have no properties that the schema does not name.
    """
    if body.grammar and body.json_schema is not None:
        raise invalid_request_error("json_schema", "`grammar` and `json_schema` exclude each other: set one of them")
    if body.json_schema is not None:
        schema = forbid_additional_properties(body.json_schema)
        return {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
    return {"type": "grammar", "grammar": body.grammar, "syntax": "gbnf"} if body.grammar else None


def build_sampling_fields(body: LlamaGenerationFields, model: Model) -> SamplingFields:
    """Convert the fields of a body to the sampling fields of the server."""
    names = set(SamplingFields.model_fields) - list_synonyms(SamplingFields) - {"logit_bias"}
    values = body.model_dump(include=names, exclude_none=True)
    if values.get("seed") in (-1, RANDOM_SEED):
        del values["seed"]
    if body.logit_bias:
        values["logit_bias"] = build_logit_bias(body.logit_bias, model)
    return SamplingFields.model_validate(values)


def build_logit_bias(bias: LogitBias, model: Model) -> dict[str, float]:
    """Return the biases by token. A text stands for all of its tokens. In an object, digits are a token."""
    biases: dict[str, float] = {}
    is_object = isinstance(bias, dict)
    for target, value in bias.items() if isinstance(bias, dict) else bias:
        is_token = isinstance(target, int) or (is_object and target.isascii() and target.isdigit())
        tokens = [target] if is_token else model.tokenize(str(target))
        biases |= {str(token): FORBIDDEN_BIAS if value is False else float(value) for token in tokens}
    return biases
