"""Bodies of the Ollama routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import pydantic
from pydantic_core import PydanticCustomError

from afterglow.api.options import suggest_name
from afterglow.server.schema.base import (
    JsonObject,
    KeepAliveField,
    NameField,
    StrictModel,
    convert_integral_floats,
    get_rule,
    hint,
    supports_only,
    unsupported,
)
from afterglow.server.schema.sampling import SamplingFields

FIXED_AT_LOAD = "it is fixed when the model is loaded"
# Options by name: values beyond their range that Ollama accepts, and the value with the same effect.
SWITCHED_OFF: Mapping[str, tuple[Callable[[float], bool], float | None]] = {
    "temperature": (lambda value: value < 0, 0),
    "top_k": (lambda value: value < 0, 0),
    "top_p": (lambda value: value > 1, 1.0),
    "typical_p": (lambda value: value > 1, 1.0),
    "num_ctx": (lambda value: value == 0, None),
}
RequiredModelField: TypeAlias = Annotated[NameField, pydantic.Field(min_length=1)]
OptionalModelField: TypeAlias = Annotated[
    NameField | None, pydantic.Field(description="Default: the only served model.")
]
Think: TypeAlias = bool | Literal["low", "medium", "high", "max"]
Format: TypeAlias = Annotated[
    Literal["", "json"] | JsonObject, pydantic.Field(description="`json`, or the JSON schema of the response.")
]


class OllamaBody(StrictModel):
    """Body of a request. A zero value means that an optional name or a refused field is not set.

    Ollama's own clients are written in Go, which sends `""`, `0`, `[]` or `{}` for fields that are not set.
    """

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_zero_values(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value or not cls._is_unset_by_zero(name)}

    @classmethod
    def _is_unset_by_zero(cls, name: Any) -> bool:
        field = cls.model_fields.get(name)
        if field is None:
            return False
        rule = get_rule(field)
        return name in ("model", "name") or (rule is not None and rule.get("only") == [])


class OllamaOptions(SamplingFields):
    """Options of a request or of a created model: Ollama's, and all other sampling fields of this server."""

    num_predict: int | None = pydantic.Field(
        None, ge=-2, le=2**31 - 1, description="Maximum generated tokens; 0, -1 and -2: until the context is full."
    )
    num_ctx: int | None = pydantic.Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Context length that the request needs. If the model is loaded with less, it is loaded again if "
        "the server allows it (`allow_reload`); otherwise the request is refused.",
    )
    repeat_last_n: int | None = pydantic.Field(
        None, ge=-1, le=1_000_000, description="Window of the penalties in tokens; -1: the context; 0: off."
    )
    stop: str | list[str] | None = None

    num_keep: int | None = hint("a shortened conversation keeps its system message", name="options.num_keep")
    tfs_z: float | None = hint("Ollama has removed this sampler", 1, 1.0, name="options.tfs_z")
    penalize_newline: bool | None = hint("penalties apply to all tokens", True, name="options.penalize_newline")
    num_batch: int | None = hint(FIXED_AT_LOAD, name="options.num_batch")
    num_gpu: int | None = hint(FIXED_AT_LOAD, name="options.num_gpu")
    main_gpu: int | None = hint(FIXED_AT_LOAD, name="options.main_gpu")
    num_thread: int | None = hint(FIXED_AT_LOAD, name="options.num_thread")
    use_mmap: bool | None = hint(FIXED_AT_LOAD, name="options.use_mmap")
    use_mlock: bool | None = hint(FIXED_AT_LOAD, name="options.use_mlock")
    low_vram: bool | None = hint(FIXED_AT_LOAD, False, name="options.low_vram")
    numa: bool | None = hint(FIXED_AT_LOAD, False, name="options.numa")
    f16_kv: bool | None = hint(FIXED_AT_LOAD, True, name="options.f16_kv")
    draft_num_predict: int | None = hint(FIXED_AT_LOAD, name="options.draft_num_predict")
    logits_all: bool | None = hint("use `logprobs`", False, name="options.logits_all")
    vocab_only: bool | None = supports_only(False, reason="there would be no response")
    embedding_only: bool | None = hint("every model computes embeddings", False, name="options.embedding_only")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        unknown = [name for name in values if name not in cls.model_fields] if isinstance(values, dict) else []
        if unknown:
            suggestion = suggest_name(str(unknown[0]), cls.model_fields)
            message = "has no option {name}: {suggestion}"
            context = {"name": repr(str(unknown[0])[:200]), "suggestion": suggestion}
            raise PydanticCustomError("unsupported_parameter", message, context)
        return values

    @pydantic.model_validator(mode="before")
    @classmethod
    def _convert_integral_floats(cls, values: Any) -> Any:
        return convert_integral_floats(values)

    @pydantic.field_validator(*SWITCHED_OFF, mode="before")
    @classmethod
    def _convert_switched_off(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Convert values beyond the range with the meaning that they have in Ollama, e.g. -1 for all tokens."""
        is_beyond, meaning = SWITCHED_OFF[info.field_name or ""]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return meaning if is_number and is_beyond(value) else value


class OllamaFunctionCall(StrictModel):
    name: NameField
    arguments: JsonObject = pydantic.Field(default_factory=dict)
    description: str | None = hint("the tools of the request describe functions")
    index: int | None = pydantic.Field(None, description="Position of the call; calls are in this order anyway.")


class OllamaToolCall(StrictModel):
    function: OllamaFunctionCall
    id: str | None = pydantic.Field(None, description="Default: calls and results belong together by name and order.")
    type: Literal["function"] | None = None


class OllamaMessage(StrictModel):
    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        pydantic.BeforeValidator(lambda role: role.lower() if isinstance(role, str) else role),
    ]
    content: str | None = None
    thinking: str | None = pydantic.Field(None, description="Reasoning of the model's own message.")
    images: list[str] | None = pydantic.Field(None, description="Images in base64; they precede the text.")
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: NameField | None = pydantic.Field(None, description="Function whose result a tool message is.")
    tool_call_id: str | None = None


class OllamaFunction(StrictModel):
    name: NameField
    description: str | None = None
    parameters: JsonObject | None = pydantic.Field(None, description="JSON schema of an object.")
    strict: bool | None = pydantic.Field(None, description="Arguments always conform to the schema.")


class OllamaTool(StrictModel):
    type: Literal["function"] | None = None
    function: OllamaFunction
    items: Any = unsupported("describe parameters in `function.parameters`")


class OllamaGenerationBody(OllamaBody):
    """Fields of /api/chat and /api/generate."""

    model: OptionalModelField = None
    stream: bool | None = pydantic.Field(None, description="Default: true.")
    format: Format | None = None
    options: OllamaOptions | None = None
    think: Think | None = pydantic.Field(None, description="Whether the model reasons, or its effort.")
    keep_alive: KeepAliveField = None
    truncate: bool | None = pydantic.Field(
        None, description="Drop the oldest messages of a conversation that is too long. Default: it is refused."
    )
    shift: bool | None = hint("a response ends with the reason `length` when the context is full", False)
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)


class OllamaChatRequest(OllamaGenerationBody):
    """A conversation to continue. Without messages, the model is loaded, or unloaded if `keep_alive` is 0."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | None = pydantic.Field(
        None, description="Whether the model may or must call a tool. Ollama has no such field; its clients get `auto`."
    )


