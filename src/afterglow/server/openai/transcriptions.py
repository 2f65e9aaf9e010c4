"""Routes /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import pydantic
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.formparsers import MultiPartException, MultiPartParser

from afterglow.api.transcription import (
    DEFAULT_WINDOW_SECONDS,
    Transcription,
    TranscriptionSegment,
    TranscriptionTask,
)
from afterglow.server.adapters import refuse_adapters
from afterglow.server.admission import MediaReservation
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import APIError, invalid_request_error, validation_to_api_error
from afterglow.server.logs import get_record
from afterglow.server.openai.schema.transcriptions import TranscriptionRequest, TranslationRequest, parse_form_value
from afterglow.server.state import ServerState

BodyT = TypeVar("BodyT", bound=TranslationRequest)


class FormParser(MultiPartParser):
    """Parses a form without temporary files. The server limits the size of the body."""

    spool_max_size = 1 << 62


def build_router(state: ServerState) -> APIRouter:
    """Return the router of these routes."""
    router = APIRouter()

    @router.post(
        "/v1/audio/transcriptions", summary="Transcribe audio", openapi_extra=describe_form(TranscriptionRequest)
    )
    async def transcriptions(request: Request) -> Response:
        body = await read_form(request, TranscriptionRequest)
        work = transcribe(state, body, "transcribe", body.language, get_tenant_salt(request))
        return await state.run_while_connected(request, work, "file")

    @router.post(
        "/v1/audio/translations",
        summary="Translate audio into English",
        openapi_extra=describe_form(TranslationRequest),
    )
    async def translations(request: Request) -> Response:
        body = await read_form(request, TranslationRequest)
        work = transcribe(state, body, "translate", None, get_tenant_salt(request))
        return await state.run_while_connected(request, work, "file")

    return router


def describe_form(body: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Return the description of a form for the OpenAPI document."""
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": body.model_json_schema()}}}}


async def read_form(request: Request, body_type: type[BodyT]) -> BodyT:
    """Parse a form. Clients write the names of lists with brackets."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise APIError(400, "the body must be a form: multipart/form-data with an audio file in the part `file`")
    content = await request.body()

    async def stream() -> AsyncIterator[bytes]:
        yield content

    values: dict[str, list[Any]] = {}
    try:
        form = await FormParser(request.headers, stream(), max_files=1, max_fields=64).parse()  # type: ignore[arg-type]
    except (MultiPartException, KeyError, ValueError) as error:
        raise APIError(400, f"the form cannot be read: {error}", code="invalid_form") from None
    for name, value in form.multi_items():
        data = value if isinstance(value, str) else await value.read()
        values.setdefault(name.removesuffix("[]"), []).append(data)
    parsed = {name: parse_form_value(name, items) for name, items in values.items()}
    try:
        return body_type.model_validate(parsed)
    except pydantic.ValidationError as error:
        errors = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise validation_to_api_error(errors, parsed) from None


async def transcribe(
    state: ServerState, body: TranslationRequest, task: TranscriptionTask, language: str | None, salt: str
) -> Response:
    """Cut the recording into windows and transcribe them. Its files count against the media budget."""
    model = await state.get_generating_model(body.model)
    if not model.supports("audio"):
        reason = model.media_error or "it has no audio projector"
        raise invalid_request_error(
            "model", f"the model {model.name!r} accepts no audio: {reason}", "unsupported_media"
        )
    refuse_adapters(state.models, body.model, "a transcription")
    with contextlib.ExitStack() as resources:
        ticket = state.get_admission_queue(model).admit(1)
        resources.callback(ticket.release)
        reservation = MediaReservation(state.media_budget, state.settings.max_decoded_media_bytes)
        resources.callback(reservation.release)
        reservation.resize(len(body.file))
        seconds = body.window_seconds or DEFAULT_WINDOW_SECONDS
        windows = await state.run_media_work(lambda: model.split_audio(body.file, seconds))
        reservation.resize(len(body.file) + sum(len(window.media.data) for window in windows))
        transcription = await state.run_long_call(
            lambda cancel: model.transcribe_windows(
                windows,
                task=task,
                language=language,
                prompt=body.prompt,
                temperature=body.temperature or 0.0,
                salt=salt,
                cancel=cancel,
            )
        )
    usages = [segment.usage for segment in transcription.segments]
    state.metrics.record_usage(model.name, usages)
    record = get_record()
    record.model = model.name
    record.record_usage(usages, ["stop"] * len(usages), len(usages))
    return build_response(transcription, task, language, body)


def build_response(
    transcription: Transcription, task: TranscriptionTask, language: str | None, body: TranslationRequest
) -> Response:
    """Build the response in the format of the request."""
    match body.response_format:
        case "text":
            return PlainTextResponse(f"{transcription.text}\n")
        case "srt":
            return PlainTextResponse(transcription.to_srt())
        case "vtt":
            return PlainTextResponse(transcription.to_vtt(), media_type="text/vtt")
        case "verbose_json":
            return JSONResponse(
                {
                    "task": task,
                    "language": language or "unknown",
                    "duration": transcription.seconds,
                    "text": transcription.text,
                    "segments": [
                        build_segment(index, segment, body.temperature or 0.0)
                        for index, segment in enumerate(transcription.segments)
                    ],
                    "usage": {"type": "duration", "seconds": round(transcription.seconds)},
                }
            )
    return JSONResponse({"text": transcription.text, "usage": build_usage(transcription)})


def build_segment(index: int, segment: TranscriptionSegment, temperature: float) -> dict[str, Any]:
    """Build a segment of verbose_json. `no_speech_prob` is null: models with a projector do not have it."""
    text = segment.text.encode()
    return {
        "id": index,
        "seek": round(segment.start * 100),
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": temperature,
        "avg_logprob": segment.mean_logprob,
        "compression_ratio": len(text) / len(zlib.compress(text)) if text else 0.0,
        "no_speech_prob": None,
        "finish_reason": "stop" if segment.is_complete else "length",
    }


def build_usage(transcription: Transcription) -> dict[str, Any]:
    """Sum the tokens of all windows."""
    usages = [segment.usage for segment in transcription.segments]
    prompt_tokens, audio_tokens = sum(use.prompt_tokens for use in usages), sum(use.audio_tokens for use in usages)
    generated_tokens = sum(use.generated_tokens for use in usages)
    return {
        "type": "tokens",
        "input_tokens": prompt_tokens,
        "input_token_details": {"audio_tokens": audio_tokens, "text_tokens": prompt_tokens - audio_tokens},
        "output_tokens": generated_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
    }
