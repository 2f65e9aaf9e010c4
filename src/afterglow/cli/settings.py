"""Settings of the commands from flags, environment variables and a TOML file.

Flags override the environment (`AFTERGLOW_CONTEXT=8192`, `AFTERGLOW_SERVER_PORT=8000`), the environment overrides the
file, the file overrides the defaults. An unknown key is an error in all of them.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_type_hints

import platformdirs
import pydantic
import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from afterglow import registry
from afterglow.api.options import (
    ChatGenerationOptions,
    LoadOptions,
    SamplingOptions,
    describe_errors,
    get_fields,
    suggest_name,
)
from afterglow.errors import InvalidArgument
from afterglow.paths import get_variable_path
from afterglow.server.settings import KeepAlive, ServerSettings

ENVIRONMENT_PREFIX = "AFTERGLOW_"
# Read elsewhere, before the settings are loaded.
RESERVED_VARIABLES = frozenset(
    {"AFTERGLOW_CACHE", "AFTERGLOW_DATA", "AFTERGLOW_LIBLLAMA", "AFTERGLOW_MODELS", "AFTERGLOW_SETTINGS"}
)
# Options of a response that are settings, with their defaults there. Those of sampling are defaults of the model.
RESPONSE_DEFAULTS = {"max_tokens": None, "seed": None, "reasoning": None, "lora": (), "overflow": "shift"}
GENERATION_DEFAULTS = {**RESPONSE_DEFAULTS, **dict.fromkeys(get_fields(SamplingOptions))}


class ModelTable(pydantic.BaseModel):
    """A table `[models.NAME]` of the settings file; with the options of `load`, whose fields are added below."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    model: str | None = pydantic.Field(
        None, description="Model name from `afterglow models`, or path. Default: the name of the table."
    )
    keep_alive: KeepAlive | None = pydantic.Field(
        None, description="As `keep_alive` of the server, for this model. Default: that of the server."
    )
    pinned: bool = pydantic.Field(False, description="Load the model at startup and never unload it.")
    chat_template: Path | None = pydantic.Field(
        None, description="File with a Jinja chat template that replaces the one of the model."
    )

    @property
    def load_options(self) -> LoadOptions:
        """Options of `load` that the table sets."""
        names = [name for name in get_fields(LoadOptions) if name in self.model_fields_set]
        return cast(LoadOptions, {name: getattr(self, name) for name in names})


_LOAD_FIELDS: dict[str, Any] = {
    name: (hint, get_fields(LoadOptions)[name].default)
    for name, hint in get_type_hints(LoadOptions, include_extras=True).items()
    if name not in ModelTable.model_fields
}
_CompleteModelTable: type[ModelTable] = pydantic.create_model("ModelTable", __base__=ModelTable, **_LOAD_FIELDS)
MODEL_TABLE_FIELDS: dict[str, FieldInfo] = _CompleteModelTable.model_fields


