"""Decoding audio files to mono samples; hostile files are rejected."""

from __future__ import annotations

import struct
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import InvalidMedia
from afterglow.media import audio
from afterglow.media.audio import decode_audio
from afterglow.media.policy import MediaPolicy
from afterglow.media.types import AudioData
from support.media_files import encode_audio, sine_wave


def get_samples(decoded: AudioData) -> np.ndarray:
    return np.frombuffer(decoded.samples, np.float32)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"])
def test_every_supported_wav_encoding_is_decoded(subtype):
    decoded = decode_audio(encode_audio(sine_wave(), subtype=subtype))
    assert (decoded.sample_rate, decoded.seconds) == (16_000, 0.5)
    assert np.abs(get_samples(decoded) - sine_wave()[:, 0]).max() < 0.03


def test_mp3_and_flac_are_decoded():
    for format in ("MP3", "FLAC"):
        decoded = decode_audio(encode_audio(sine_wave(seconds=1), format=format))
        assert decoded.sample_rate == 16_000
        assert decoded.seconds == pytest.approx(1, abs=0.15)
        spectrum = np.abs(np.fft.rfft(get_samples(decoded)))
        assert spectrum.argmax() / decoded.seconds == pytest.approx(440, abs=3)


def test_channels_are_mixed_to_mono():
    opposite = sine_wave(channels=2)
    opposite[:, 1] *= -1
    assert np.abs(get_samples(decode_audio(encode_audio(opposite)))).max() < 1e-3
    left = sine_wave(channels=2)
    left[:, 1] = 0
    assert np.abs(get_samples(decode_audio(encode_audio(left))) - sine_wave()[:, 0] / 2).max() < 1e-3


def test_nonfinite_and_out_of_range_samples_are_clipped():
    signal = sine_wave(seconds=0.1)
    signal[0], signal[1], signal[2], signal[3] = np.nan, np.inf, -np.inf, 7
    decoded = get_samples(decode_audio(encode_audio(signal, subtype="FLOAT")))
    assert decoded[:4].tolist() == [0, 1, -1, 1]


def change_header(data: bytes, **fields: int) -> bytes:
    """Return a WAV file with changed header fields."""
    encoding, channels, rate, byte_rate, block_align, bits = struct.unpack_from("<HHIIHH", data, 20)
    header = {
        "encoding": encoding,
        "channels": channels,
        "rate": rate,
        "byte_rate": byte_rate,
        "block_align": block_align,
        "bits": bits,
    } | fields
    return data[:20] + struct.pack("<HHIIHH", *header.values()) + data[36:]


