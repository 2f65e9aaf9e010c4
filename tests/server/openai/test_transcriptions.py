"""/v1/audio/transcriptions and /v1/audio/translations with the `openai` client: formats, fields, errors."""

from __future__ import annotations

import shutil
import typing
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types.audio import transcription_create_params, translation_create_params

from afterglow.server.openai.schema.transcriptions import TranscriptionRequest, TranslationRequest
from afterglow.testing import models
from support.media_files import encode_audio
from support.media_prompts import note_audio
from support.server_process import ServerProcess

pytestmark = pytest.mark.native

RATE = 16_000
PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a model that names the note of a recording, and a model without audio."""
    directory = tmp_path_factory.mktemp("notes")
    shutil.copy(models.get_path("notes"), directory / "notes.gguf")
    shutil.copy(models.get_path("projector-notes"), directory / "mmproj-notes.gguf")
    process = ServerProcess(
        *(f"notes={directory / 'notes.gguf'}", f"vectors={models.get_path('embedding')}"),
        *("--context", "1024", "--sequences", "2"),
    )
    yield process
    process.stop()


def record(letters: str, format: str = "WAV") -> bytes:
    """One second of each note, with pauses of a quarter."""
    parts = [np.frombuffer(note_audio(letter, 1.0, RATE).samples, np.float32) for letter in letters]
    pause = np.zeros(RATE // 4, np.float32)
    return encode_audio(np.concatenate([piece for part in parts for piece in (part, pause)]), RATE, format)


def post(server: ServerProcess, path: str = PATH, file: bytes | None = None, **fields: Any) -> httpx.Response:
    data = {"model": "notes", **fields}
    return server.http.post(path, data=data, files={"file": ("note.wav", record("A") if file is None else file)})


def test_the_client_gets_text_subtitles_and_segments(server: ServerProcess) -> None:
    file = ("notes.flac", record("CEG", "FLAC"))
    with server.client() as client:
        options: dict[str, Any] = {"model": "notes", "file": file, "extra_body": {"window_seconds": 1.5}}
        transcript = client.audio.transcriptions.create(**options)
        assert transcript.text == "C E G"
        assert transcript.usage is not None
        usage = transcript.usage.model_dump()
        assert usage["input_token_details"]["audio_tokens"] > 60
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert client.audio.transcriptions.create(**options, response_format="text") == "C E G\n"
        subtitles = client.audio.transcriptions.create(**options, response_format="srt")
        assert str(subtitles).startswith("1\n00:00:00,000 --> 00:00:01,")
        assert str(subtitles).splitlines()[2] == "C"
        assert str(client.audio.transcriptions.create(**options, response_format="vtt")).startswith("WEBVTT\n\n00:00")
        verbose = client.audio.transcriptions.create(
            **options, response_format="verbose_json", language="en", timestamp_granularities=["segment"]
        )
    assert (verbose.text, verbose.language) == ("C E G", "en")
    assert verbose.duration == pytest.approx(3.75, abs=0.1)
    assert verbose.segments is not None
    assert [segment.text for segment in verbose.segments] == ["C", "E", "G"]
    assert verbose.segments[1].start == pytest.approx(1.2, abs=0.2)
    assert all(segment.avg_logprob > -0.5 for segment in verbose.segments)


def test_a_recording_can_be_translated(server: ServerProcess) -> None:
    with server.client() as client, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the client
        translation = client.audio.translations.create(model="notes", file=("note.wav", record("D")), temperature=0)
    assert translation.text == "D"
    assert post(server, "/v1/audio/translations", language="de").json()["error"]["param"] == "language"


def test_every_field_of_the_api_is_known() -> None:
    for schema, params in (
        (TranscriptionRequest, transcription_create_params.TranscriptionCreateParamsNonStreaming),
        (TranslationRequest, translation_create_params.TranslationCreateParams),
    ):
        assert set(typing.get_type_hints(params)) <= set(schema.model_fields)


def test_fields_are_honoured_or_refused_by_name(server: ServerProcess) -> None:
    for fields in (
        {"language": "de", "prompt": "a note", "temperature": "0.0", "response_format": "json"},
        {"timestamp_granularities[]": "segment", "chunking_strategy": "auto", "stream": "false"},
    ):
        assert post(server, **fields).json()["text"] == "A"
    for field, value in {
        "timestamp_granularities[]": "word",
        "chunking_strategy": "server_vad",
        "stream": "true",
        "include[]": "logprobs",
        "keywords[]": "note",
        "languages[]": "de",
        "known_speaker_names[]": "A",
        "known_speaker_references[]": "data:",
    }.items():
        error = post(server, **{field: value}).json()["error"]
        assert (error["param"], error["code"]) == (field.removesuffix("[]"), "unsupported_parameter")
    for field, value in {
        "temperature": "hot",
        "response_format": "diarized_json",
        "window_seconds": "0.5",
    }.items():
        response = post(server, **{field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    error = post(server, temprature="1").json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "temprature")
    assert "did you mean `temperature`?" in error["message"]


def test_adapters_in_the_name_of_the_model_are_refused(server: ServerProcess) -> None:
    for path in (PATH, "/v1/audio/translations"):
        response = post(server, path, model="notes+style")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
        assert "a transcription uses the base model" in response.json()["error"]["message"]


def test_bad_recordings_and_bodies_are_refused(server: ServerProcess) -> None:
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match="not a WAV, MP3 or FLAC") as error:
            client.audio.transcriptions.create(model="notes", file=("note.wav", b"no sound"))
        assert (error.value.code, error.value.param) == ("invalid_media", "file")
        with pytest.raises(openai.NotFoundError):
            client.audio.transcriptions.create(model="nothing", file=("note.wav", record("A")))
        with pytest.raises(openai.BadRequestError, match="embeddings only"):
            client.audio.transcriptions.create(model="vectors", file=("note.wav", record("A")))
    missing = server.http.post(PATH, data={"model": "notes"}, files={"other": b"x"}).json()["error"]
    assert missing["code"] == "unknown_parameter"
    for content_type, content, message in (
        ("application/json", b'{"model": "notes"}', "must be a form"),
        ("multipart/form-data", b"x", "cannot be read"),
        ("multipart/form-data; boundary=a", b"x", "cannot be read"),
        ("multipart/form-data; boundary=a", b"--a--\r\n", "`file` is missing"),
    ):
        response = server.http.post(PATH, content=content, headers={"content-type": content_type})
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
    text_file = server.http.post(PATH, data={"model": "notes", "file": "text"}, files={"prompt": b"x"})
    assert text_file.status_code == 400
    assert post(server).json()["text"] == "A"