class OllamaGenerateRequest(OllamaGenerationBody):
    """A prompt to respond to. Without a prompt, the model is loaded, or unloaded if `keep_alive` is 0."""

    prompt: str | None = None
    suffix: str | None = pydantic.Field(None, description="Text after the response, for models with infill tokens.")
    system: str | None = None
    template: str | None = pydantic.Field(None, description="Jinja chat template instead of that of the model.")
    raw: bool | None = pydantic.Field(None, description="Use the prompt as it is, without a template.")
    images: list[str] | None = pydantic.Field(None, description="Images in base64; they precede the prompt.")
    context: list[int] | None = pydantic.Field(
        None, description="`context` of an earlier response: the prompt continues its conversation."
    )
    width: Any = unsupported("models generate text only")
    height: Any = unsupported("models generate text only")
    steps: Any = unsupported("models generate text only")


class OllamaEmbedRequest(OllamaBody):
    """Texts to embed."""

    model: OptionalModelField = None
    input: str | list[str]
    truncate: bool | None = pydantic.Field(None, description="Cut the end of texts that are too long. Default: refuse.")
    dimensions: int | None = pydantic.Field(None, ge=0, description="Dimensions to return; 0: all.")
    options: OllamaOptions | None = None
    keep_alive: KeepAliveField = None


