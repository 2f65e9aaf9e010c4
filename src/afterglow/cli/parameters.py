"""Parameters of the responses of a chat, which `/set` changes: their values and where each of them comes from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast, get_type_hints

import pydantic

from afterglow.api.model import Model
from afterglow.api.options import (
    ChatGenerationOptions,
    LoadOptions,
    check_options,
    describe_errors,
    get_fields,
    parse_lora,
)
from afterglow.api.options import suggest_name as suggest
from afterglow.cli.settings import ENVIRONMENT_PREFIX, Settings, get_flag, get_settings_path, parse_reasoning
from afterglow.errors import InvalidArgument
from afterglow.llama.sampling import Sampling

RESPONSE_PARSERS: dict[str, Callable[[str], object]] = {
    "max_tokens": pydantic.TypeAdapter(int).validate_python,
    "seed": pydantic.TypeAdapter(int).validate_python,
    "stop": lambda text: [text],
    "reasoning": parse_reasoning,
    "lora": parse_lora,
    "overflow": str,
}
UNSET_TEXTS = {"max_tokens": "no limit", "seed": "random", "stop": "none", "reasoning": "as in the chat template"}
# Those that are not a single value cannot be typed, and `seed` is an option of the response.
SAMPLING_TYPES = {
    name: hint
    for name, hint in get_type_hints(Sampling).items()
    if name not in ("logit_bias", "grammar", "dry_sequence_breakers", "samplers", "seed")
}
PARAMETERS = (*SAMPLING_TYPES, *RESPONSE_PARSERS)
OLLAMA_NAMES = {"num_predict": "max_tokens", "num_ctx": "context", "think": "reasoning"}


class ChatParameters:
    """Parameters from the settings and from `/set`. `/set` wins."""

    def __init__(self, settings: Settings, flags: Collection[str]) -> None:
        """`flags` are the names of the settings that are given as flags of the command."""
        self._settings = settings
        self._flags = flags
        self._sampling: dict[str, Any] = {}
        self._response: dict[str, object] = {}

    def set(self, name: str, text: str) -> None:
        """Set a parameter. The text `default` removes the value. Raises `InvalidArgument`."""
        if name not in PARAMETERS:
            raise InvalidArgument(name, explain_unknown_name(name))
        values = self._sampling if name in SAMPLING_TYPES else self._response
        if text == "default":
            values.pop(name, None)
            return
        try:
            if name in SAMPLING_TYPES:
                value = pydantic.TypeAdapter(SAMPLING_TYPES[name]).validate_python(parse_number(text))
                Sampling(**{name: value})
            else:
                value = RESPONSE_PARSERS[name](text)
                check_options(ChatGenerationOptions, {name: value})
        except pydantic.ValidationError as error:
            raise InvalidArgument(name, describe_errors(error.errors(include_url=False), 0)) from None
        values[name] = value

    def build_options(self, model: Model) -> ChatGenerationOptions:
        """Return the options of the next response."""
        options = cast(ChatGenerationOptions, {**self._settings.generation_options, **self._response})
        if self._sampling:
            options["sampling"] = self._build_sampling(model)
            for name in SAMPLING_TYPES:
                options.pop(name, None)  # type: ignore[misc]
        return options

    def describe(self, model: Model) -> Iterator[tuple[str, str, str]]:
        """Yield the name, the value and the source of each parameter."""
        sampling, options = self._build_sampling(model), self.build_options(model)
        for name in PARAMETERS:
            value = getattr(sampling, name) if name in SAMPLING_TYPES else options.get(name)
            yield name, format_value(name, value), self._find_source(name, model)

    def _build_sampling(self, model: Model) -> Sampling:
        return dataclasses.replace(model.sampling_defaults.sampling, **self._sampling)

    def _find_source(self, name: str, model: Model) -> str:
        if name in self._sampling or name in self._response:
            return "/set"
        if name not in self._settings.model_fields_set:
            return model.sampling_defaults.get_source(name)
        if name in self._flags:
            return get_flag(name)
        variable = ENVIRONMENT_PREFIX + name.upper()
        return variable if variable in os.environ else str(get_settings_path())


def parse_number(text: str) -> object:
    """Return a number that is written as text, or the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def format_value(name: str, value: object) -> str:
    """Return the value of a parameter as text.

    >>> format_value("max_tokens", None), format_value("top_p", 0.95)
    ('no limit', '0.95')
    """
    if value in (None, (), []):
        return UNSET_TEXTS.get(name, "none")
    if name == "lora" and isinstance(value, list | tuple):
        return ",".join(item if isinstance(item, str) else f"{item[0]}@{item[1]:g}" for item in value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value[0] if isinstance(value, list) else value)


def explain_unknown_name(name: str) -> str:
    """Say what to use instead of an unknown parameter."""
    known = OLLAMA_NAMES.get(name, name)
    if known in get_fields(LoadOptions):
        return f"cannot be changed in a running chat; start it with {get_flag(known)}"
    if known in PARAMETERS:
        return f"is called {known} here"
    return f"is not a parameter; {suggest(name, (*PARAMETERS, 'system'))}"
