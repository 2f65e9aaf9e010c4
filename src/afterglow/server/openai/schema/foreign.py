"""Fields that clients of llama-server, vLLM, LM Studio, Ollama and OpenRouter send beside those of OpenAI.

Structured output and limits are honoured. Fields that tune a hosted service or another engine are hints. Fields that
would change the response are refused by name, with what to use instead.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from afterglow.chat.constraints.response_format import forbid_additional_properties
from afterglow.server.errors import invalid_request_error
from afterglow.server.priority import ServiceTier
from afterglow.server.schema.base import (
    JsonObject,
    KeepAliveField,
    NameField,
    StrictModel,
    hint,
    same_as,
    supports_only,
    unsupported,
)
from afterglow.server.settings import KeepAlive

# Fields of other servers with the meaning of `response_format`.
OTHER_FORMAT_FIELDS = (
    *("json_schema", "grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    "structured_outputs",
)


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]
    schema_: JsonObject | None = pydantic.Field(None, alias="schema", description="As in `json_schema`.")


class NamedSchema(StrictModel):
    name: NameField | None = pydantic.Field(None, description="Has no effect.")
    description: str | None = None
    schema_: JsonObject = pydantic.Field(alias="schema")
    strict: bool | None = pydantic.Field(None, description="The schema is always enforced.")


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(StrictModel):
    type: Literal["regex"]
    pattern: str


class ChoiceFormat(StrictModel):
    type: Literal["choice"]
    choices: list[str]


class GrammarFormat(StrictModel):
    type: Literal["grammar"]
    grammar: str
    syntax: Literal["lark", "gbnf"] = "lark"


ResponseFormatField: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | GrammarFormat,
    pydantic.Field(discriminator="type"),
]


class StructuredOutputs(StrictModel):
    json_: JsonObject | str | None = pydantic.Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = unsupported("use `tools`")
    disable_any_whitespace: bool | None = supports_only(False, reason="JSON has the white space that templates write")
    disable_fallback: bool | None = hint("nothing falls back", name="structured_outputs.disable_fallback")
    whitespace_pattern: Any = unsupported("JSON has the white space that templates write")


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = supports_only(False, reason="streams are not obfuscated")
    continuous_usage_stats: bool | None = hint(
        "usage is in the last chunk", False, name="stream_options.continuous_usage_stats"
    )


MaxTokens: TypeAlias = Annotated[
    Annotated[int, pydantic.Field(ge=-1, le=2**31 - 1)] | None,
    pydantic.Field(
        description="Maximum of generated tokens, not a reservation; -1: no limit; 0: only compute the prompt."
    ),
]


class UsageOptions(StrictModel):
    include: bool | None = pydantic.Field(None, description="As `stream_options.include_usage`.")


class ForeignFields(StrictModel):
    """Fields that chat completions and completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = pydantic.Field(None, description="`include`: usage at the end of a stream.")
    return_progress: bool | None = pydantic.Field(
        None,
        description="Stream chunks with `prompt_progress` during prefill: `total`, `cache` and `processed` tokens, "
        "`time_ms`, `seconds_left`.",
    )
    timings_per_token: bool | None = pydantic.Field(
        None, description="Stream `timings` with every chunk; the last one always has them."
    )
    verbose: bool | None = pydantic.Field(
        None,
        description="Return `__verbose` with the text and the tokens of the prompt, unless the output is a stream.",
    )
    response_format: ResponseFormatField | None = None
    json_schema: JsonObject | None = pydantic.Field(None, description="Schema of the output (llama-server).")
    grammar: str | None = pydantic.Field(None, description="Grammar of the output in GBNF (llama-server).")
    guided_json: JsonObject | str | None = pydantic.Field(None, description="Schema of the output (vLLM).")
    guided_regex: str | None = pydantic.Field(None, description="Regular expression of the output (vLLM).")
    guided_choice: list[str] | None = pydantic.Field(None, description="Possible outputs (vLLM).")
    guided_grammar: str | None = pydantic.Field(None, description="Grammar of the output, in GBNF or Lark (vLLM).")
    structured_outputs: StructuredOutputs | None = pydantic.Field(
        None, description="`json`, `regex`, `choice`, `grammar` or `json_object` (vLLM)."
    )

    service_tier: ServiceTier = None
    keep_alive: KeepAliveField = None
    ttl: KeepAlive | None = same_as("keep_alive")

    # Hints: they tune a hosted service or another engine.
    store: bool | None = hint("only /v1/responses are stored", False)
    verbosity: str | None = hint("request the length in a message", "medium")
    prompt_cache_retention: str | None = hint("entries are evicted only when space is needed", "in_memory")
    prediction: Any = hint("draft tokens come from the drafters of the server")
    draft_model: Any = hint("the drafter is chosen when the model is loaded")
    provider: Any = hint("there is one provider")
    models: Any = hint("there is no fallback model")
    route: Any = hint("there is no fallback model")
    transforms: list[Any] | None = hint("`overflow` truncates prompts", [])
    id_slot: int | None = hint("the planner chooses the sequence with the longest cached prefix", -1)
    n_keep: int | None = hint("`overflow` truncates prompts", 0, -1)
    n_cache_reuse: int | None = hint("every prompt uses the prefix cache", 0)
    response_fields: Any = hint("responses have all fields")
    request_id: str | None = hint("responses have an `id` of the server")
    guided_decoding_backend: str | None = hint("there is one grammar engine")
    spaces_between_special_tokens: bool | None = hint("special tokens are not part of the text")
    tool_stream: bool | None = hint("tool calls are always streamed", True)

    # Refused: ignoring them would change the response.
    best_of: int | None = supports_only(1, reason="use `n`, or `best_of` of /v1/completions")
    use_beam_search: bool | None = supports_only(False, reason="there is no beam search")
    length_penalty: float | None = supports_only(1, reason="there is no beam search")
    early_stopping: bool | None = supports_only(False, reason="there is no beam search")
    skip_special_tokens: bool | None = supports_only(True, reason="special tokens are not part of the text")
    include_stop_str_in_output: bool | None = supports_only(False, reason="`stop_reason` has the stop string")
    prompt_logprobs: Any = unsupported("use `echo` and `logprobs` of /v1/completions")
    return_tokens: bool | None = supports_only(False, reason="use /tokenize")
    return_token_ids: bool | None = supports_only(False, reason="use /tokenize")
    return_tokens_as_token_ids: bool | None = supports_only(False, reason="use /tokenize")
    truncate_prompt_tokens: Any = unsupported("use `overflow`")
    n_probs: int | None = supports_only(0, reason="use `logprobs`")
    post_sampling_probs: bool | None = supports_only(False, reason="`logprobs` are those of the model")
    t_max_predict_ms: int | None = supports_only(0, -1, reason="use `deadline`")
    n_indent: int | None = supports_only(0, reason="use `response_format`")
    allowed_token_ids: Any = unsupported("use `logit_bias` or `response_format`")
    bad_words: list[str] | None = supports_only([], reason="use `logit_bias`")
    logits_processors: Any = unsupported("the server does not run code of clients")
    guided_whitespace_pattern: Any = unsupported("JSON has the white space that templates write")
    mm_processor_kwargs: Any = supports_only({}, reason="the projector has no options")
    plugins: list[Any] | None = supports_only([], reason="the server does not call tools")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return bool((self.stream_options and self.stream_options.include_usage) or (self.usage and self.usage.include))


