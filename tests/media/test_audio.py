"""Sounds come in as one channel of samples, and go to any rate."""

from __future__ import annotations

import struct
import time

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import InvalidArgument, InvalidMedia
from afterglow.media import audio
from afterglow.media.audio import decode_audio
from afterglow.media.load import MediaPolicy
from afterglow.media.resampling import resample
from afterglow.media.types import AudioData
from support.media_files import recorded, tone


def samples(sound: AudioData) -> np.ndarray:
    return np.frombuffer(sound.samples, np.float32)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"])
def test_every_plain_kind_of_wav_is_read(subtype):
    sound = decode_audio(recorded(tone(), subtype=subtype))
    assert (sound.sample_rate, sound.seconds) == (16_000, 0.5)
    assert np.abs(samples(sound) - tone()[:, 0]).max() < 0.03


def test_an_mp3_and_a_flac_file_are_read():
    for format in ("MP3", "FLAC"):
        sound = decode_audio(recorded(tone(seconds=1), format=format))
        assert sound.sample_rate == 16_000
        assert sound.seconds == pytest.approx(1, abs=0.15)
        spectrum = np.abs(np.fft.rfft(samples(sound)))
        assert spectrum.argmax() / sound.seconds == pytest.approx(440, abs=3)


def test_channels_become_one():
    both = tone(channels=2)
    both[:, 1] *= -1
    assert np.abs(samples(decode_audio(recorded(both)))).max() < 1e-3
    left = tone(channels=2)
    left[:, 1] = 0
    assert np.abs(samples(decode_audio(recorded(left))) - tone()[:, 0] / 2).max() < 1e-3


def test_numbers_that_are_none_and_too_large_ones_are_tamed():
    wild = tone(seconds=0.1)
    wild[0], wild[1], wild[2], wild[3] = np.nan, np.inf, -np.inf, 7
    heard = samples(decode_audio(recorded(wild, subtype="FLOAT")))
    assert heard[:4].tolist() == [0, 1, -1, 1]


def lying(data: bytes, **fields: int) -> bytes:
    """A WAV file whose header says something else."""
    form, channels, rate, pace, block, bits = struct.unpack_from("<HHIIHH", data, 20)
    said = {"form": form, "channels": channels, "rate": rate, "pace": pace, "block": block, "bits": bits} | fields
    return data[:20] + struct.pack("<HHIIHH", *said.values()) + data[36:]


