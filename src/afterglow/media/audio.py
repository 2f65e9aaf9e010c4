"""Sound files as samples: one channel of floats. libsndfile decodes WAV, MP3 and FLAC, and nothing else it could."""

from __future__ import annotations

import io

import numpy as np
import soundfile  # type: ignore[import-untyped]
from numpy.typing import NDArray

from afterglow.errors import InvalidMedia
from afterglow.media.policy import INLINE_ONLY, MediaPolicy
from afterglow.media.resampling import SUPPORTED_SAMPLE_RATES
from afterglow.media.types import AudioData

# The encodings that are decoded inside a file of each format; WAV can hold nearly anything.
SUPPORTED_ENCODINGS = {
    "WAV": frozenset({"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"}),
    "WAVEX": frozenset({"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"}),
    "MP3": frozenset({"MPEG_LAYER_III"}),
    "FLAC": frozenset({"PCM_S8", "PCM_16", "PCM_24"}),
}
MAX_CHANNELS = 8
BLOCK_FRAMES = 1 << 16  # frames decoded at once


def decode_audio(data: bytes, policy: MediaPolicy = INLINE_ONLY, *, source: str = "the sound") -> AudioData:
    """The sound in a file, as many samples a second as it has there.

    >>> file = io.BytesIO()
    >>> soundfile.write(file, np.zeros((800, 2)), 8000, format="WAV")
    >>> sound_of(file.getvalue()).seconds
    0.1
    """
    if not _is_supported_format(data):
        raise InvalidMedia(source, "it is no WAV, MP3 or FLAC file")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_header(file, policy, source)
            samples = _read_mono(file, policy, source)
    except (soundfile.SoundFileError, RuntimeError, ValueError, OSError) as error:
        raise InvalidMedia(source, f"the sound file is damaged ({error})") from None
    if not len(samples):
        raise InvalidMedia(source, "there is no sound in it")
    return AudioData(sample_rate=file.samplerate, samples=samples.tobytes())


def _is_supported_format(data: bytes) -> bool:
    """Whether the first bytes are those of a format that is decoded here."""
    wave = data[:4] in (b"RIFF", b"RIFX") and data[8:12] == b"WAVE"
    # An MP3 file begins with its tag or with a frame: eleven bits set, a version, layer III.
    frame = len(data) > 4 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2
    return wave or frame or data[:3] == b"ID3" or data[:4] == b"fLaC"


def _check_header(file: soundfile.SoundFile, policy: MediaPolicy, source: str) -> None:
    """What the header says, before anything is decoded."""
    if file.subtype not in SUPPORTED_ENCODINGS.get(file.format, ()):
        raise InvalidMedia(source, f"{file.format} with {file.subtype} is not decoded here: send WAV, MP3 or FLAC")
    if file.samplerate not in SUPPORTED_SAMPLE_RATES or not 1 <= file.channels <= MAX_CHANNELS:
        raise InvalidMedia(source, f"{file.samplerate:,} samples a second on {file.channels} channels are no sound")
    if file.frames > policy.max_audio_seconds * file.samplerate:
        raise _make_too_long_error(policy, source)


def _read_mono(file: soundfile.SoundFile, policy: MediaPolicy, source: str) -> NDArray[np.float32]:
    """All channels as one. The header may promise less than follows, so what comes is counted."""
    pieces: list[NDArray[np.float32]] = []
    room = int(policy.max_audio_seconds * file.samplerate)
    while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
        room -= len(block)
        if room < 0:
            raise _make_too_long_error(policy, source)
        pieces.append(block.mean(axis=1, dtype=np.float32))
    samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    return np.clip(np.nan_to_num(samples, posinf=1, neginf=-1), -1, 1)


def _make_too_long_error(policy: MediaPolicy, source: str) -> InvalidMedia:
    return InvalidMedia(source, f"it is longer than {policy.max_audio_seconds:g} seconds, which is the limit here")
