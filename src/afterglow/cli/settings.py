"""Settings of the commands from flags, environment variables and a TOML file.

Flags override the environment (`AFTERGLOW_CONTEXT=8192`, `AFTERGLOW_SERVER_PORT=8000`), the environment overrides the
file, the file overrides the defaults. An unknown key is an error in all of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from pathlib import Path
from typing import Any, Literal, get_origin

import platformdirs
import pydantic
import typer

from afterglow import registry
from afterglow.api.options import LoadOptions
from afterglow.chat.prompt import TruncationPolicy
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.llama.model import SplitMode
from afterglow.llama.settings import CacheType, RopeScaling
from afterglow.server.settings import ServerSettings

ENVIRONMENT_PREFIX = "AFTERGLOW_"
SERVER_VARIABLE_PREFIX = "server_"  # after ENVIRONMENT_PREFIX, for the settings of the server
# Read elsewhere, before the settings are loaded.
RESERVED_VARIABLES = frozenset({"AFTERGLOW_CACHE", "AFTERGLOW_LIBLLAMA", "AFTERGLOW_MODELS", "AFTERGLOW_SETTINGS"})


class Settings(pydantic.BaseModel):
    """All settings with their defaults.

    >>> Settings(context=8192).context
    8192
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    model: str = registry.DEFAULT_MODEL
    context: int = pydantic.Field(4096, ge=64, description="Context length of a conversation, in tokens.")
    sequences: int = pydantic.Field(4, ge=1, le=255, description="Maximum number of concurrent requests.")
    threads: int | None = pydantic.Field(None, ge=1, description="None: one per physical core.")
    gpu_layers: int | None = pydantic.Field(None, ge=-1, description="-1: all. None: as many as fit.")
    split_mode: SplitMode = pydantic.Field("layer", description="How several GPUs share the model.")
    tensor_split: tuple[float, ...] = pydantic.Field((), description="Share of each GPU. Empty: by free memory.")
    main_gpu: int = pydantic.Field(0, ge=0, description="GPU that computes what is not split.")
    mmap: bool = pydantic.Field(True, description="Map the model file into memory.")
    mlock: bool = pydantic.Field(False, description="Keep the model in RAM.")
    batch: int | None = pydantic.Field(None, ge=1, description="Rows of a decode. None: 512, or 16,384 on a GPU.")
    ubatch: int | None = pydantic.Field(None, ge=1, description="Rows computed at once. None: 512.")
    cache_type_k: CacheType = pydantic.Field("f16", description="Data type of keys in the KV cache.")
    cache_type_v: CacheType = pydantic.Field("f16", description="Data type of values in the KV cache.")
    flash_attention: bool | None = pydantic.Field(None, description="None: if model and device support it.")
    kv_unified: bool = pydantic.Field(False, description="Share the cells of the KV cache among all sequences.")
    swa_full: bool = pydantic.Field(False, description="Keep all cells of sliding-window layers.")
    rope_scaling: RopeScaling = pydantic.Field("model", description="RoPE scaling.")
    rope_freq_base: float = pydantic.Field(0.0, ge=0, description="0: from the model.")
    rope_freq_scale: float = pydantic.Field(0.0, ge=0, description="0: from the model.")
    yarn_orig_ctx: int = pydantic.Field(0, ge=0, description="0: from the model.")
    yarn_ext_factor: float | None = pydantic.Field(None, ge=0, description="None: from the model.")
    yarn_attn_factor: float | None = pydantic.Field(None, ge=0, description="None: from the model.")
    yarn_beta_fast: float | None = pydantic.Field(None, ge=0, description="None: from the model.")
    yarn_beta_slow: float | None = pydantic.Field(None, ge=0, description="None: from the model.")
    disk_cache: bool = pydantic.Field(True, description="Store computed prefixes on disk.")
    disk_cache_bytes: pydantic.ByteSize = pydantic.Field(
        pydantic.ByteSize(10 * 1024**3), description="Size of the disk prefix cache of all models, e.g. 20GiB."
    )
    ram_cache_bytes: pydantic.ByteSize | None = pydantic.Field(
        None, description="Size of the RAM prefix cache. None: a quarter of the free memory, at most 2 GiB."
    )
    pin_system_prompts: bool = pydantic.Field(False, description="Never evict system prompts and tools.")
    max_token_gap: float = pydantic.Field(
        0.2, ge=0, description="Target for the time between tokens while other prompts prefill, in seconds."
    )
    deterministic: bool = pydantic.Field(
        False, description="Bit-identical output regardless of load; slower with concurrent requests."
    )
    chat_template: Path | None = pydantic.Field(None, description="File that replaces the model's own template.")
    projector: Path | None = pydantic.Field(
        None, description="Multimodal projector file. None: the only one in the directory of the model."
    )
    strip_media: bool = pydantic.Field(False, description="Drop media that the model does not support.")
    draft: str | None = pydantic.Field(None, description='Drafter: "mtp", or the name or path of a model.')
    speculation: Literal["auto", "off"] | int = pydantic.Field(
        "auto", description="Draft length: automatic, off, or a fixed number of tokens."
    )
    system: str = "You are a helpful assistant."
    max_tokens: int | None = pydantic.Field(None, ge=1, description="None: until the model ends the response.")
    temperature: float = pydantic.Field(0.0, ge=0, le=100)
    seed: int | None = None
    reasoning: bool | int | str | None = None
    overflow: TruncationPolicy = pydantic.Field(
        "shift", description="Policy of `chat` if the conversation exceeds the context."
    )
    markdown: bool = True
    stats: bool = True
    server: ServerSettings = pydantic.Field(default_factory=lambda: ServerSettings())  # type: ignore[call-arg]

    @pydantic.field_validator("tensor_split", mode="before")
    @classmethod
    def _split_shares(cls, value: Any) -> Any:
        """Accept `3,1` from flags and environment variables."""
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

    @property
    def load_options(self) -> dict[str, Any]:
        """Options of `LoadOptions`, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(LoadOptions)}

    @property
    def engine(self) -> EngineSettings:
        """Settings of the engine."""
        return EngineSettings(
            disk_cache_bytes=self.disk_cache_bytes,
            ram_cache_bytes=self.ram_cache_bytes,
            pin_system_prompts=self.pin_system_prompts,
            max_token_gap=self.max_token_gap,
            speculation=self.speculation,
            deterministic=self.deterministic,
        )


def get_settings_path() -> Path:
    """Return the path of the settings file, which need not exist. `AFTERGLOW_SETTINGS` overrides it."""
    path = os.environ.get("AFTERGLOW_SETTINGS")
    return Path(path).expanduser() if path else platformdirs.user_config_path("afterglow") / "settings.toml"


def load_command_settings(command: typer.Context, **overrides: Any) -> Settings:
    """Load the settings of a command. A flag with the name of a setting sets it.

    `overrides` are the settings whose flags have another name or form.
    """
    flags = command.params | overrides
    if isinstance(flags.get("draft"), list | tuple):  # a repeatable flag
        flags["draft"] = ",".join(flags["draft"]) or None
    server = {name: value for name, value in flags.items() if name in ServerSettings.model_fields}
    common = {name: value for name, value in flags.items() if name in Settings.model_fields}
    return load_settings(server=server, **common)


def load_settings(**flags: Any) -> Settings:
    """Load the settings. `flags` that are not None take precedence."""
    values: dict[str, Any] = {"server": {}}
    for layer in (_read_file(get_settings_path()), _read_environment(), flags):
        common = {name: value for name, value in layer.items() if value is not None}
        server = {name: value for name, value in common.pop("server", {}).items() if value is not None}
        values |= common | {"server": values["server"] | server}
    try:
        return Settings(**values)
    except pydantic.ValidationError as error:
        raise _to_invalid_argument(error) from None


def _to_invalid_argument(error: pydantic.ValidationError) -> InvalidArgument:
    """Convert the errors of the first invalid setting. A union type has one error per alternative."""

    def get_name(details: Any) -> str:  # without the names of alternatives, e.g. `int`
        return ".".join(details["loc"][: 2 if details["loc"][0] == "server" else 1])

    first, *others = error.errors()
    reasons = [first["msg"], *(other["msg"] for other in others if get_name(other) == get_name(first))]
    return InvalidArgument(get_name(first), f"in the settings: {', or '.join(reasons)}")


def _read_file(path: Path) -> dict[str, Any]:
    if not path.exists():
        if "AFTERGLOW_SETTINGS" in os.environ:
            raise InvalidArgument("AFTERGLOW_SETTINGS", f"names {path}, which does not exist")
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
                is_list = get_origin(ServerSettings.model_fields[name].annotation) is tuple
                values["server"][name] = tuple(value.split(",")) if is_list else value
            else:
                _check_key(name, variable)
                values[name] = value
    return values


def _check_key(name: str, where: str, model: type[pydantic.BaseModel] = Settings) -> None:
    known = model.model_fields
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the settings are {', '.join(known)}"
        raise InvalidArgument(where, f"is not a setting; {hint}")
