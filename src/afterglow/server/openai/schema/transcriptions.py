"""Fields of /v1/audio/transcriptions and /v1/audio/translations, which are the parts of a form."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from afterglow.server.schema.base import NameField, OptionalModel, StrictModel, supports_only, unsupported

TranscriptFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]
LIST_FIELDS = ("include", "keywords", "known_speaker_names", "known_speaker_references", "languages")
CONTENT = "the text of the recording is all that the model writes"


class TranslationRequest(StrictModel):
    """A recording to translate into English."""

    file: bytes = pydantic.Field(description="Audio file: WAV, MP3 or FLAC.", json_schema_extra={"format": "binary"})
    model: OptionalModel = None
    prompt: str | None = pydantic.Field(None, description="Context for the model, e.g. names that occur.")
    response_format: TranscriptFormat | None = None
    temperature: float | None = pydantic.Field(None, ge=0, le=2, description="Default: 0.")
    window_seconds: float | None = pydantic.Field(
        None, ge=1, le=1800, description="Maximum length of a window of a long recording. Default: 30."
    )


class TranscriptionRequest(TranslationRequest):
    """A recording to transcribe."""

    language: NameField | None = pydantic.Field(None, description="Language of the speech; the model is told.")
    timestamp_granularities: list[str] | None = supports_only(
        ["segment"], reason="the times are those of the windows; models report no times of words"
    )
    chunking_strategy: str | None = supports_only("auto", reason="recordings are cut where they are quiet")
    stream: bool | None = supports_only(False, reason="transcripts are returned as a whole")
    include: list[str] | None = unsupported("`avg_logprob` is part of verbose_json")
    keywords: list[str] | None = unsupported("write them into `prompt`")
    languages: list[str] | None = unsupported("use `language`")
    known_speaker_names: list[str] | None = unsupported(CONTENT)
    known_speaker_references: list[str] | None = unsupported(CONTENT)


def parse_form_value(name: str, values: list[Any]) -> Any:
    """Return the value of a field of a form: text as its number or truth value, several values as a list.

    >>> parse_form_value("temperature", ["0.5"]), parse_form_value("include", ["logprobs"])
    (0.5, ['logprobs'])
    """
    if name in LIST_FIELDS or name == "timestamp_granularities":
        return values
    value = values[0]
    if name in ("temperature", "window_seconds"):
        try:
            return float(value)
        except (TypeError, ValueError):
            return value  # the schema rejects it
    return {"true": True, "false": False}.get(value, value) if name == "stream" else value