class Settings(BaseSettings):
    """All settings; with those that are options of `load` and of responses, whose fields are added below.

    >>> load_settings(context=8192).load_options["context"]
    8192
    """

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        env_nested_delimiter="_",
        env_nested_max_split=1,
        enable_decoding=False,  # the options parse lists themselves
        extra="forbid",
        frozen=True,
    )

    model: str = pydantic.Field(registry.DEFAULT_MODEL, description="Model name from `afterglow models`, or path.")
    chat_template: Path | None = pydantic.Field(
        None, description="File with a Jinja chat template that replaces the one of the model."
    )
    system: str = pydantic.Field("You are a helpful assistant.", description="System prompt.")
    markdown: bool = pydantic.Field(True, description="Render responses as markdown in a terminal.")
    stats: bool = pydantic.Field(True, description="Print statistics after each response.")
    private: bool = pydantic.Field(
        False,
        description="Write nothing of conversations to disk: no disk prefix cache, whatever `disk_cache` is, no saved "
        "conversations and no runs of agents.",
    )
    loop_guard: bool = pydantic.Field(True, description="Stop a response that repeats itself without end.")
    models: dict[str, ModelTable] = pydantic.Field(
        default_factory=dict, description="Models to serve by name, each with its own options."
    )
    server: ServerSettings = pydantic.Field(default_factory=lambda: ServerSettings())  # type: ignore[call-arg]

    @property
    def load_options(self) -> LoadOptions:
        """Options of `load`. Private mode has neither disk cache nor shared store."""
        options = cast(LoadOptions, {name: getattr(self, name) for name in get_fields(LoadOptions)})
        return {**options, "disk_cache": False, "shared_cache": None} if self.private else options

    def get_model_table(self, name: str) -> ModelTable:
        """Return the table of a model; an empty one if there is none."""
        return self.models.get(name) or _CompleteModelTable()  # type: ignore[call-arg]

    @property
    def generation_options(self) -> ChatGenerationOptions:
        """Options of every response."""
        options = cast(ChatGenerationOptions, {name: getattr(self, name) for name in RESPONSE_DEFAULTS})
        return {**options, "reasoning": parse_reasoning(options["reasoning"])}

    @property
    def sampling_defaults(self) -> SamplingOptions:
        """Sampling options that are set; the others have the defaults of the model."""
        values = {name: getattr(self, name) for name in get_fields(SamplingOptions)}
        return cast(SamplingOptions, {name: value for name, value in values.items() if value is not None})

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in the order of their precedence: flags, environment, file."""
        # AFTERGLOW_MODELS is a directory: only the file has tables of models.
        environment = {name: value for name, value in env_settings().items() if name != "models"}
        file = InitSettingsSource(settings_cls, _read_file(get_settings_path()))
        return init_settings, InitSettingsSource(settings_cls, environment), file


_GENERATION_TYPES = get_type_hints(ChatGenerationOptions, include_extras=True)
_OPTION_FIELDS: dict[str, Any] = {
    name: field for name, field in _LOAD_FIELDS.items() if name not in Settings.model_fields
} | {name: (_GENERATION_TYPES[name], default) for name, default in GENERATION_DEFAULTS.items()}
_OPTION_FIELDS["models"] = (dict[str, _CompleteModelTable], Settings.model_fields["models"])  # type: ignore[valid-type]
_CompleteSettings = pydantic.create_model("Settings", __base__=Settings, **_OPTION_FIELDS)
SETTINGS_FIELDS: dict[str, FieldInfo] = _CompleteSettings.model_fields
SERVER_FIELDS: dict[str, FieldInfo] = ServerSettings.model_fields
# Settings that are tables of the file: how many names lead to one of their keys, and their keys.
TABLE_FIELDS = {"server": (2, SERVER_FIELDS), "models": (3, MODEL_TABLE_FIELDS)}


def parse_reasoning(value: bool | int | str | None) -> bool | int | str | None:
    """Parse `on`, `off` and numbers from flags and environment variables."""
    if not isinstance(value, str):
        return value
    return int(value) if re.fullmatch(r"[0-9]{1,18}", value) else {"on": True, "off": False}.get(value, value)


# --- sources


def get_settings_path() -> Path:
    """Return the path of the settings file, which need not exist. `AFTERGLOW_SETTINGS` overrides it."""
    return get_variable_path("AFTERGLOW_SETTINGS") or platformdirs.user_config_path("afterglow") / "settings.toml"


def load_command_settings(command: typer.Context) -> Settings:
    """Load the settings of a command. A flag with the name of a setting sets it."""
    flags = {name: value for name, value in command.params.items() if value not in (None, (), [])}
    if isinstance(flags.get("draft"), list | tuple):  # a repeatable flag
        flags["draft"] = ",".join(flags["draft"])
    server = {name: value for name, value in flags.items() if name in SERVER_FIELDS}
    names = SETTINGS_FIELDS.keys() - {"models"}  # an argument of `serve`, not a setting
    settings = load_settings(server=server, **{name: value for name, value in flags.items() if name in names})
    return apply_ollama_definition(settings)


def apply_ollama_definition(settings: Settings) -> Settings:
    """Return the settings with the system prompt and the limit that Ollama stores with a model, unless they are set."""
    definition = registry.read_ollama_definition(settings.model)
    if definition is None:
        return settings
    values = {"system": definition.system, "max_tokens": definition.max_tokens}
    given = settings.model_fields_set
    return settings.model_copy(
        update={name: value for name, value in values.items() if value is not None and name not in given}
    )


def load_settings(**flags: Any) -> Settings:
    """Load the settings. `flags` take precedence over the environment and the file."""
    _check_variables()
    try:
        return _CompleteSettings(**flags)
    except pydantic.ValidationError as error:
        raise _convert_error(error, flags) from None


def _read_file(path: Path) -> dict[str, Any]:
    if not path.exists():
        if "AFTERGLOW_SETTINGS" in os.environ:
            raise InvalidArgument("AFTERGLOW_SETTINGS", f"names {path}, which does not exist")
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument("settings", f"{path} cannot be read: {error}") from None


# --- errors


def _get_variable(*names: str) -> str:
    return ENVIRONMENT_PREFIX + "_".join(names).upper()


def _check_variables() -> None:
    """Raise `InvalidArgument` for a variable that is not a setting."""
    known = {_get_variable(name) for name in SETTINGS_FIELDS if name not in TABLE_FIELDS}
    known |= {_get_variable("server", name) for name in SERVER_FIELDS} | RESERVED_VARIABLES
    for variable in os.environ:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable.upper() not in known:
            raise InvalidArgument(variable, f"is not a setting; {suggest_name(variable, sorted(known))}")


def _convert_error(error: pydantic.ValidationError, flags: Mapping[str, Any]) -> InvalidArgument:
    """Return an error that names the flag, the variable or the key of the file of the first invalid setting."""
    errors = error.errors(include_url=False)
    location = errors[0]["loc"]
    depth, known = TABLE_FIELDS.get(str(location[0]), (1, SETTINGS_FIELDS))
    names = [str(part) for part in location[:depth]]
    table = flags.get("server", {}) if names[0] == "server" else {} if names[0] == "models" else flags
    if names[-1] in table and names != ["server"]:
        place = get_flag(names[-1])
    elif (variable := _get_variable(*names)) in os.environ:
        place = variable
    else:
        place = f"{get_settings_path()}: {'.'.join(names)}"
    if errors[0]["type"] == "extra_forbidden":
        return InvalidArgument(place, f"is not a setting; {suggest_name(names[-1], known)}")
    return InvalidArgument(place, describe_errors(errors, len(names), show_value="api_keys" not in names))


def get_flag(name: str) -> str:
    """Return the flag of a setting. The flag of a list of texts is singular, because it can be repeated.

    >>> get_flag("max_queue"), get_flag("api_keys"), get_flag("aliases")
    ('--max-queue', '--api-key', '--alias')
    """
    is_list = name == "adapters" or (name in SERVER_FIELDS and isinstance(SERVER_FIELDS[name].default, tuple))
    singular = name.removesuffix("es" if name.endswith("ses") else "s")
    return f"--{singular if is_list else name}".replace("_", "-")