WAV = encode_audio(sine_wave())
HOSTILE_FILES = {
    "empty file": lambda: b"",
    "text": lambda: b"this is not audio",
    "header only": lambda: WAV[:30],
    "WAV without samples": lambda: encode_audio(sine_wave(seconds=0)),
    "WAV with sample rate 0": lambda: change_header(WAV, rate=0),
    "WAV with an absurd sample rate": lambda: change_header(WAV, rate=4_000_000_000),
    "WAV with 1000 channels": lambda: change_header(WAV, channels=1000, block_align=2000),
    "WAV with 0 channels": lambda: change_header(WAV, channels=0),
    "WAV with an unknown encoding": lambda: change_header(WAV, encoding=0x1234),
    "WAV with an unsupported encoding": lambda: encode_audio(sine_wave(), subtype="MS_ADPCM"),
    "RIFF that is not WAV": lambda: WAV[:8] + b"AVI " + WAV[12:],
    "truncated MP3": lambda: encode_audio(sine_wave(), format="MP3")[:6],
    "MP3 with random frames": lambda: b"\xff\xfb\x90\0" + bytes(range(256)) * 40,
    "ID3 tag only": lambda: b"ID3\4\0\0\x7f\x7f\x7f\x7f",
    "truncated FLAC": lambda: encode_audio(sine_wave(), format="FLAC")[:50],
    "OGG": lambda: b"OggS" + bytes(100),
    "AIFF": lambda: encode_audio(sine_wave(), format="AIFF"),
    "AU": lambda: encode_audio(sine_wave(), format="AU"),
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_a_hostile_file_is_rejected_fast_and_without_memory(name):
    data = HOSTILE_FILES[name]()
    process = psutil.Process()
    before, start = process.memory_info().rss, time.process_time()
    with pytest.raises(InvalidMedia, match="the audio cannot be read"):
        decode_audio(data)
    assert time.process_time() - start < 5
    assert process.memory_info().rss - before < 32 << 20


def test_audio_longer_than_the_limit_is_rejected():
    policy = MediaPolicy(max_audio_seconds=0.4)
    for format in ("WAV", "FLAC", "MP3"):
        with pytest.raises(InvalidMedia, match=r"longer than the limit of 0\.4 seconds"):
            decode_audio(encode_audio(sine_wave(), format=format), policy)
        assert decode_audio(encode_audio(sine_wave(), format=format), MediaPolicy(max_audio_seconds=1)).seconds < 0.7


def test_audio_longer_than_its_header_declares_is_rejected():
    class Endless:
        samplerate, frames = 16_000, 10

        def seek(self, position):
            self.frames_read = position

        def read(self, count, **_):
            self.frames_read += count
            return np.zeros((count, 1), np.float32)

    with pytest.raises(InvalidMedia, match="longer than the limit of 60 seconds"):
        audio._read_within_budget(Endless(), MediaPolicy(max_audio_seconds=60), "the audio")


def test_audio_with_more_frames_than_its_header_declares_reserves_the_memory_of_the_longest_audio(monkeypatch):
    class Longer:
        samplerate, frames = 16_000, 10

        def seek(self, position):
            self.frames_left = 1000

        def read(self, count, **_):
            count, self.frames_left = min(count, self.frames_left), max(0, self.frames_left - count)
            return np.zeros((count, 1), np.float32)

    reserved = []

    @contextmanager
    def reserve(nbytes, _):
        reserved.append(nbytes // audio.DECODE_BYTES_PER_FRAME)
        yield

    monkeypatch.setattr(audio.DECODE_BUDGET, "reserve", reserve)
    samples = audio._read_within_budget(Longer(), MediaPolicy(max_audio_seconds=60), "the audio")
    assert (len(samples), reserved) == (4000, [10, 960_000])


@pytest.mark.parametrize("name", ["text", "OGG", "AIFF", "AU", "RIFF that is not WAV"])
def test_an_unsupported_format_never_reaches_the_decoder(name, monkeypatch):
    data = HOSTILE_FILES[name]()

    def fail(*_):
        raise AssertionError("the decoder was called")

    monkeypatch.setattr(audio.soundfile, "SoundFile", fail)
    with pytest.raises(InvalidMedia, match="not a WAV, MP3 or FLAC"):
        decode_audio(data)


@pytest.mark.slow
def test_hours_of_silence_in_a_small_file_are_rejected():
    silence = encode_audio(np.zeros((48_000 * 3600, 1), np.int16), rate=48_000, format="FLAC", subtype="PCM_16")
    assert len(silence) < 2 << 20
    start = time.process_time()
    with pytest.raises(InvalidMedia, match="longer than the limit of 1800 seconds"):
        decode_audio(silence)
    assert time.process_time() - start < 5


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(
        [WAV[:2000], encode_audio(sine_wave(), format="MP3"), encode_audio(sine_wave(seconds=0.1), format="FLAC")]
    ),
    st.data(),
)
def test_a_file_with_changed_bytes_decodes_or_is_rejected(file, data):
    changed = bytearray(file)
    for _ in range(data.draw(st.integers(1, 8))):
        changed[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = get_samples(decode_audio(bytes(changed), MediaPolicy(max_audio_seconds=60)))
        assert np.isfinite(decoded).all()
        assert np.abs(decoded).max() <= 1
    except InvalidMedia:
        pass