WAV = recorded(tone())
HOSTILE = {
    "nothing": lambda: b"",
    "a text": lambda: b"this is no sound",
    "a header alone": lambda: WAV[:30],
    "a WAV without samples": lambda: recorded(tone(seconds=0)),
    "a WAV of no rate": lambda: lying(WAV, rate=0),
    "a WAV of an absurd rate": lambda: lying(WAV, rate=4_000_000_000),
    "a WAV of a thousand channels": lambda: lying(WAV, channels=1000, block=2000),
    "a WAV of no channels": lambda: lying(WAV, channels=0),
    "a WAV of an unknown kind": lambda: lying(WAV, form=0x1234),
    "a WAV with something else inside": lambda: recorded(tone(), subtype="MS_ADPCM"),
    "a RIFF that is no WAV": lambda: WAV[:8] + b"AVI " + WAV[12:],
    "an MP3 of only its first bytes": lambda: recorded(tone(), format="MP3")[:6],
    "an MP3 of nonsense": lambda: b"\xff\xfb\x90\0" + bytes(range(256)) * 40,
    "a tag and nothing behind it": lambda: b"ID3\4\0\0\x7f\x7f\x7f\x7f",
    "a FLAC of only its first bytes": lambda: recorded(tone(), format="FLAC")[:50],
    "an OGG": lambda: b"OggS" + bytes(100),
    "an AIFF": lambda: recorded(tone(), format="AIFF"),
    "a raw AU": lambda: recorded(tone(), format="AU"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_sound_is_refused_at_once_and_takes_no_memory(name):
    data = HOSTILE[name]()
    process = psutil.Process()
    before, began = process.memory_info().rss, time.perf_counter()
    with pytest.raises(InvalidMedia, match="the sound cannot be read"):
        decode_audio(data)
    assert time.perf_counter() - began < 1
    assert process.memory_info().rss - before < 32 << 20


def test_a_long_sound_is_refused_by_its_header_and_by_what_comes():
    policy = MediaPolicy(max_audio_seconds=0.4)
    for format in ("WAV", "FLAC", "MP3"):
        with pytest.raises(InvalidMedia, match=r"longer than 0\.4 seconds"):
            decode_audio(recorded(tone(), format=format), policy)
        assert decode_audio(recorded(tone(), format=format), MediaPolicy(max_audio_seconds=1)).seconds < 0.7


def test_a_sound_that_goes_on_after_its_end_is_cut_off():
    class Endless:
        samplerate = 16_000

        def read(self, count, **_):
            return np.zeros((count, 1), np.float32)

    with pytest.raises(InvalidMedia, match="longer than 60 seconds"):
        audio._read_mono(Endless(), MediaPolicy(max_audio_seconds=60), "the sound")


@pytest.mark.parametrize("name", ["a text", "an OGG", "an AIFF", "a raw AU", "a RIFF that is no WAV"])
def test_what_is_not_decoded_here_is_not_shown_to_the_decoder(name, monkeypatch):
    data = HOSTILE[name]()

    def shown(*_):
        raise AssertionError("it was")

    monkeypatch.setattr(audio.soundfile, "SoundFile", shown)
    with pytest.raises(InvalidMedia, match="no WAV, MP3 or FLAC"):
        decode_audio(data)


def test_hours_of_silence_in_a_small_file_are_refused():
    silence = recorded(np.zeros((48_000 * 3600, 1), np.int16), rate=48_000, format="FLAC", subtype="PCM_16")
    assert len(silence) < 2 << 20
    began = time.perf_counter()
    with pytest.raises(InvalidMedia, match="longer than 1800 seconds"):
        decode_audio(silence)
    assert time.perf_counter() - began < 1


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([WAV[:2000], recorded(tone(), format="MP3"), recorded(tone(seconds=0.1), format="FLAC")]), st.data()
)
def test_a_file_with_any_bytes_changed_is_a_sound_or_a_refusal(file, data):
    changed = bytearray(file)
    for _ in range(data.draw(st.integers(1, 8))):
        changed[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        heard = samples(decode_audio(bytes(changed), MediaPolicy(max_audio_seconds=60)))
        assert np.isfinite(heard).all()
        assert np.abs(heard).max() <= 1
    except InvalidMedia:
        pass


# --- another rate


@pytest.mark.parametrize(("before", "after"), [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (22_050, 24_000)])
def test_a_tone_stays_the_tone_at_any_rate(before, after):
    sound = AudioData(sample_rate=before, samples=tone(before, 1.0).tobytes())
    made = resample(sound, after)
    assert made.sample_rate == after
    assert len(samples(made)) == after
    assert np.abs(samples(made) - tone(after, 1.0)[:, 0])[500:-500].max() < 1e-4


def test_what_is_too_high_for_a_rate_is_taken_out_and_not_folded_back():
    high = resample(AudioData(sample_rate=48_000, samples=tone(48_000, 1.0, pitch=10_000).tobytes()), 16_000)
    assert np.abs(samples(high)[500:-500]).max() < 1e-3


def test_the_same_rate_is_the_same_sound_and_no_rate_is_refused():
    sound = AudioData(sample_rate=16_000, samples=tone().tobytes())
    assert resample(sound, 16_000) is sound
    with pytest.raises(InvalidArgument, match="rate"):
        resample(sound, 0)


def test_the_shortest_sound_can_be_resampled():
    for before, after in ((16_000, 44_100), (44_100, 16_000)):
        assert samples(resample(AudioData(sample_rate=before, samples=bytes(4)), after)).tolist()
