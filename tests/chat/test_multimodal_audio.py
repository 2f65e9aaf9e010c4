"""Sounds in conversations: what the model says is what it heard, whichever way the sound came in."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

import afterglow
from afterglow import AudioData, MediaPolicy
from afterglow.api.conversation import Conversation
from afterglow.engine.inspect import disk
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, InvalidMedia, MediaRefused, PromptTooLong, UnsupportedMedia
from afterglow.media.identity import fnv1a
from afterglow.testing import models
from support.media_files import recorded
from support.media_prompts import coloured, noisy, played

HEARING = {"context": 1024, "threads": 1}


@pytest.fixture(scope="module")
def notes():
    with afterglow.load(models.get_path("notes"), projector=models.get_path("projector-notes"), **HEARING) as model:
        yield model


@pytest.fixture(autouse=True)
def no_handle_stays_open():
    """The model of this module stays open from test to test."""


def file_of(letter: str, format: str = "WAV", rate: int = 16_000) -> bytes:
    """A note as a file."""
    return recorded(np.frombuffer(played(letter, rate=rate).samples, np.float32), rate, format)


def text(words: str = "Which note is this?") -> dict:
    return {"type": "text", "text": words}


def sound(letter: str) -> dict:
    return {"type": "audio", "audio": played(letter)}


def sent(data: bytes, format: str | None = "wav", **more: str) -> dict:
    inner = {"data": base64.b64encode(data).decode(), **({} if format is None else {"format": format})}
    return {"type": "input_audio", "input_audio": inner, **more}


def user(*parts: dict) -> dict:
    return {"role": "user", "content": list(parts)}


def test_a_model_that_hears_says_so(notes):
    assert notes.supports("audio")
    assert not notes.supports("image")
    assert notes.media_error == ""


def test_a_conversation_about_a_sound_encodes_it_once(notes):
    notes.clear_cache()
    talk = [user(text("Which note is "), sound("A"), text(" this?"))]
    first = notes.chat(talk)
    assert (first.text, first.usage.encoded_media, first.usage.media_tokens, first.usage.audio_tokens) == (
        "A",
        1,
        13,
        13,
    )
    talk += [first.message, user(text("Are you sure?"))]
    second = notes.chat(talk)
    assert (second.text, second.usage.encoded_media, second.usage.cached_media_tokens) == ("A", 0, 13)
    assert second.usage.cached_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize("letter", "CDEFGAB")
def test_every_note_is_named_from_a_wav_and_from_an_mp3_file(notes, letter):
    for format in ("wav", "mp3"):
        assert notes.chat([user(sent(file_of(letter, format.upper()), format), text())]).text == letter


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_every_usual_rate_is_heard(notes, rate):
    for letter in "CAB":
        assert notes.chat([user(sent(file_of(letter, rate=rate)), text())]).text == letter


def test_every_way_to_write_a_sound_is_the_same_sound(notes, tmp_path):
    data = file_of("G")
    whole = base64.b64encode(data).decode()
    heard = afterglow.media.audio.decode_audio(data)
    parts = [
        sent(data),
        sent(data, id=fnv1a(data)),
        sent(data, None),
        {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{whole}", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{whole}"}},
        {"type": "audio", "audio": heard},
    ]
    notes.clear_cache()
    answers = [notes.chat([user(part, text())]) for part in parts]
    assert {answer.text for answer in answers} == {"G"}
    assert [answer.usage.encoded_media for answer in answers] == [1, 0, 0, 0, 0, 0]
    path = tmp_path / "note.wav"
    path.write_bytes(data)
    for one in (data, path, f"data:audio/wav;base64,{whole}"):
        turn = Conversation(notes).ask("Which note is this?", audio=[one])
        assert (turn.text, turn.usage.encoded_media) == ("G", 0)


def test_a_prompt_written_by_hand_holds_a_sound(notes):
    assert notes.complete(["Listen: ", played("E"), "\n"], max_tokens=1).text == "E"
    assert notes.complete(["Listen: ", played("E", volume=0), "\n"], max_tokens=1).text == "N"
    assert notes.complete("Listen: \n", max_tokens=1).text == "N"


def test_what_is_forgotten_is_encoded_again(tmp_path):
    kept = {**HEARING, "engine": EngineSettings(disk_cache_directory=tmp_path / "kept")}
    with afterglow.load(models.get_path("notes"), projector=models.get_path("projector-notes"), **kept) as model:
        for _ in range(2):
            assert model.chat([user(sound("D"), text())]).usage.encoded_media == 1
            assert model.chat([user(sound("D"), text())]).usage.encoded_media == 0
            model.clear_cache()
            assert not list((tmp_path / "kept").rglob("pictures/*"))
        model.chat([user(sound("D"), text())])
    assert list((tmp_path / "kept").rglob("pictures/*"))
    assert disk.clear(tmp_path / "kept") > 13 * 64 * 4
    assert not list((tmp_path / "kept").rglob("pictures/*"))


def test_the_same_sound_elsewhere_is_not_encoded_again(notes):
    notes.clear_cache()
    notes.chat([user(sound("D"), text())])
    moved = notes.chat([user(text("Something else stands before it now. "), sound("D"), text())])
    assert (moved.text, moved.usage.encoded, moved.usage.media_cached) == ("D", 0, 0)


def test_a_saved_conversation_with_a_sound_goes_on_where_it_was(notes, tmp_path):
    talk = Conversation(notes)
    assert talk.ask("Which note is this?", audio=[file_of("F")]).text == "F"
    talk.save(tmp_path / "talk.json")
    again = Conversation(notes)
    again.load(tmp_path / "talk.json")
    turn = again.ask("Are you sure?")
    assert (turn.text, turn.usage.encoded_media, turn.usage.cached_media_tokens) == ("F", 0, 13)


def test_a_sound_from_a_file_or_a_host_needs_to_be_allowed(notes, tmp_path):
    (tmp_path / "note.wav").write_bytes(file_of("B"))
    for source in (str(tmp_path / "note.wav"), "http://127.0.0.1:1/note.wav"):
        with pytest.raises(MediaRefused):
            notes.chat([user({"type": "input_audio", "input_audio": {"data": source}}, text())])
    allowed = {**HEARING, "media": MediaPolicy(allowed_directory=tmp_path)}
    with afterglow.load(models.get_path("notes"), projector=models.get_path("projector-notes"), **allowed) as model:
        part = {"type": "input_audio", "input_audio": {"data": "note.wav"}}
        assert model.chat([user(part, text())]).text == "B"


@pytest.mark.parametrize("count", [1, 2, 100, 1599])
def test_the_shortest_sounds_are_answered(notes, count):
    """llama.cpp would end the process with one sample."""
    data = recorded(np.zeros(count, np.float32))
    assert notes.chat([user(sent(data), text())]).text == "N"


def test_broken_and_empty_sounds_are_refused(notes):
    whole = file_of("A")
    for data in (whole[:30], recorded(np.zeros(0, np.float32)), b"no sound at all", b"\xff\xfb\x90\0" + bytes(300)):
        with pytest.raises(InvalidMedia):
            notes.chat([user(sent(data), text())])
    with pytest.raises(InvalidMedia):
        notes.chat([user(sent(b""), text())])
    with pytest.raises(InvalidArgument, match="id"):
        notes.chat([user(sent(whole, id="0" * 16), text())])


def test_numbers_that_are_none_are_no_sound():
    for wrong in (np.nan, np.inf):
        with pytest.raises(InvalidArgument, match="samples"):
            AudioData(sample_rate=16_000, samples=np.full(800, wrong, np.float32).tobytes())


def test_a_sound_that_is_longer_than_the_context_is_refused_in_tokens(notes):
    with pytest.raises(PromptTooLong, match="1,5"):
        notes.chat([user({"type": "audio", "audio": played("A", seconds=60)}, text())])


def test_who_only_sees_refuses_a_sound_and_who_only_hears_a_picture(notes):
    with pytest.raises(UnsupportedMedia, match="this model takes no image, only text and audio"):
        notes.chat([user({"type": "image", "image": coloured("R")}, text())])
    with (
        afterglow.load(models.get_path("colours"), projector=models.get_path("projector-colours"), **HEARING) as model,
        pytest.raises(UnsupportedMedia, match="this model takes no audio, only text and image"),
    ):
        model.chat([user(sound("A"), text())])
    stripping = {**HEARING, "strip_media": True}
    with afterglow.load(models.get_path("notes"), projector=models.get_path("projector-notes"), **stripping) as model:
        assert model.chat([user({"type": "image", "image": coloured("R")}, sound("A"), text())]).text == "A"


def test_a_picture_and_a_sound_of_one_message_stand_where_they_were_put():
    with afterglow.load(models.get_path("attention"), projector=models.get_path("projector-both"), **HEARING) as model:
        assert model.supports("image")
        assert model.supports("audio")
        picture = {"type": "image", "image": noisy(1)}
        first = model.chat([user(text("Look: "), picture, text(" Listen: "), sound("A"))], max_tokens=4)
        assert (first.usage.media_tokens, first.usage.audio_tokens, first.usage.encoded_media) == (29, 13, 2)
        swapped = model.chat([user(text("Look: "), sound("A"), text(" Listen: "), picture)], max_tokens=4)
        assert (swapped.usage.cached_media_tokens, swapped.usage.encoded_media) == (0, 0)
        assert (
            "Look: [picture] Listen: [sound]"
            in model.plan_chat([user(text("Look: "), picture, text(" Listen: "), sound("A"))]).prompt.text
        )


def test_a_sound_is_heard_again_after_a_restart(tmp_path: Path):
    kept = {**HEARING, "engine": EngineSettings(disk_cache_directory=tmp_path / "kept")}
    talk = [user(sound("C"), text())]
    with afterglow.load(models.get_path("notes"), projector=models.get_path("projector-notes"), **kept) as model:
        first = model.chat(talk)
        assert (first.text, first.usage.encoded_media) == ("C", 1)
    with afterglow.load(models.get_path("notes"), projector=models.get_path("projector-notes"), **kept) as model:
        again = model.chat([*talk, first.message, user(text("Are you sure?"))])
        assert (again.text, again.usage.encoded_media, again.usage.cached_media_tokens) == ("C", 0, 13)
        moved = model.chat([user(text("Elsewhere: "), sound("C"), text())])
        assert (moved.text, moved.usage.encoded_media, moved.usage.cached_media_tokens) == ("C", 0, 0)


def test_a_hybrid_goes_on_right_behind_a_sound():
    """There is a checkpoint after it: another question computes its own words only."""
    with afterglow.load(models.get_path("hybrid"), projector=models.get_path("projector-wave"), **HEARING) as model:
        model.chat([user(sound("C"), text("How long is this sound, and what is it of?"))], max_tokens=4)
        other = model.chat([user(sound("C"), text("Another question altogether."))], max_tokens=4)
        assert (other.usage.cached_media_tokens, other.usage.encoded_media) == (13, 0)