def find_format_field(body: ForeignFields) -> str:
    """Return the field that sets the format of the output; `response_format` if none does."""
    return next((name for name in OTHER_FORMAT_FIELDS if getattr(body, name)), "response_format")


def build_response_format(body: ForeignFields) -> dict[str, Any] | None:
    """Return the format of the output from the field that is set, as OpenAI's dictionary with our extensions.

    In the schemas of llama-server's fields, objects have only the properties that they name.
    """
    structured = body.structured_outputs or StructuredOutputs.model_validate({})
    formats = {
        "response_format": _dump_format(body.response_format),
        "json_schema": _build_schema_format("json_schema", forbid_additional_properties(body.json_schema)),
        "grammar": _build_grammar_format(body.grammar, "gbnf"),
        "guided_json": _build_schema_format("guided_json", body.guided_json),
        "guided_regex": body.guided_regex and {"type": "regex", "pattern": body.guided_regex},
        "guided_choice": body.guided_choice and {"type": "choice", "choices": body.guided_choice},
        "guided_grammar": _build_grammar_format(body.guided_grammar),
        "structured_outputs.json": _build_schema_format("structured_outputs.json", structured.json_),
        "structured_outputs.regex": structured.regex and {"type": "regex", "pattern": structured.regex},
        "structured_outputs.choice": structured.choice and {"type": "choice", "choices": structured.choice},
        "structured_outputs.grammar": _build_grammar_format(structured.grammar),
        "structured_outputs.json_object": {"type": "json_object"} if structured.json_object else None,
    }
    given = {field: format for field, format in formats.items() if format}
    if len(given) > 1:
        first, second, *_ = given
        raise invalid_request_error(second, f"`{first}` and `{second}` exclude each other: set only one of them")
    return next(iter(given.values()), None)


def _dump_format(format: pydantic.BaseModel | None) -> dict[str, Any] | None:
    fields: dict[str, Any] = {} if format is None else format.model_dump(by_alias=True, exclude_none=True)
    if "schema" in fields:
        return _build_schema_format("response_format.schema", forbid_additional_properties(fields["schema"]))
    return fields if fields and fields["type"] != "text" else None


def _build_schema_format(field: str, schema: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if isinstance(schema, str):
        try:
            schema = pydantic.TypeAdapter(dict[str, Any]).validate_json(schema)
        except pydantic.ValidationError:
            raise invalid_request_error(field, f"`{field}` must be a JSON schema") from None
    return None if schema is None else {"type": "json_schema", "json_schema": {"name": field, "schema": schema}}


def _build_grammar_format(grammar: str | None, syntax: str = "") -> dict[str, Any] | None:
    """Return the format of a grammar. GBNF defines rules with `::=`, Lark with a colon."""
    syntax = syntax or ("gbnf" if "::=" in (grammar or "") else "lark")
    return {"type": "grammar", "grammar": grammar, "syntax": syntax} if grammar else None
