"""Decodes audio files to one channel of float samples. Accepts WAV, MP3 and FLAC of what libsndfile decodes."""

from __future__ import annotations

import io

import numpy as np
import soundfile  # type: ignore[import-untyped]
from numpy.typing import NDArray

from afterglow.errors import InvalidMedia
from afterglow.media.budget import DECODE_BUDGET
from afterglow.media.policy import INLINE_ONLY, MediaPolicy
from afterglow.media.resampling import SUPPORTED_SAMPLE_RATES
from afterglow.media.types import AudioData

# Accepted encodings per container format; a WAV file can contain almost any encoding.
SUPPORTED_ENCODINGS = {
    "WAV": frozenset({"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"}),
    "WAVEX": frozenset({"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"}),
    "MP3": frozenset({"MPEG_LAYER_III"}),
    "FLAC": frozenset({"PCM_S8", "PCM_16", "PCM_24"}),
}
MAX_CHANNELS = 8
BLOCK_FRAMES = 1 << 16
DECODE_BYTES_PER_FRAME = 16  # at the peak: four copies of a 32-bit sample


def decode_audio(data: bytes, policy: MediaPolicy = INLINE_ONLY, *, source: str = "the audio") -> AudioData:
    """Decode an audio file at its own sample rate. `source` names the file in errors.

    >>> file = io.BytesIO()
    >>> soundfile.write(file, np.zeros((800, 2)), 8000, format="WAV")
    >>> decode_audio(file.getvalue()).seconds
    0.1
    """
    if not _is_supported_format(data):
        raise InvalidMedia(source, "it is not a WAV, MP3 or FLAC file")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.subtype not in SUPPORTED_ENCODINGS.get(file.format, ()):
                raise InvalidMedia(source, f"{file.format} with {file.subtype} is not supported: send WAV, MP3 or FLAC")
            if file.samplerate not in SUPPORTED_SAMPLE_RATES or not 1 <= file.channels <= MAX_CHANNELS:
                raise InvalidMedia(source, f"{file.samplerate:,} Hz with {file.channels} channels is not supported")
            if file.frames > policy.max_audio_seconds * file.samplerate:
                raise _make_too_long_error(policy, source)
            samples = _read_within_budget(file, policy, source)
    except (soundfile.SoundFileError, RuntimeError, ValueError, OSError) as error:
        raise InvalidMedia(source, f"the audio file is damaged ({error})") from None
    if not samples:
        raise InvalidMedia(source, "it contains no audio samples")
    return AudioData(sample_rate=file.samplerate, samples=samples)


def _is_supported_format(data: bytes) -> bool:
    """Return whether the first bytes are those of a supported format."""
    is_wav = data[:4] in (b"RIFF", b"RIFX") and data[8:12] == b"WAVE"
    # An MP3 file begins with an ID3 tag or a frame: eleven bits set, a version, layer III.
    is_mp3_frame = len(data) > 4 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2
    return is_wav or is_mp3_frame or data[:3] == b"ID3" or data[:4] == b"fLaC"


def _read_within_budget(file: soundfile.SoundFile, policy: MediaPolicy, source: str) -> bytes:
    """Read the samples. The header may declare fewer frames than there are: then read again with the largest budget."""
    for frames in (file.frames, int(policy.max_audio_seconds * file.samplerate)):
        with DECODE_BUDGET.reserve(DECODE_BYTES_PER_FRAME * frames, policy.max_decoded_bytes):
            file.seek(0)
            if (samples := _read_mono(file, frames)) is not None:
                return samples.tobytes()
    raise _make_too_long_error(policy, source)


def _read_mono(file: soundfile.SoundFile, max_frames: int) -> NDArray[np.float32] | None:
    """Read all channels mixed to one; return None if there are more frames."""
    blocks: list[NDArray[np.float32]] = []
    frames_left = max_frames
    while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
        frames_left -= len(block)
        if frames_left < 0:
            return None
        blocks.append(block.mean(axis=1, dtype=np.float32))
    samples = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    return np.clip(np.nan_to_num(samples, posinf=1, neginf=-1), -1, 1)


def _make_too_long_error(policy: MediaPolicy, source: str) -> InvalidMedia:
    return InvalidMedia(source, f"it is longer than the limit of {policy.max_audio_seconds:g} seconds")
