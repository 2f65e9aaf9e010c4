"""What a server may be told: where it listens, who may ask, and how much."""

from __future__ import annotations

from pathlib import Path

import pydantic

from afterglow.media.policy import MediaPolicy


class ServerSettings(pydantic.BaseModel):
    """Every setting of a server with its default; the table `[server]` of the settings file.

    >>> ServerSettings(port=0).queue
    64
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = pydantic.Field(8080, ge=0, le=65_535, description="0: any that is free.")
    api_keys: tuple[str, ...] = pydantic.Field((), description="Without one, everybody who can connect may ask.")
    allow_origins: tuple[str, ...] = pydantic.Field((), description="Web pages of these origins may ask; `*`: of all.")
    lazy_load: bool = pydantic.Field(False, description="Load a model when it is first asked for, not at the start.")
    max_queue: int = pydantic.Field(64, ge=0, description="Answers that may wait for a model; more get 429.")
    shutdown_seconds: float = pydantic.Field(30.0, ge=0, description="For running answers, once told to end.")
    ping_seconds: float = pydantic.Field(15.0, gt=0, description="Between signs of life on a silent stream.")
    deadline: float | None = pydantic.Field(None, gt=0, description="The longest an answer may take, in seconds.")

    max_body_bytes: int = pydantic.Field(16 * 1024 * 1024, ge=1)
    max_choices: int = pydantic.Field(16, ge=1, le=128, description="`n`, and prompts times `n`.")
    max_prompts: int = pydantic.Field(128, ge=1)
    max_inputs: int = pydantic.Field(256, ge=1, description="Texts of one request for embeddings.")
    max_messages: int = pydantic.Field(4096, ge=1)
    max_stops: int = pydantic.Field(16, ge=0)
    max_stop_length: int = pydantic.Field(256, ge=1, description="In characters.")
    max_tools: int = pydantic.Field(128, ge=0)
    max_grammar_bytes: int = pydantic.Field(65_536, ge=1, description="Of a schema or grammar, tools included.")
    max_logit_bias: int = pydantic.Field(1024, ge=0)
    media_hosts: tuple[str, ...] = pydantic.Field(
        (), description="Pictures and sounds may be fetched from these; `*`: from every public host."
    )
    media_directory: Path | None = pydantic.Field(None, description="Pictures and sounds in it may be named.")
    media_allow_private: bool = pydantic.Field(False, description="Also fetch from addresses inside a network.")
    media_fetch_seconds: float = pydantic.Field(10.0, gt=0, description="For fetching one of them.")
    max_media: int = pydantic.Field(32, ge=0, description="Pictures and sounds of one request.")
    max_media_bytes: int = pydantic.Field(20 * 1024 * 1024, ge=1, description="Of a file as it comes.")
    max_image_pixels: int = pydantic.Field(32_000_000, ge=1, description="Of a picture.")
    max_image_side: int = pydantic.Field(16_384, ge=1, description="Of a picture, in pixels.")
    max_audio_seconds: float = pydantic.Field(1800.0, gt=0)
    max_decoded_media_bytes: int = pydantic.Field(
        384 * 1024 * 1024, ge=1, description="Of all pictures and sounds of one request, as they are seen and heard."
    )
    max_stored_responses: int = pydantic.Field(256, ge=0, description="Responses that are remembered.")
    max_stored_response_bytes: int = pydantic.Field(64 * 1024 * 1024, ge=0, description="Of all remembered responses.")

    @property
    def media_policy(self) -> MediaPolicy:
        """What may come in as a picture or a sound."""
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
