"""Audio in conversations: every input form, sample rates, caching and errors."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

import afterglow
from afterglow import AudioData, MediaPolicy
from afterglow.agents.conversation import Conversation
from afterglow.engine.inspect import disk
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, InvalidMedia, MediaRefused, PromptTooLong, UnsupportedMedia
from afterglow.media.identity import fnv1a
from afterglow.testing import models
from support.greedy import load_greedy
from support.media_files import encode_audio
from support.media_prompts import color_image, noise_image, note_audio

pytestmark = pytest.mark.native

OPTIONS = {"context": 1024, "threads": 1}


@pytest.fixture(scope="module")
def audio_model():
    with load_greedy(models.get_path("notes"), projector=models.get_path("projector-notes"), **OPTIONS) as model:
        yield model


@pytest.fixture(autouse=True)
def no_handle_stays_open():
    """Disable the check: the model of this module stays open between tests."""


def encode_note(letter: str, format: str = "WAV", rate: int = 16_000) -> bytes:
    """Return a note as an audio file."""
    return encode_audio(np.frombuffer(note_audio(letter, rate=rate).samples, np.float32), rate, format)


def text_part(text: str = "Which note is this?") -> dict:
    return {"type": "text", "text": text}


def audio_part(letter: str) -> dict:
    return {"type": "audio", "audio": note_audio(letter)}


def input_audio_part(data: bytes, format: str | None = "wav", **fields: str) -> dict:
    audio = {"data": base64.b64encode(data).decode(), **({} if format is None else {"format": format})}
    return {"type": "input_audio", "input_audio": audio, **fields}


def user_message(*parts: dict) -> dict:
    return {"role": "user", "content": list(parts)}


def test_an_audio_model_reports_its_modality(audio_model):
    assert audio_model.supports("audio")
    assert not audio_model.supports("image")
    assert audio_model.media_error == ""


def test_audio_is_encoded_once_per_conversation(audio_model):
    audio_model.clear_cache()
    messages = [user_message(text_part("Which note is "), audio_part("A"), text_part(" this?"))]
    first = audio_model.chat(messages)
    assert (first.text, first.usage.encoded_media, first.usage.media_tokens, first.usage.audio_tokens) == (
        "A",
        1,
        13,
        13,
    )
    messages += [first.message, user_message(text_part("Are you sure?"))]
    second = audio_model.chat(messages)
    assert (second.text, second.usage.encoded_media, second.usage.cached_media_tokens) == ("A", 0, 13)
    assert second.usage.cached_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize("letter", "CDEFGAB")
def test_wav_and_mp3_files_are_recognized(audio_model, letter):
    for format in ("wav", "mp3"):
        assert (
            audio_model.chat(
                [user_message(input_audio_part(encode_note(letter, format.upper()), format), text_part())]
            ).text
            == letter
        )


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_common_sample_rates_are_recognized(audio_model, rate):
    for letter in "CAB":
        assert (
            audio_model.chat([user_message(input_audio_part(encode_note(letter, rate=rate)), text_part())]).text
            == letter
        )


def test_every_audio_input_form_gives_the_same_audio(audio_model, tmp_path):
    data = encode_note("G")
    encoded = base64.b64encode(data).decode()
    decoded = afterglow.media.audio.decode_audio(data)
    parts = [
        input_audio_part(data),
        input_audio_part(data, id=fnv1a(data)),
        input_audio_part(data, None),
        {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{encoded}", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{encoded}"}},
        {"type": "audio", "audio": decoded},
    ]
    audio_model.clear_cache()
    responses = [audio_model.chat([user_message(part, text_part())]) for part in parts]
    assert {response.text for response in responses} == {"G"}
    assert [response.usage.encoded_media for response in responses] == [1, 0, 0, 0, 0, 0]
    path = tmp_path / "note.wav"
    path.write_bytes(data)
    for source in (data, path, f"data:audio/wav;base64,{encoded}"):
        response = Conversation(audio_model).ask("Which note is this?", audio=[source])
        assert (response.text, response.usage.encoded_media) == ("G", 0)


def test_a_completion_prompt_may_contain_audio(audio_model):
    assert audio_model.complete(["Listen: ", note_audio("E"), "\n"], max_tokens=1).text == "E"
    assert audio_model.complete(["Listen: ", note_audio("E", volume=0), "\n"], max_tokens=1).text == "N"
    assert audio_model.complete("Listen: \n", max_tokens=1).text == "N"


def test_audio_is_encoded_again_after_the_cache_is_cleared(tmp_path):
    options = {**OPTIONS, "engine": EngineSettings(disk_cache_directory=tmp_path / "cache")}
    with load_greedy(models.get_path("notes"), projector=models.get_path("projector-notes"), **options) as model:
        for _ in range(2):
            assert model.chat([user_message(audio_part("D"), text_part())]).usage.encoded_media == 1
            assert model.chat([user_message(audio_part("D"), text_part())]).usage.encoded_media == 0
            model.clear_cache()
            assert not list((tmp_path / "cache").rglob("media/*"))
        model.chat([user_message(audio_part("D"), text_part())])
    assert list((tmp_path / "cache").rglob("media/*"))
    assert disk.clear(tmp_path / "cache") > 13 * 64 * 4
    assert not list((tmp_path / "cache").rglob("media/*"))


def test_audio_at_another_position_is_not_encoded_again(audio_model):
    audio_model.clear_cache()
    audio_model.chat([user_message(audio_part("D"), text_part())])
    moved = audio_model.chat(
        [user_message(text_part("Something else stands before it now. "), audio_part("D"), text_part())]
    )
    assert (moved.text, moved.usage.encoded_media, moved.usage.cached_media_tokens) == ("D", 0, 0)


def test_a_loaded_conversation_with_audio_has_a_prefix_hit(audio_model, tmp_path):
    conversation = Conversation(audio_model)
    assert conversation.ask("Which note is this?", audio=[encode_note("F")]).text == "F"
    conversation.save(tmp_path / "conversation.json")
    loaded = Conversation(audio_model)
    loaded.load(tmp_path / "conversation.json")
    response = loaded.ask("Are you sure?")
    assert (response.text, response.usage.encoded_media, response.usage.cached_media_tokens) == ("F", 0, 13)


def test_audio_files_and_urls_need_a_media_policy(audio_model, tmp_path):
    (tmp_path / "note.wav").write_bytes(encode_note("B"))
    for source in (str(tmp_path / "note.wav"), "http://127.0.0.1:1/note.wav"):
        with pytest.raises(MediaRefused):
            audio_model.chat([user_message({"type": "input_audio", "input_audio": {"data": source}}, text_part())])
    allowed = {**OPTIONS, "media_policy": MediaPolicy(allowed_directory=tmp_path)}
    with load_greedy(models.get_path("notes"), projector=models.get_path("projector-notes"), **allowed) as model:
        part = {"type": "input_audio", "input_audio": {"data": "note.wav"}}
        assert model.chat([user_message(part, text_part())]).text == "B"


@pytest.mark.parametrize("count", [1, 2, 100, 1599])
def test_the_shortest_audio_is_supported(audio_model, count):
    """llama.cpp would abort the process for one sample."""
    data = encode_audio(np.zeros(count, np.float32))
    assert audio_model.chat([user_message(input_audio_part(data), text_part())]).text == "N"


def test_invalid_and_empty_audio_is_rejected(audio_model):
    valid = encode_note("A")
    for data in (
        valid[:30],
        encode_audio(np.zeros(0, np.float32)),
        b"not audio at all",
        b"\xff\xfb\x90\0" + bytes(300),
    ):
        with pytest.raises(InvalidMedia):
            audio_model.chat([user_message(input_audio_part(data), text_part())])
    with pytest.raises(InvalidMedia):
        audio_model.chat([user_message(input_audio_part(b""), text_part())])
    with pytest.raises(InvalidArgument, match="id"):
        audio_model.chat([user_message(input_audio_part(valid, id="0" * 16), text_part())])


def test_non_finite_samples_are_rejected():
    for invalid in (np.nan, np.inf):
        with pytest.raises(InvalidArgument, match="samples"):
            AudioData(sample_rate=16_000, samples=np.full(800, invalid, np.float32).tobytes())


def test_audio_longer_than_the_context_is_rejected(audio_model):
    with pytest.raises(PromptTooLong, match="1,5"):
        audio_model.chat([user_message({"type": "audio", "audio": note_audio("A", seconds=60)}, text_part())])


def test_unsupported_modalities_are_rejected_or_stripped(audio_model):
    with pytest.raises(UnsupportedMedia, match="the model does not support image input, only text and audio"):
        audio_model.chat([user_message({"type": "image", "image": color_image("R")}, text_part())])
    with (
        load_greedy(models.get_path("colors"), projector=models.get_path("projector-colors"), **OPTIONS) as model,
        pytest.raises(UnsupportedMedia, match="the model does not support audio input, only text and image"),
    ):
        model.chat([user_message(audio_part("A"), text_part())])
    stripping = {**OPTIONS, "strip_media": True}
    with load_greedy(models.get_path("notes"), projector=models.get_path("projector-notes"), **stripping) as model:
        assert (
            model.chat([user_message({"type": "image", "image": color_image("R")}, audio_part("A"), text_part())]).text
            == "A"
        )


def test_an_image_and_audio_in_one_message_are_at_their_positions():
    with load_greedy(models.get_path("attention"), projector=models.get_path("projector-both"), **OPTIONS) as model:
        assert model.supports("image")
        assert model.supports("audio")
        image_part = {"type": "image", "image": noise_image(1)}
        first = model.chat(
            [user_message(text_part("Look: "), image_part, text_part(" Listen: "), audio_part("A"))], max_tokens=4
        )
        assert (first.usage.media_tokens, first.usage.audio_tokens, first.usage.encoded_media) == (29, 13, 2)
        swapped = model.chat(
            [user_message(text_part("Look: "), audio_part("A"), text_part(" Listen: "), image_part)], max_tokens=4
        )
        assert (swapped.usage.cached_media_tokens, swapped.usage.encoded_media) == (0, 0)
        assert (
            "Look: [image] Listen: [audio]"
            in model.plan_chat(
                [user_message(text_part("Look: "), image_part, text_part(" Listen: "), audio_part("A"))]
            ).prompt.text
        )


def test_encoded_audio_survives_a_restart(tmp_path: Path):
    options = {**OPTIONS, "engine": EngineSettings(disk_cache_directory=tmp_path / "cache")}
    messages = [user_message(audio_part("C"), text_part())]
    with load_greedy(models.get_path("notes"), projector=models.get_path("projector-notes"), **options) as model:
        first = model.chat(messages)
        assert (first.text, first.usage.encoded_media) == ("C", 1)
    with load_greedy(models.get_path("notes"), projector=models.get_path("projector-notes"), **options) as model:
        resumed = model.chat([*messages, first.message, user_message(text_part("Are you sure?"))])
        assert (resumed.text, resumed.usage.encoded_media, resumed.usage.cached_media_tokens) == ("C", 0, 13)
        moved = model.chat([user_message(text_part("Elsewhere: "), audio_part("C"), text_part())])
        assert (moved.text, moved.usage.encoded_media, moved.usage.cached_media_tokens) == ("C", 0, 0)


def test_a_hybrid_model_resumes_after_the_audio():
    """There is a checkpoint after the audio: another question computes only its own text."""
    with load_greedy(models.get_path("hybrid"), projector=models.get_path("projector-wave"), **OPTIONS) as model:
        model.chat(
            [user_message(audio_part("C"), text_part("How long is this sound, and what is it of?"))], max_tokens=4
        )
        second = model.chat([user_message(audio_part("C"), text_part("Another question altogether."))], max_tokens=4)
        assert (second.usage.cached_media_tokens, second.usage.encoded_media) == (13, 0)