class OllamaEmbeddingsRequest(OllamaBody):
    """A text to embed, in the old form."""

    model: OptionalModelField = None
    prompt: str | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAliveField = None


class NamedModel(OllamaBody):
    """Body that names a model, by `model` or by its old name `name`."""

    model: NameField | None = None
    name: NameField | None = pydantic.Field(None, description="Old name of `model`.")

    @pydantic.model_validator(mode="after")
    def _check_name(self) -> NamedModel:
        if not (self.model or self.name):
            raise PydanticCustomError("missing_field", "is missing", {"name": "model"})
        return self

    @property
    def model_name(self) -> str:
        """The name, from either field."""
        return self.model or self.name or ""


class OllamaShowRequest(OllamaBody):
    """A model to describe."""

    model: OptionalModelField = None
    name: NameField | None = pydantic.Field(None, description="Old name of `model`.")
    verbose: bool | None = pydantic.Field(None, description="Also return long lists, e.g. the vocabulary.")
    system: Any = unsupported("create a model with this system prompt")
    template: Any = unsupported("create a model with this template")
    options: Any = unsupported("create a model with these parameters")


class OllamaDeleteRequest(NamedModel):
    """A model to delete."""


class OllamaPullRequest(NamedModel):
    """A model to download."""

    stream: bool | None = pydantic.Field(None, description="Default: true.")
    insecure: bool | None = hint("the sources of models are fixed", False)
    username: Any = unsupported("gated repositories need the token of the hub's own library")
    password: Any = unsupported("gated repositories need the token of the hub's own library")


class OllamaCopyRequest(OllamaBody):
    """A model and its further name."""

    source: RequiredModelField
    destination: RequiredModelField


class OllamaCreateRequest(NamedModel):
    """A name for a model with a system prompt, a template, messages and parameters of its own."""

    from_: NameField | None = pydantic.Field(None, alias="from", description="Model that the new one uses; required.")
    system: str | None = None
    template: str | None = pydantic.Field(None, description="Jinja chat template instead of that of the model.")
    parameters: OllamaOptions | None = None
    messages: list[OllamaMessage] | None = pydantic.Field(None, description="First messages of every conversation.")
    license: str | list[str] | None = None
    stream: bool | None = pydantic.Field(None, description="Default: true.")
    files: Any = unsupported("put model files into the models directory, or name them in `afterglow serve`")
    adapters: Any = unsupported("created models have no adapters")
    draft_files: Any = unsupported("name a drafter in `afterglow serve --draft`")
    quantize: Any = unsupported("the server does not quantize models")
    quantization: Any = unsupported("the server does not quantize models")
    draft_quantize: Any = unsupported("the server does not quantize models")
    modelfile: Any = unsupported("use the fields `from`, `system`, `template` and `parameters`")
    path: Any = unsupported("use `from`")
    remote_host: Any = unsupported("the server does not forward requests")
    renderer: Any = unsupported("prompts are rendered with Jinja templates; use `template`")
    parser: Any = unsupported("responses are parsed as the template of the model requires")
    requires: Any = unsupported("versions of Ollama do not apply")
    info: Any = unsupported("the facts of a model come from its file")

    @pydantic.model_validator(mode="after")
    def _check_source(self) -> OllamaCreateRequest:
        """Last, so that a field that would replace `from` is refused by name."""
        if not self.from_:
            raise PydanticCustomError("missing_field", "is missing", {"name": "from"})
        return self

    @property
    def source(self) -> str:
        """The model that the new one uses."""
        return self.from_ or ""
