"""Sounds over HTTP: the client's `input_audio` reaches a model that hears, and what is wrong is a clear 400."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from afterglow.testing import models
from support.media_files import gradient, recorded, saved
from support.media_prompts import played
from support.server_process import ServerProcess

HEARING = (
    f"notes={models.get_path('notes')}",
    "--projector",
    str(models.get_path("projector-notes")),
    "--context",
    "1024",
)


@pytest.fixture(scope="module")
def hearing() -> Iterator[ServerProcess]:
    """A server with a model that names the note of a sound, which may last ten seconds."""
    running = ServerProcess(*HEARING, AFTERGLOW_SERVER_MAX_SOUND_SECONDS="10")
    yield running
    running.end()


def note(letter: str, format: str = "wav", seconds: float = 0.5, rate: int = 16_000) -> dict[str, Any]:
    samples = np.frombuffer(played(letter, seconds, rate).samples, np.float32)
    return sound(recorded(samples, rate, format.upper()), format)


def sound(data: bytes, format: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": format}}


def question(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "Which note is this?"}, *parts]}]


def test_the_openai_client_sends_a_sound_and_asks_again(hearing: ServerProcess) -> None:
    talk = question(note("A"))
    with hearing.client() as client:
        first = client.chat.completions.create(model="notes", messages=talk)
        assert first.choices[0].message.content == "A"
        talk += [{"role": "assistant", "content": "A"}, {"role": "user", "content": "Are you sure?"}]
        second = client.chat.completions.create(model="notes", messages=talk)
    details = first.usage.prompt_tokens_details.model_dump()
    assert (details["audio_tokens"], details["encoded_media"], details["image_tokens"]) == (13, 1, 0)
    assert second.choices[0].message.content == "A"
    details = second.usage.prompt_tokens_details.model_dump()
    assert (details["cached_media_tokens"], details["encoded_media"], details["audio_tokens"]) == (13, 0, 13)
    assert details["cached_tokens"] >= first.usage.prompt_tokens - 1


def test_the_server_names_the_note_of_each_sound_in_both_formats(hearing: ServerProcess) -> None:
    for letter in "CEGBC":
        for format, rate in (("wav", 16_000), ("mp3", 44_100)):
            answer = hearing.chat(model="notes", messages=question(note(letter, format, rate=rate)))
            assert answer["choices"][0]["message"]["content"] == letter


def test_a_streamed_answer_to_a_sound_is_the_same(hearing: ServerProcess) -> None:
    with hearing.client() as client:
        stream = client.chat.completions.create(model="notes", messages=question(note("D")), stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in stream if piece.choices) == "D"


def test_bad_sounds_are_a_400_that_says_why_and_the_server_goes_on(hearing: ServerProcess) -> None:
    whole = recorded(np.frombuffer(played("A").samples, np.float32))
    cases = {
        "it is empty": sound(b""),
        "no WAV, MP3 or FLAC": sound(b"no sound at all"),
        "there is no sound in it": sound(recorded(np.zeros(0, np.float32))),
        "damaged": sound(whole[:30]),
        "base64 is damaged": {"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}},
        "longer than 10 seconds": note("A", seconds=10.5),
    }
    for reason, part in cases.items():
        with hearing.client() as client, pytest.raises(openai.BadRequestError, match=reason) as caught:
            client.chat.completions.create(model="notes", messages=question(part))
        assert caught.value.code == "invalid_media"
    assert hearing.chat(model="notes", messages=question(note("F")))["choices"][0]["message"]["content"] == "F"


def test_a_sound_of_one_sample_is_answered(hearing: ServerProcess) -> None:
    answer = hearing.chat(model="notes", messages=question(sound(recorded(np.zeros(1, np.float32)))))
    assert answer["choices"][0]["message"]["content"] == "N"
    assert answer["usage"]["prompt_tokens_details"]["audio_tokens"] == 3


def test_a_sound_that_fills_the_context_is_refused_in_tokens(hearing: ServerProcess) -> None:
    answer = hearing.chat(model="notes", messages=question(*[note(letter, seconds=9) for letter in "CDEFG"]))
    assert (answer["status"], answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_picture_for_a_model_that_only_hears_is_refused(hearing: ServerProcess) -> None:
    url = "data:image/png;base64," + base64.b64encode(saved(gradient())).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    error = hearing.chat(model="notes", messages=question(part))["error"]
    assert (error["code"], error["param"]) == ("unsupported_media", "messages[0].content")
    assert "takes no image, only text and audio" in error["message"]


def test_what_a_server_says_of_itself_has_sounds_in_it(hearing: ServerProcess) -> None:
    hearing.chat(model="notes", messages=question(note("G")))
    assert "[sound]" in str(hearing.http.get("/cache").json())
    template = hearing.post("/apply-template", {"model": "notes", "messages": question(note("G"))}).json()
    assert "Which note is this?[sound]" in str(template)
    explained = hearing.post("/cache/explain", {"model": "notes", "messages": question(note("G"))}).json()
    assert explained["reused_tokens"] > 13
    (card,) = hearing.http.get("/v1/models").json()["data"]
    assert "audio" in card["capabilities"]
    assert "image" not in card["capabilities"]
