"""What the commands do unless told otherwise: a TOML file, environment variables, and flags.

Flags come before the environment (`AFTERGLOW_CONTEXT=8192`, `AFTERGLOW_SERVER_PORT=8000`), the environment before the
file, the file before the defaults below. A key that does not exist is an error, wherever it stands.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

import platformdirs
import pydantic
import typer

from afterglow import registry
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.server.settings import ServerSettings

ENVIRONMENT_PREFIX = "AFTERGLOW_"
SERVER_VARIABLE_PREFIX = "server_"  # what the variables of the server's own settings begin with
# Read elsewhere, before there are any settings.
RESERVED_VARIABLES = frozenset({"AFTERGLOW_CACHE", "AFTERGLOW_LIBLLAMA", "AFTERGLOW_MODELS", "AFTERGLOW_SETTINGS"})


class Settings(pydantic.BaseModel):
    """Every setting with its default.

    >>> Settings(context=8192).context
    8192
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    model: str = registry.DEFAULT_MODEL
    context: int = pydantic.Field(4096, ge=64, description="Tokens that one conversation may take.")
    sequences: int = pydantic.Field(4, ge=1, le=255, description="Requests that run at once.")
    threads: int | None = pydantic.Field(None, ge=1, description="None: the processor's cores.")
    gpu_layers: int | None = pydantic.Field(None, ge=0, description="None: as many as fit.")
    disk_cache: bool = pydantic.Field(True, description="Keep what was computed on disk for the next time.")
    disk_cache_bytes: pydantic.ByteSize = pydantic.Field(
        pydantic.ByteSize(10 * 1024**3), description="Of all that is kept on disk, such as 20GiB."
    )
    ram_cache_bytes: pydantic.ByteSize | None = pydantic.Field(
        None, description="Of what is kept in RAM outside of memory. None: a quarter of what is free, 2 GiB at most."
    )
    pin_system_prompts: bool = pydantic.Field(
        False, description="Never let go of what system prompts and tools come to."
    )
    max_token_gap: float = pydantic.Field(
        0.2, ge=0, description="Seconds between tokens that other prompts should not exceed."
    )
    deterministic: bool = pydantic.Field(False, description="Same answers whatever else runs; slower in company.")
    chat_template: Path | None = pydantic.Field(None, description="A file that takes the model's own one's place.")
    projector: Path | None = pydantic.Field(
        None, description="The file that lets the model see or hear. None: the only one beside it."
    )
    strip_media: bool = pydantic.Field(False, description="Leave out pictures that the model cannot take.")
    draft: str | None = pydantic.Field(None, description='What guesses ahead: "mtp", or the name or path of a model.')
    speculation: Literal["auto", "off"] | int = pydantic.Field(
        "auto", description="How far to guess ahead: as it pays, never, or always so many tokens."
    )
    system: str = "You are a helpful assistant."
    max_tokens: int | None = pydantic.Field(None, ge=1, description="None: until the model ends.")
    temperature: float = pydantic.Field(0.0, ge=0, le=100)
    seed: int | None = None
    reasoning: bool | int | str | None = None
    markdown: bool = True
    stats: bool = True
    server: ServerSettings = pydantic.Field(default_factory=lambda: ServerSettings())  # type: ignore[call-arg]

    @property
    def engine(self) -> EngineSettings:
        """What an engine is told."""
        return EngineSettings(
            disk_cache_bytes=self.disk_cache_bytes,
            ram_cache_bytes=self.ram_cache_bytes,
            pin_system_prompts=self.pin_system_prompts,
            max_token_gap=self.max_token_gap,
            speculation=self.speculation,
            deterministic=self.deterministic,
        )


def get_settings_path() -> Path:
    """Where the file is, or would be; `AFTERGLOW_SETTINGS` names another."""
    chosen = os.environ.get("AFTERGLOW_SETTINGS")
    return Path(chosen).expanduser() if chosen else platformdirs.user_config_path("afterglow") / "settings.toml"


def load_command_settings(command: typer.Context, **overrides: Any) -> Settings:
    """The settings that hold for a command: each of its flags that is named like a setting is that setting.

    `others` are those that are not written on a command line as they are in the settings.
    """
    flags = command.params | overrides
    server = {name: value for name, value in flags.items() if name in ServerSettings.model_fields}
    return load_settings(
        server=server, **{name: value for name, value in flags.items() if name in Settings.model_fields}
    )


def load_settings(**flags: Any) -> Settings:
    """The settings that hold, with `flags` that are not None before all else."""
    values: dict[str, Any] = {"server": {}}
    for layer in (_read_file(get_settings_path()), _read_environment(), flags):
        given = {name: value for name, value in layer.items() if value is not None}
        server = {name: value for name, value in given.pop("server", {}).items() if value is not None}
        values |= given | {"server": values["server"] | server}
    try:
        return Settings(**values)
    except pydantic.ValidationError as error:
        raise _to_invalid_argument(error) from None


def _to_invalid_argument(error: pydantic.ValidationError) -> InvalidArgument:
    """The first setting that is wrong, with everything that it could have been."""

    def place(one: Any) -> str:  # without the names of alternatives, such as `int`
        return ".".join(one["loc"][: 2 if one["loc"][0] == "server" else 1])

    first, *others = error.errors()
    reasons = [first["msg"], *(other["msg"] for other in others if place(other) == place(first))]
    return InvalidArgument(place(first), f"in the settings: {', or '.join(reasons)}")


def _read_file(path: Path) -> dict[str, Any]:
    if not path.exists():
        if "AFTERGLOW_SETTINGS" in os.environ:
            raise InvalidArgument("AFTERGLOW_SETTINGS", f"names {path}, which is not there")
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument("settings", f"{path} cannot be read: {error}") from None
    for name in values:
        _check_key(name, f"{path}: {name}")
    server = values.get("server", {})
    if not isinstance(server, dict):
        raise InvalidArgument(f"{path}: server", "must be a table")
    for name in server:
        _check_key(name, f"{path}: server.{name}", ServerSettings)
    return values


def _read_environment() -> dict[str, Any]:
    values: dict[str, Any] = {"server": {}}
    for variable, value in os.environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in RESERVED_VARIABLES:
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            if name.startswith(SERVER_VARIABLE_PREFIX):
                name = name.removeprefix(SERVER_VARIABLE_PREFIX)
                _check_key(name, variable, ServerSettings)
                lists = ServerSettings.model_fields[name].annotation == tuple[str, ...]
                values["server"][name] = tuple(value.split(",")) if lists else value
            else:
                _check_key(name, variable)
                values[name] = value
    return values


def _check_key(name: str, where: str, model: type[pydantic.BaseModel] = Settings) -> None:
    known = model.model_fields
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
        raise InvalidArgument(where, f"is not a setting; {hint}")
