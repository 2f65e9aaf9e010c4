"""Bodies of the llama-server routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

import pydantic

from afterglow.engine.types.adapters import MAX_SCALE
from afterglow.llama.checks import INT32_MAX
from afterglow.server.schema.base import (
    JsonObject,
    KeepAliveField,
    OptionalModel,
    StrictModel,
    convert_integral_floats,
    hint,
    same_as,
    supports_only,
)
from afterglow.server.schema.sampling import LoraField, SamplingFields

BiasValue: TypeAlias = float | Literal[False]
BiasPair: TypeAlias = Annotated[tuple[int | str, BiasValue], pydantic.Field(strict=False)]  # a list in JSON
LogitBias: TypeAlias = dict[str, BiasValue] | list[BiasPair]
FIXED_DRAFTER = "the drafter is chosen when the model is loaded"


class PromptObject(StrictModel):
    prompt_string: str
    multimodal_data: list[Any] | None = supports_only([], reason="send images and audio to /v1/chat/completions")


MixedPrompt: TypeAlias = list[int | str]  # tokens and texts of one prompt
LlamaPrompt: TypeAlias = str | PromptObject | list[int | str | PromptObject | MixedPrompt]
PredictLimit: TypeAlias = Annotated[
    Annotated[int, pydantic.Field(ge=-2, le=2**31 - 1)] | None,
    pydantic.Field(description="Maximum of generated tokens; -1, -2: until the context is full; 0: only the prompt."),
]


class LlamaGenerationFields(SamplingFields):
    """Fields of /completion and /infill."""

    model: OptionalModel = None
    n_predict: PredictLimit = None
    max_tokens: PredictLimit = same_as("n_predict")
    max_completion_tokens: PredictLimit = same_as("n_predict")
    logit_bias: LogitBias | None = pydantic.Field(  # type: ignore[assignment]
        None,
        description="Pairs of token or text and bias, or an object, in which a key of digits is a token; false forbids "
        "the token. A text stands for all of its tokens.",
    )
    n_cmpl: int | None = pydantic.Field(None, ge=1, description="Number of completions of each prompt.")
    n: int | None = same_as("n_cmpl")
    n_probs: int | None = pydantic.Field(
        None, ge=0, le=1000, description="Number of most likely tokens to return with the probability of each token."
    )
    stop: str | list[str] | None = None
    stream: bool | None = None
    return_tokens: bool | None = pydantic.Field(None, description="Return the generated tokens in `tokens`.")
    return_progress: bool | None = pydantic.Field(None, description="Stream `prompt_progress` during prefill.")
    timings_per_token: bool | None = pydantic.Field(None, description="Stream `timings` with every token.")
    response_fields: list[str] | None = pydantic.Field(
        None, description="Fields to return, e.g. `content` or `generation_settings/n_predict`. Default: all."
    )
    grammar: str | None = pydantic.Field(None, description="Grammar of the output in GBNF.")
    json_schema: JsonObject | None = pydantic.Field(None, description="JSON schema of the output.")
    id_slot: int | None = pydantic.Field(
        None, ge=-1, description="Sequence to use; -1: the planner chooses the one with the longest cached prefix."
    )
    n_keep: int | None = pydantic.Field(
        None, ge=-1, description="Leading tokens that `overflow: shift` never drops; -1: the whole prompt."
    )
    t_max_predict_ms: int | None = pydantic.Field(
        None,
        ge=-1,
        le=INT32_MAX,
        description="Milliseconds after the first token from which on the next line end ends the output; 0, -1: none.",
    )
    n_indent: int | None = pydantic.Field(
        None, ge=0, le=INT32_MAX, description="A line after the first with less indentation ends the output; 0: none."
    )
    keep_alive: KeepAliveField = None

    # Hints: they tune llama-server and do not change the response.
    t_max_prompt_ms: int | None = hint("llama-server does not implement it", 0, -1)
    n_discard: int | None = hint("`overflow: shift` drops a quarter of the context", 0)
    n_cache_reuse: int | None = hint("every prompt uses the prefix cache", 0)
    sse_ping_interval: int | None = hint("the server setting `ping_seconds` sets the interval")
    backend_sampling: bool | None = hint("samplers run on the CPU", False)
    speculative_n_min: Any = hint(FIXED_DRAFTER, alias="speculative.n_min")
    speculative_n_max: Any = hint(FIXED_DRAFTER, alias="speculative.n_max")
    speculative_p_min: Any = hint(FIXED_DRAFTER, alias="speculative.p_min")
    speculative_type: Any = hint(FIXED_DRAFTER, alias="speculative.type")
    speculative_ngram_size_n: Any = hint(FIXED_DRAFTER, alias="speculative.ngram_size_n")
    speculative_ngram_size_m: Any = hint(FIXED_DRAFTER, alias="speculative.ngram_size_m")
    speculative_ngram_min_hits: Any = hint(FIXED_DRAFTER, alias="speculative.ngram_min_hits")
    stream_options: Any = hint("the last event has the counts")
    reasoning_format: str | None = hint("a completion is only text", "none")
    reasoning_control: bool | None = hint("a completion is only text", False)
    reasoning_budget_start_tag: Any = hint("a completion is only text")
    reasoning_budget_end_tags: Any = hint("a completion is only text")
    reasoning_budget_message: Any = hint("a completion is only text")

    # Refused: ignoring them would change the response.
    post_sampling_probs: bool | None = supports_only(False, reason="probabilities are those of the model")
    min_keep: int | None = supports_only(0, reason="samplers have no minimum")
    adaptive_target: float | None = supports_only(-1, -1.0, reason="there is no adaptive sampler")
    adaptive_decay: float | None = hint("there is no adaptive sampler")
    grammar_lazy: bool | None = supports_only(False, reason="use `tools` of /v1/chat/completions")
    grammar_triggers: list[Any] | None = supports_only([], reason="use `tools` of /v1/chat/completions")
    preserved_tokens: list[Any] | None = supports_only([], reason="use `tools` of /v1/chat/completions")
    reasoning_budget_tokens: int | None = supports_only(-1, reason="use `reasoning_budget` of /v1/chat/completions")
    echo: bool | None = supports_only(False, reason="`prompt` of the result has the prompt")
    continue_final_message: bool | None = supports_only(False, reason="use /v1/chat/completions")
    verbose: bool | None = hint("every result has the prompt", False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _convert_integral_floats(cls, values: Any) -> Any:
        return convert_integral_floats(values)

    @pydantic.field_validator("temperature", mode="before")
    @classmethod
    def _convert_negative_temperature(cls, value: Any) -> Any:
        """Convert a negative temperature to 0: both select the most likely token in llama.cpp."""
        return 0.0 if isinstance(value, int | float) and value < 0 else value


class LlamaCompletionRequest(LlamaGenerationFields):
    """Prompts to complete."""

    prompt: LlamaPrompt = pydantic.Field(
        description="A text; a list of tokens, or of tokens and texts; an object with `prompt_string`; or a list of "
        "such prompts."
    )


class ExtraFile(StrictModel):
    text: str
    filename: str | None = None
    time: Any = hint("files are used in the order of the list", name="input_extra.time")


class LlamaInfillRequest(LlamaGenerationFields):
    """Text before and after the text to generate."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = pydantic.Field(None, description="Other files of the project.")
    prompt: str | None = pydantic.Field(None, description="End of the text before the gap; control tokens are parsed.")


