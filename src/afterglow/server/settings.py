"""Settings of the server: address, authentication, admission, request limits and media policy."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any

import pydantic

from afterglow.errors import InvalidArgument
from afterglow.media.policy import MediaPolicy

KEY_DIGEST_PREFIX = "sha256:"


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


class ServerSettings(pydantic.BaseModel):
    """All server settings with their defaults. They form the table `[server]` of the settings file.

    >>> ServerSettings(port=0).max_queue
    64
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = pydantic.Field(8080, ge=0, le=65_535, description="0 selects a free port.")
    api_keys: tuple[Annotated[str, pydantic.AfterValidator(hash_api_key)], ...] = pydantic.Field(
        (), description="Keys, or their digests as `sha256:…`; only digests are kept. If empty, requests need no key."
    )
    api_key_file: Path | None = pydantic.Field(None, description="File with one key or digest per line.")
    allow_hosts: tuple[str, ...] = pydantic.Field(
        (), description="Accepted `Host` names beside loopback and `host`; `*`: all. Not checked if there are keys."
    )
    allow_origins: tuple[str, ...] = pydantic.Field((), description="CORS origins allowed to connect; `*`: all.")
    lazy_load: bool = pydantic.Field(False, description="Load a model on its first request instead of at startup.")
    max_queue: int = pydantic.Field(64, ge=0, description="Choices that may wait for a model; more get 429.")
    shutdown_seconds: float = pydantic.Field(30.0, ge=0, description="Time for running requests after a signal.")
    ping_seconds: float = pydantic.Field(15.0, gt=0, description="Interval of keep-alive comments on idle streams.")
    stall_seconds: float = pydantic.Field(
        30.0, gt=0, description="A connection whose client accepts no data for this time is closed."
    )
    max_buffered_tokens: int = pydantic.Field(
        4096, ge=1, description="Tokens of a choice that may wait for a slow client; the request is then cancelled."
    )
    deadline: float | None = pydantic.Field(None, gt=0, description="Maximum seconds for any request.")

    max_body_bytes: int = pydantic.Field(16 * 1024 * 1024, ge=1)
    max_choices: int = pydantic.Field(16, ge=1, le=128, description="Maximum of `n` and of `best_of`, for each prompt.")
    max_prompts: int = pydantic.Field(128, ge=1)
    max_inputs: int = pydantic.Field(256, ge=1, description="Inputs of one embeddings request.")
    max_messages: int = pydantic.Field(4096, ge=1)
    max_stops: int = pydantic.Field(16, ge=0)
    max_stop_length: int = pydantic.Field(256, ge=1, description="In characters.")
    max_tools: int = pydantic.Field(128, ge=0)
    max_grammar_bytes: int = pydantic.Field(65_536, ge=1, description="Size of a schema, a grammar or all tools.")
    max_logit_bias: int = pydantic.Field(1024, ge=0)
    media_hosts: tuple[str, ...] = pydantic.Field(
        (), description="Hosts from which media may be fetched; `*`: every public host."
    )
    media_directory: Path | None = pydantic.Field(None, description="Directory from which media may be read.")
    media_allow_private: bool = pydantic.Field(False, description="Also fetch from private network addresses.")
    media_fetch_seconds: float = pydantic.Field(10.0, gt=0, description="Timeout for fetching one file.")
    max_media: int = pydantic.Field(32, ge=0, description="Images and audio files of one request.")
    max_media_bytes: int = pydantic.Field(20 * 1024 * 1024, ge=1, description="Encoded size of one file.")
    max_image_pixels: int = pydantic.Field(32_000_000, ge=1)
    max_image_side: int = pydantic.Field(16_384, ge=1, description="In pixels.")
    max_audio_seconds: float = pydantic.Field(1800.0, gt=0)
    max_decoded_media_bytes: int = pydantic.Field(
        384 * 1024 * 1024,
        ge=1,
        description="Memory for media of all requests: files in the server, decoding in each engine; also the decoded "
        "size of all media of one request.",
    )
    max_stored_responses: int = pydantic.Field(256, ge=0)
    max_stored_response_bytes: int = pydantic.Field(64 * 1024 * 1024, ge=0, description="Size of all stored responses.")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _add_keys_of_file(cls, values: Any) -> Any:
        keys = values.get("api_keys", ())
        if values.get("api_key_file") is None or not isinstance(keys, list | tuple):
            return values
        return {**values, "api_keys": (*keys, *read_api_keys(Path(values["api_key_file"])))}

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
