"""Transcription with a model that names the note of a recording: windows, subtitles, prefix hits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import afterglow
from afterglow.api.transcription import Transcription, TranscriptionSegment, build_messages
from afterglow.engine.types.request import Usage
from afterglow.errors import InvalidArgument, InvalidMedia, UnsupportedMedia
from afterglow.media.types import AudioData
from afterglow.testing import models
from support.media_files import encode_audio
from support.media_prompts import note_audio

RATE = 16_000


def record(letters: str) -> AudioData:
    """One second of each note, with pauses of a quarter."""
    parts = [np.frombuffer(note_audio(letter, 1.0, RATE).samples, np.float32) for letter in letters]
    return AudioData(RATE, b"".join(part.tobytes() + bytes(RATE) for part in parts))


@pytest.fixture(scope="module")
def model() -> Iterator[afterglow.Model]:
    projector = models.get_path("projector-notes")
    with afterglow.load(
        models.get_path("notes"), projector=projector, context=512, sequences=2, threads=1, disk_cache=False
    ) as notes:
        yield notes


@pytest.mark.native
def test_a_long_recording_is_transcribed_in_windows(model: afterglow.Model) -> None:
    transcription = model.transcribe(record("CEGAD"), window_seconds=1.5)
    assert transcription.text == "C E G A D"
    assert transcription.seconds == pytest.approx(6.25)
    segments = transcription.segments
    assert [segment.text for segment in segments] == list("CEGAD")
    assert [segment.start for segment in segments] == pytest.approx([0, 1.2, 2.4, 3.7, 5.0], abs=0.15)
    assert all(segment.end - segment.start <= 1.5 and segment.is_complete for segment in segments)
    assert all(-0.1 < segment.mean_logprob <= 0 for segment in segments)
    # The instruction is computed once: it comes before the audio of each window.
    assert all(segment.usage.cached_tokens > 60 for segment in segments[1:])
    assert all(segment.usage.encoded_media == 1 for segment in segments)


@pytest.mark.native
def test_samples_bytes_and_files_of_any_format_are_accepted(model: afterglow.Model, tmp_path: Path) -> None:
    samples = np.frombuffer(note_audio("B").samples, np.float32)
    file = tmp_path / "note.flac"
    file.write_bytes(encode_audio(samples, RATE, "FLAC"))
    for audio in (note_audio("B"), encode_audio(samples, RATE, "WAV"), file):
        transcription = model.transcribe(audio)
        assert (transcription.text, len(transcription.segments)) == ("B", 1)
    low = note_audio("F", 3.0, 44_100)
    assert model.transcribe(low, window_seconds=1.0).text.split() == ["F"] * 4


@pytest.mark.native
def test_the_task_the_language_and_the_context_are_in_the_prompt(model: afterglow.Model) -> None:
    for options, expected in (
        ({"task": "translate"}, "Translate the speech of this recording into English."),
        ({"language": "German"}, "The language of the speech is German."),
        ({"prompt": "music by Bach"}, "Context: music by Bach"),
    ):
        window = model.split_audio(encode_audio(np.zeros(RATE, np.float32), RATE))[0]
        arguments = {"task": "transcribe", "language": None, "prompt": None, **options}
        ((message),) = build_messages(window, **arguments)
        assert expected in message["content"][0]["text"]
        known = model.transcribe(note_audio("A")).segments[0].usage.prompt_tokens
        assert model.transcribe(note_audio("A"), **options).segments[0].usage.prompt_tokens != known
    with pytest.raises(InvalidArgument, match="task"):
        model.transcribe(note_audio("A"), task="summarize")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="window_seconds"):
        model.transcribe(note_audio("A"), window_seconds=0.1)


@pytest.mark.native
def test_invalid_recordings_and_models_without_audio_are_refused(model: afterglow.Model) -> None:
    with pytest.raises(InvalidMedia, match="not a WAV, MP3 or FLAC"):
        model.transcribe(b"no sound")
    with (
        afterglow.load(models.get_path("attention"), context=256, threads=1, disk_cache=False) as text_model,
        pytest.raises(UnsupportedMedia, match="accepts no audio"),
    ):
        text_model.transcribe(note_audio("A"))


def test_subtitles_leave_out_empty_segments_and_escape_their_text() -> None:
    transcription = Transcription(
        segments=tuple(
            TranscriptionSegment(
                start=start, end=start + 30, text=text, tokens=(), mean_logprob=0, is_complete=True, usage=Usage()
            )
            for start, text in ((0, "One --> two"), (30, ""), (3660, "a < b"))
        )
    )
    assert transcription.text == "One --> two a < b"
    assert transcription.to_srt() == (
        "1\n00:00:00,000 --> 00:00:30,000\nOne --> two\n\n2\n01:01:00,000 --> 01:01:30,000\na < b\n"
    )
    assert transcription.to_vtt() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:30.000\nOne --&gt; two\n\n01:01:00.000 --> 01:01:30.000\na &lt; b\n"
    )
