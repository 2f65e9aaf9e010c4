"""Settings of the server: address, authentication, admission, request limits and media policy."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from afterglow.api.options import ByteCount, parse_list
from afterglow.errors import InvalidArgument
from afterglow.media.policy import MediaPolicy

KEY_DIGEST_PREFIX = "sha256:"
# Units of Go's durations; `ms` before `m`. The last number needs no unit.
DURATION_UNIT_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "\u00b5s": 1e-6,
    "\u03bcs": 1e-6,
    "ms": 1e-3,
    "s": 1,
    "m": 60,
    "h": 3600,
}
DURATION_PART_PATTERN = re.compile(rf"(\d+(?:\.\d*)?)({'|'.join(DURATION_UNIT_SECONDS)}|$)")
FOREVER_SECONDS = 100 * 365 * 24 * 3600  # a longer duration is infinite: clocks and waits overflow
POLICY_FIELDS = {"media_hosts": "allowed_hosts", "media_directory": "allowed_directory"}  # of `MediaPolicy`
TextList = Annotated[tuple[str, ...], pydantic.BeforeValidator(parse_list)]


def parse_keep_alive(value: Any) -> Any:
    """Return a duration in seconds: a number, or text such as `90`, `5m` or `1h30m`.

    A negative one, and one of more than 100 years, is infinite.

    >>> parse_keep_alive("1h30m"), parse_keep_alive("10ms"), parse_keep_alive(0), parse_keep_alive("-1")
    (5400.0, 0.01, 0, inf)
    """
    if isinstance(value, str):
        text = value.strip()
        parts = DURATION_PART_PATTERN.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text.removeprefix("-").removeprefix("+"):
            raise ValueError("must be a number of seconds, or a duration such as 90s, 5m or 1h30m; negative: for ever")
        total = sum(float(number) * DURATION_UNIT_SECONDS.get(unit, 1) for number, unit in parts)
        value = -1 if text.startswith("-") else total
    is_infinite = isinstance(value, int | float) and (value < 0 or value > FOREVER_SECONDS)
    return math.inf if is_infinite else value


def parse_aliases(value: Any) -> Any:
    """Return aliases as texts PATTERN=MODEL; in a TOML file they may be a table.

    >>> parse_aliases({"claude-*": "small"}), parse_aliases("gpt-*=small,o3=big")
    (['claude-*=small'], ['gpt-*=small', 'o3=big'])
    """
    aliases = [f"{name}={model}" for name, model in value.items()] if isinstance(value, dict) else parse_list(value)
    for alias in aliases if isinstance(aliases, list | tuple) else ():
        pattern, _, model = str(alias).partition("=")
        if not pattern.strip() or not model.strip():
            raise ValueError(f"must be PATTERN=MODEL, not {alias!r}")
    return aliases


def hash_api_key(key: str) -> str:
    """Return the digest of an API key. A digest is returned as it is, so that settings need not contain the key.

    >>> hash_api_key("secret") == hash_api_key(hash_api_key("secret"))
    True
    """
    if key.startswith(KEY_DIGEST_PREFIX):
        if not re.fullmatch("[0-9a-f]{64}", key.removeprefix(KEY_DIGEST_PREFIX)):
            raise ValueError(f"a key digest must be `{KEY_DIGEST_PREFIX}` and 64 lower-case hexadecimal digits")
        return key
    if not key.strip():
        raise ValueError("an API key must not be empty")
    return KEY_DIGEST_PREFIX + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_api_keys(path: Path) -> list[str]:
    """Read API keys or their digests from a file with one per line."""
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, ValueError) as error:
        raise InvalidArgument("api_key_file", f"{path} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise InvalidArgument("api_key_file", f"{path} has no keys")
    return keys


KeepAlive = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=True), pydantic.BeforeValidator(parse_keep_alive)]
"""Seconds without a request after which a model is unloaded; infinite: never."""


class ServerSettings(pydantic.BaseModel):
    """All server settings with their defaults. They form the table `[server]` of the settings file.

    >>> ServerSettings(port=0).max_queue
    64
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    host: str = pydantic.Field("127.0.0.1", description="Address to listen on; 127.0.0.1 is for this machine only.")
    port: int = pydantic.Field(8080, ge=0, le=65_535, description="Port to listen on; 0 selects a free port.")
    ollama: bool = pydantic.Field(
        False,
        description="Also listen on the port of Ollama, for clients whose address is fixed, and serve every installed "
        "model by name, as Ollama does. The Ollama API itself is on both ports.",
    )
    ollama_port: int = pydantic.Field(
        11434, ge=0, le=65_535, description="Second port, with `ollama`; 0 selects a free port."
    )
    allow_reload: bool = pydantic.Field(
        False,
        description="Load a model again with a longer context if a request to the Ollama API or a created model needs "
        "one (`num_ctx`). Default: such requests get status 400.",
    )
    manage_models: bool = pydantic.Field(
        True, description="Let clients pull, create, copy and delete models with the Ollama API."
    )
    web: bool = pydantic.Field(
        True,
        description="Serve the web page on `/`: chat, prefix tree and requests. On other addresses than loopback it is "
        "off unless there are API keys.",
    )
    store_conversations: bool = pydantic.Field(
        True,
        description="Keep the conversations of the web page in a file; otherwise they last until the server ends, as "
        "with `private`.",
    )
    api_keys: Annotated[
        tuple[Annotated[str, pydantic.AfterValidator(hash_api_key)], ...], pydantic.BeforeValidator(parse_list)
    ] = pydantic.Field(
        (),
        description="API keys that clients must send, or their digests as `sha256:…`; only digests are kept. Clients "
        "with different keys share no cached state. A key in a flag is shown in the process list. A key with a comma "
        "needs a JSON list in a variable. Default: requests need no key.",
    )
    api_key_file: Path | None = pydantic.Field(None, description="File with one API key or digest per line.")
    allow_hosts: TextList = pydantic.Field(
        (),
        description="Accepted `Host` names beside loopback and `host`; `*`: all. Other requests get status 403, so "
        "that no web page can reach the server by a name of its own. Not checked if there are keys. A server on all "
        "addresses is reached by each of them. Ollama's port accepts what Ollama does: every address, the name of this "
        "machine, `*.localhost`, `*.local` and `*.internal`.",
    )
    allow_origins: TextList = pydantic.Field(
        (),
        description="CORS origins allowed to connect, e.g. `https://chat.example` or `http://localhost:*`; `*`: all. "
        "Requests of other web pages get status 403. Ollama's port accepts pages of loopback addresses and of programs "
        "such as `vscode-webview://…`, as Ollama does.",
    )
    aliases: Annotated[tuple[str, ...], pydantic.BeforeValidator(parse_aliases)] = pydantic.Field(
        (),
        description="Other names of served models as PATTERN=MODEL, e.g. `claude-*=small`; the first pattern that "
        "matches counts. In the file also a table.",
    )
    default_max_tokens: int | None = pydantic.Field(
        None,
        ge=0,
        description="Maximum of generated tokens of requests that set none. Default: until the context is full.",
    )
    default_seed: int | None = pydantic.Field(
        None, ge=0, le=2**63 - 1, description="Seed of requests that set none. Default: a random one for each."
    )
    default_reasoning: Literal["auto", "on", "off"] = pydantic.Field(
        "auto",
        description="Whether models reason if a request does not say so: `on`, `off`, or as their chat templates do "
        "(`auto`). A model that cannot reason is not affected.",
    )
    slots: bool = pydantic.Field(True, description="Serve `/slots` of the llama-server API.")
    slot_save_path: Path | None = pydantic.Field(
        None,
        description="Directory of the files that `/slots/{id}?action=save` and `restore` of the llama-server API write "
        "and read; each API key has a directory of its own in it. Default: these actions get status 501.",
    )
    metrics: bool = pydantic.Field(True, description="Serve `/metrics`.")
    strict: bool = pydantic.Field(
        False,
        description="Reject request fields that have no effect here. Default: they are accepted, and the response "
        "header `x-afterglow-ignored` names them.",
    )
    volatile: Literal["keep", "move"] = pydantic.Field(
        "move",
        description="Known spans of system prompts that clients change on every request, such as dates: `move` them to "
        "the end of the system prompt, so that what is before them is a prefix hit, or `keep` them.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = pydantic.Field(
        "info",
        description="Least severe lines of the log on standard error: `debug`, `info` (one line per request), "
        "`warning` or `error`. The log contains no text of prompts or responses.",
    )
    log_file: Path | None = pydantic.Field(None, description="File to which the log is also appended.")
    lazy_load: bool = pydantic.Field(False, description="Load a model on its first request instead of at startup.")
    max_queue: int = pydantic.Field(64, ge=0, description="Choices that may wait for a model; more get status 429.")
    shutdown_seconds: float = pydantic.Field(
        30.0, ge=0, description="Time for running requests after SIGTERM or Ctrl-C; a second signal ends them."
    )
    ping_seconds: float = pydantic.Field(
        10.0,
        gt=0,
        description="Interval of the keep-alive pings of a stream: comments with the progress of a prefill, or the "
        "pings of the API.",
    )
    stall_seconds: float = pydantic.Field(
        30.0,
        gt=0,
        description="A connection whose client accepts no data for this time is closed, and its request cancelled.",
    )
    max_buffered_tokens: int = pydantic.Field(
        4096, ge=1, description="Tokens of a choice that may wait for a slow client; the request is then cancelled."
    )
    deadline: float | None = pydantic.Field(None, gt=0, description="Maximum seconds for any request.")

    max_body_bytes: ByteCount = pydantic.Field(16 * 1024 * 1024, ge=1, description="Maximum size of a request body.")
    max_choices: int = pydantic.Field(16, ge=1, le=128, description="Maximum of `n` and of `best_of`, for each prompt.")
    max_prompts: int = pydantic.Field(128, ge=1, description="Maximum prompts of one completions request.")
    max_inputs: int = pydantic.Field(2048, ge=1, description="Maximum inputs of one embeddings request.")
    max_documents: int = pydantic.Field(1000, ge=1, description="Maximum documents of one rerank request.")
    max_messages: int = pydantic.Field(4096, ge=1, description="Maximum messages of one chat request.")
    max_stops: int = pydantic.Field(16, ge=0, description="Maximum stop strings of one request.")
    max_stop_length: int = pydantic.Field(256, ge=1, description="Maximum length of a stop string, in characters.")
    max_tools: int = pydantic.Field(1024, ge=0, description="Maximum tools of one request.")
    max_grammar_bytes: ByteCount = pydantic.Field(
        1024 * 1024, ge=1, description="Maximum size of a schema, of a grammar, or of all tools."
    )
    max_logit_bias: int = pydantic.Field(1024, ge=0, description="Maximum entries of `logit_bias`.")
    media_hosts: TextList = pydantic.Field(
        (), description="Hosts from which media may be fetched; `*`: every public host."
    )
    media_directory: Path | None = pydantic.Field(None, description="Directory from which media may be read.")
    media_allow_private: bool = pydantic.Field(False, description="Also fetch from private network addresses.")
    media_fetch_seconds: float = pydantic.Field(10.0, gt=0, description="Timeout for fetching one file.")
    max_media: int = pydantic.Field(32, ge=0, description="Maximum images and audio files of one request.")
    max_media_bytes: ByteCount = pydantic.Field(
        20 * 1024 * 1024, ge=1, description="Maximum encoded size of one media file."
    )
    max_image_pixels: int = pydantic.Field(32_000_000, ge=1, description="Maximum pixels of one image.")
    max_image_side: int = pydantic.Field(16_384, ge=1, description="Maximum width and height of an image, in pixels.")
    max_audio_seconds: float = pydantic.Field(1800.0, gt=0, description="Maximum length of one audio file.")
    max_decoded_media_bytes: ByteCount = pydantic.Field(
        384 * 1024 * 1024,
        ge=1,
        description="Memory for the media of all requests: files in the server (more get status 429), decoding in the "
        "engine process of a model (more wait); also the decoded size of all media of one request.",
    )
    memory_bytes: ByteCount | None = pydantic.Field(
        None,
        ge=1,
        description="RAM for all models: weights, KV caches, RAM prefix caches and engine processes. Models that do "
        "not fit together are loaded in turn. Default: most of the free RAM.",
    )
    gpu_memory_bytes: ByteCount | None = pydantic.Field(
        None, ge=1, description="Memory for all models on each GPU. Default: most of the free memory."
    )
    keep_alive: KeepAlive = pydantic.Field(
        math.inf,
        description="Seconds without a request after which a model is unloaded, or a duration such as `5m`; "
        "negative: never. Its KV cache is stored on disk first. Default: a model stays until another one needs its "
        "memory.",
    )
    max_stored_responses: int = pydantic.Field(256, ge=0, description="Maximum number of stored responses.")
    max_stored_response_bytes: ByteCount = pydantic.Field(
        64 * 1024 * 1024, ge=0, description="Maximum size of all stored responses."
    )

    max_file_bytes: ByteCount = pydantic.Field(
        200 * 1024 * 1024, ge=1, description="Maximum size of a file of /v1/files, the input of a batch."
    )
    max_stored_file_bytes: ByteCount = pydantic.Field(
        4 * 1024 * 1024 * 1024, ge=1, description="Maximum size of all files of a tenant."
    )
    max_batch_lines: int = pydantic.Field(50_000, ge=1, description="Maximum lines of a batch.")
    file_retention: Annotated[
        float, pydantic.Field(gt=0, allow_inf_nan=False), pydantic.BeforeValidator(parse_keep_alive)
    ] = pydantic.Field(
        30 * 24 * 3600.0,
        description="Seconds after which files and ended batches are deleted, or a duration such as `72h`. "
        "Default: 30 days.",
    )
    max_conversations: int = pydantic.Field(
        10_000, ge=0, description="Maximum conversations of the web page, for each API key."
    )
    max_conversation_messages: int = pydantic.Field(
        10_000, ge=1, description="Maximum messages of one conversation of the web page, in all branches."
    )
    max_conversation_bytes: ByteCount = pydantic.Field(
        1024**3, ge=0, description="Maximum size of all conversations of the web page, for each API key."
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _add_keys_of_file(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("api_key_file") is None:
            return values
        try:
            keys = parse_list(values.get("api_keys", ()))
        except ValueError:
            return values  # the field reports it
        if not isinstance(keys, list | tuple):
            return values
        return {**values, "api_keys": (*keys, *read_api_keys(Path(values["api_key_file"])))}

    @pydantic.field_validator("media_hosts", "media_directory")
    @classmethod
    def _check_media_source(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        try:
            MediaPolicy(**{POLICY_FIELDS[str(info.field_name)]: value})
        except InvalidArgument as error:
            raise ValueError(error.reason) from None
        return value

    @property
    def media_policy(self) -> MediaPolicy:
        """Sources and limits of the media in requests."""
        return MediaPolicy(
            allowed_hosts=self.media_hosts,
            allow_private=self.media_allow_private,
            allowed_directory=self.media_directory,
            max_bytes=self.max_media_bytes,
            max_pixels=self.max_image_pixels,
            max_side_pixels=self.max_image_side,
            max_audio_seconds=self.max_audio_seconds,
            max_decoded_bytes=self.max_decoded_media_bytes,
            fetch_timeout_seconds=self.media_fetch_seconds,
        )
