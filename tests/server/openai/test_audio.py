"""Audio over HTTP: `input_audio` parts reach an audio model, and invalid audio gets a specific 400."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from afterglow.testing import models
from support.media_files import encode_audio, encode_image, gradient
from support.media_prompts import note_audio
from support.server_process import ServerProcess, get_text

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def audio_server() -> Iterator[ServerProcess]:
    """A server with a model that names the note of an audio clip. A clip may last ten seconds."""
    projector = str(models.get_path("projector-notes"))
    process = ServerProcess(
        *(f"notes={models.get_path('notes')}", "--projector", projector, "--context", "1024"),
        AFTERGLOW_SERVER_MAX_AUDIO_SECONDS="10",
    )
    yield process
    process.stop()


def build_note_part(letter: str, format: str = "wav", seconds: float = 0.5, rate: int = 16_000) -> dict[str, Any]:
    samples = np.frombuffer(note_audio(letter, seconds, rate).samples, np.float32)
    return build_audio_part(encode_audio(samples, rate, format.upper()), format)


def build_audio_part(data: bytes, format: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": format}}


def build_messages(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "Which note is this?"}, *parts]}]


def test_audio_is_encoded_once_and_cached_in_the_next_turn(audio_server: ServerProcess) -> None:
    messages = build_messages(build_note_part("A"))
    with audio_server.client() as client:
        first = client.chat.completions.create(model="notes", messages=messages)
        assert first.choices[0].message.content == "A"
        messages += [{"role": "assistant", "content": "A"}, {"role": "user", "content": "Are you sure?"}]
        second = client.chat.completions.create(model="notes", messages=messages)
    details = first.usage.prompt_tokens_details.model_dump()
    assert (details["audio_tokens"], details["encoded_media"], details["image_tokens"]) == (13, 1, 0)
    assert second.choices[0].message.content == "A"
    details = second.usage.prompt_tokens_details.model_dump()
    assert (details["cached_media_tokens"], details["encoded_media"], details["audio_tokens"]) == (13, 0, 13)
    assert details["cached_tokens"] >= first.usage.prompt_tokens - 1


def test_wav_and_mp3_give_the_same_output(audio_server: ServerProcess) -> None:
    for letter in "CEGBC":
        for format, rate in (("wav", 16_000), ("mp3", 44_100)):
            messages = build_messages(build_note_part(letter, format, rate=rate))
            assert get_text(audio_server.chat(model="notes", messages=messages)) == letter


def test_a_prompt_with_audio_can_be_streamed(audio_server: ServerProcess) -> None:
    with audio_server.client() as client:
        messages = build_messages(build_note_part("D"))
        stream = client.chat.completions.create(model="notes", messages=messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "D"


def test_invalid_audio_gets_400_with_the_reason(audio_server: ServerProcess) -> None:
    wav = encode_audio(np.frombuffer(note_audio("A").samples, np.float32))
    cases = {
        "it is empty": build_audio_part(b""),
        "not a WAV, MP3 or FLAC": build_audio_part(b"no sound at all"),
        "it contains no audio samples": build_audio_part(encode_audio(np.zeros(0, np.float32))),
        "damaged": build_audio_part(wav[:30]),
        "base64 is invalid": {"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}},
        "longer than the limit of 10 seconds": build_note_part("A", seconds=10.5),
    }
    for reason, part in cases.items():
        with audio_server.client() as client, pytest.raises(openai.BadRequestError, match=reason) as error:
            client.chat.completions.create(model="notes", messages=build_messages(part))
        assert error.value.code == "invalid_media"
    assert get_text(audio_server.chat(model="notes", messages=build_messages(build_note_part("F")))) == "F"


def test_audio_of_one_sample_is_accepted(audio_server: ServerProcess) -> None:
    part = build_audio_part(encode_audio(np.zeros(1, np.float32)))
    completion = audio_server.chat(model="notes", messages=build_messages(part))
    assert get_text(completion) == "N"
    assert completion["usage"]["prompt_tokens_details"]["audio_tokens"] == 3


def test_audio_over_the_context_length_gets_400(audio_server: ServerProcess) -> None:
    parts = [build_note_part(letter, seconds=9) for letter in "CDEFG"]
    completion = audio_server.chat(model="notes", messages=build_messages(*parts))
    assert (completion["status"], completion["error"]["code"]) == (400, "context_length_exceeded")


def test_an_image_for_an_audio_model_gets_400(audio_server: ServerProcess) -> None:
    url = "data:image/png;base64," + base64.b64encode(encode_image(gradient())).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    error = audio_server.chat(model="notes", messages=build_messages(part))["error"]
    assert (error["code"], error["param"]) == ("unsupported_media", "messages[0].content")
    assert "does not support image input, only text and audio" in error["message"]


def test_cache_template_and_model_routes_show_audio(audio_server: ServerProcess) -> None:
    body = {"model": "notes", "messages": build_messages(build_note_part("G"))}
    audio_server.chat(**body)
    assert "[audio]" in str(audio_server.http.get("/cache").json())
    assert "Which note is this?[audio]" in str(audio_server.post("/apply-template", body).json())
    assert audio_server.post("/cache/explain", body).json()["reused_tokens"] > 13
    (card,) = audio_server.http.get("/v1/models").json()["data"]
    assert "audio" in card["capabilities"]
    assert "image" not in card["capabilities"]
