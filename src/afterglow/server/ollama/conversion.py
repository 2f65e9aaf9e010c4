"""Conversion of Ollama bodies to messages, tools, sampling fields and options of a generation."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from afterglow.api.model import Model
from afterglow.api.options import PromptOptions
from afterglow.chat.constraints.json_schema import VALUE_KEYWORDS
from afterglow.chat.constraints.response_format import NAMED_SCHEMA_KEYWORDS, forbid_additional_properties
from afterglow.chat.content import Attachment
from afterglow.chat.messages import Message, ToolCall, locate_attachments
from afterglow.chat.prompt import TruncationPolicy
from afterglow.chat.tools.tool import Tool, build_tool
from afterglow.server import limits
from afterglow.server.errors import APIError, invalid_request_error
from afterglow.server.installed import DEFAULT_TAG, ModelVariant, RequestDefaults
from afterglow.server.ollama.created_models import CreatedModel
from afterglow.server.ollama.schema import OllamaGenerationBody, OllamaMessage, OllamaOptions, OllamaTool
from afterglow.server.schema.base import list_synonyms
from afterglow.server.schema.sampling import SamplingFields
from afterglow.server.state import ServerState

FORMAT_FIELDS = {"response_format": "format"}  # names in errors
GO_TEMPLATE_PATTERN = re.compile(r"\{\{-?\s*(?:\.[A-Za-z]|\$\.?|(?:if|range|with|end|else|define|template|block)\b)")
RANDOM_SEED = -1
NULLABLE_KEYWORDS = frozenset({"const", "default"})
NO_DEFAULTS = RequestDefaults()


# --- messages


def build_messages(messages: Sequence[OllamaMessage], id_prefix: str = "call") -> list[Message]:
    """Convert messages. Tool calls and their results get ids if they have none; `id_prefix` has four letters.

    A result belongs to the first call of the last assistant message that has its name and no result yet.
    """
    converted: list[Message] = []
    pending: list[ToolCall] = []
    call_count = 0
    for index, message in enumerate(messages):
        calls = []
        for call in message.tool_calls or ():
            # Nine letters and digits: some templates check this.
            call_id, call_count = call.id or f"{id_prefix}{call_count:05d}", call_count + 1
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            calls.append(ToolCall(id=call_id, name=call.function.name, arguments=arguments))
        pending = calls if message.role == "assistant" else pending
        result_id = message.tool_call_id
        if message.role == "tool" and result_id is None:
            result_id = take_call_id(pending, message.tool_name)
        built = Message(
            role=message.role,
            content=message.content or "",
            reasoning=message.thinking,
            tool_calls=tuple(calls),
            tool_call_id=result_id,
            name=message.tool_name,
            attachments=build_images(message.images),
        )
        converted.append(locate_attachments(built, f"messages[{index}].images"))
    return converted


def take_call_id(pending: list[ToolCall], name: str | None) -> str:
    """Remove the call that a result belongs to from the calls without result, and return its id."""
    if not pending:
        return ""
    named = [index for index, call in enumerate(pending) if call.name == name]
    return pending.pop(named[0] if named else 0).id


def build_images(images: Sequence[str] | None) -> tuple[Attachment, ...]:
    """Convert images in base64, which precede the text."""
    sources = [image if image.startswith("data:") else f"data:image/*;base64,{image}" for image in images or ()]
    return tuple(Attachment(kind="image", source=source) for source in sources)


def build_tools(tools: Sequence[OllamaTool] | None) -> list[Tool]:
    """Convert the tools of a body."""
    return [
        build_tool(
            tool.function.name,
            tool.function.description,
            drop_null_keywords(tool.function.parameters),
            tool.function.strict,
            where=f"tools[{index}].function",
        )
        for index, tool in enumerate(tools or ())
    ]


def drop_null_keywords(schema: Any) -> Any:
    """Return a JSON schema without keywords that are null, as Go writes lists and maps that are not set.

    >>> drop_null_keywords({"type": "object", "required": None, "properties": {"x": {"enum": None, "const": None}}})
    {'type': 'object', 'properties': {'x': {'const': None}}}
    """
    if isinstance(schema, list):
        return [drop_null_keywords(item) for item in schema]
    if not isinstance(schema, dict):
        return schema

    def drop(keyword: str, value: Any) -> Any:
        if keyword in NAMED_SCHEMA_KEYWORDS and isinstance(value, dict):
            return {name: drop_null_keywords(schema) for name, schema in value.items() if schema is not None}
        return value if keyword in VALUE_KEYWORDS else drop_null_keywords(value)

    return {
        keyword: drop(keyword, value)
        for keyword, value in schema.items()
        if value is not None or keyword in NULLABLE_KEYWORDS
    }


# --- options


def merge_options(
    created: CreatedModel | None, options: OllamaOptions | None, defaults: RequestDefaults = NO_DEFAULTS
) -> OllamaOptions:
    """Return the options of a request over the parameters of a created model and the defaults of the served one."""
    merged = OllamaOptions.model_validate({"stop": list(defaults.stop) or None, "num_predict": defaults.max_tokens})
    for layer in (None if created is None else created.options, options):
        if layer is not None:
            merged = merged.model_copy(update={name: value for name, value in layer if value is not None})
    return merged


def build_defaults(created: CreatedModel | None, defaults: RequestDefaults) -> RequestDefaults:
    """Return the messages of a created model, or else of the served one. `merge_options` has the other defaults."""
    served = replace(defaults, stop=(), max_tokens=None)
    if created is None:
        return served
    messages = tuple(build_messages(created.first_messages, "made"))
    return RequestDefaults(system=created.system, messages=messages).fall_back(served)


def build_variant(created: CreatedModel) -> ModelVariant:
    """Return a created model as the other APIs serve it: its parameters are defaults of their requests.

    Raises status 400 if it cannot be used, such as one of another version of this program.
    """
    try:
        created.check()
        template = check_template(created.template)
    except APIError as error:
        message = f"the created model {created.name!r} cannot be used: {error.message}"
        raise invalid_request_error("model", message) from None
    options = created.options
    defaults = RequestDefaults(
        system=created.system,
        messages=tuple(build_messages(created.first_messages, "made")),
        stop=(options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ()),
        max_tokens=get_token_limit(options),
        chat_template=template,
        sampling=list_sampling_values(options.model_copy(update={"num_ctx": None})),
    )
    return ModelVariant(
        name=created.name.removesuffix(DEFAULT_TAG),
        source=created.source,
        created=created.modified,
        defaults=defaults,
        context_length=options.num_ctx,
    )


def list_sampling_values(options: OllamaOptions) -> dict[str, Any]:
    """Return the options that are sampling fields of the server, by name. -1 is no seed."""
    names = set(SamplingFields.model_fields) - list_synonyms(SamplingFields)
    values = options.model_dump(include=names, exclude_none=True)
    if values.get("seed") == RANDOM_SEED:
        del values["seed"]
    return values


def build_sampling_fields(options: OllamaOptions, model: Model) -> SamplingFields:
    """Convert options to the sampling fields of the server. -1 is the context for a window."""
    values = list_sampling_values(options)
    values.setdefault("repeat_last_n", model.sampling_defaults.sampling.repeat_last_n)
    if values["repeat_last_n"] < 0:
        values["repeat_last_n"] = model.context_length
    return SamplingFields.model_validate(values)


def build_generation_fields(
    state: ServerState, body: OllamaGenerationBody, options: OllamaOptions, model: Model, salt: str
) -> dict[str, Any]:
    """Build the fields that all generation requests have."""
    return {
        "sampling_fields": build_sampling_fields(options, model),
        "max_tokens": get_token_limit(options),
        "stop": limits.parse_stops(options.stop, state.settings),
        "logprobs": get_logprobs(body),
        "salt": salt,
        "keep_alive": body.keep_alive,
    }


def get_max_tokens(options: OllamaOptions) -> int | None:
    """Return the maximum number of generated tokens; None for Ollama's 0, -1 and -2.

    >>> get_max_tokens(OllamaOptions(num_predict=0)), get_max_tokens(OllamaOptions(num_predict=5))
    (None, 5)
    """
    return None if options.num_predict is None or options.num_predict <= 0 else options.num_predict


def get_token_limit(options: OllamaOptions) -> int | None:
    """Return `max_tokens` of a request. Without `num_predict` the defaults of the model and the server apply."""
    return None if options.num_predict is None else get_max_tokens(options) or limits.UNLIMITED_TOKENS


def get_overflow(body: OllamaGenerationBody, options: OllamaOptions) -> TruncationPolicy:
    """Return what happens to a prompt that is too long. Nothing is dropped unless the request says so."""
    return options.overflow or ("shift" if body.truncate else "refuse")


def get_logprobs(body: OllamaGenerationBody) -> int | None:
    """Return the number of alternatives to each token; None without log-probabilities."""
    if body.top_logprobs and not body.logprobs:
        raise invalid_request_error("top_logprobs", "`top_logprobs` requires `logprobs`")
    return (body.top_logprobs or 0) if body.logprobs else None


def build_response_format(body: OllamaGenerationBody) -> dict[str, Any] | None:
    """Convert `format` to a response format. As in Ollama, objects have no properties that the schema does not name."""
    if isinstance(body.format, dict):
        schema = forbid_additional_properties(body.format)
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": schema}}
    return {"type": "json_object"} if body.format == "json" else None


def build_prompt_options(
    body: OllamaGenerationBody, created: CreatedModel | None, template: str | None = None
) -> PromptOptions:
    """Build the options of `Model.plan_chat`, except `tools`."""
    return {
        "response_format": build_response_format(body),
        "reasoning": body.think,
        "chat_template": check_template(template or (created.template if created else None)),
    }


def check_template(template: str | None) -> str | None:
    """Return a template; raise status 400 for one in Go's language.

    >>> check_template("{% for message in messages %}{{ message.content }}{% endfor %}")[:6]
    '{% for'
    """
    if template and GO_TEMPLATE_PATTERN.search(template):
        message = "`template` must be a Jinja chat template; templates in Go's language are not supported"
        raise invalid_request_error("template", message)
    return template or None