class LlamaEmbeddingRequest(StrictModel):
    """Texts or tokens to embed."""

    model: OptionalModel = None
    content: LlamaPrompt | None = pydantic.Field(None, description="As `prompt` of /completion.")
    input: LlamaPrompt | None = same_as("content")
    embd_normalize: int | None = pydantic.Field(
        None,
        ge=0,
        le=INT32_MAX,
        description="Norm of the vectors: 0 maximum, 1 taxicab, 2 Euclidean (default), p: p-norm.",
    )
    encoding_format: Literal["float", "base64"] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _convert_integral_floats(cls, values: Any) -> Any:
        return convert_integral_floats(values)


class LoraAdapterItem(StrictModel):
    """An adapter as `GET /lora-adapters` lists it. `id` counts if there is also a name."""

    id: int | None = pydantic.Field(None, ge=0)
    name: str | None = pydantic.Field(None, max_length=256)
    path: str | None = None
    scale: float | None = pydantic.Field(None, ge=-MAX_SCALE, le=MAX_SCALE)

    @pydantic.model_validator(mode="after")
    def _check_name(self) -> Self:
        self.to_field()
        return self

    def to_field(self) -> LoraField:
        """Convert to the field of a request."""
        return LoraField(name=self.name if self.id is None else None, id=self.id, scale=self.scale)


class SlotFileRequest(StrictModel):
    """File of a saved slot."""

    filename: str | None = pydantic.Field(None, min_length=1, max_length=255)
    model: OptionalModel = None
