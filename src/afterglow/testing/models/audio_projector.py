"""Audio projectors of two types: gemma4ua and ultravox.

Contains the metadata and tensors that mtmd reads for gemma4ua (one row per 40 ms of the waveform) and for ultravox
(30 s at a time through a whisper encoder).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from afterglow.testing.models.projector import SMALLEST_SIZE, build_vision_metadata, write_llava_tensors
from afterglow.testing.models.writer import FloatArray, MetadataInput, ModelWriter

FRAME_SAMPLES = 640  # samples per row of gemma4ua, at 16 kHz
TEXT_EMBEDDING_LENGTH = 64  # of the text models
EMBEDDING_LENGTH, HEADS, FEED_FORWARD_LENGTH, MEL_BINS = 16, 2, 32, 16  # of the whisper encoder
ENCODER_POSITIONS = 1500  # in 30 s
STACK_FACTOR = 50  # encoder positions per row
GEMMA4UA_METADATA = {
    "embedding_length": FRAME_SAMPLES,
    "feed_forward_length": 1,
    "attention.head_count": 1,
    "num_mel_bins": FRAME_SAMPLES,
}


def build_audio_metadata(projector_type: str, extra: Mapping[str, MetadataInput]) -> dict[str, MetadataInput]:
    """Build the metadata of an audio encoder, with the projector type that mtmd reads for audio only."""
    return {
        "projector_type": projector_type,
        "block_count": 0,
        "projection_dim": TEXT_EMBEDDING_LENGTH,
        "attention.layer_norm_epsilon": 1e-5,
        **extra,
    }


def write_gemma4ua(path: Path, *, seed: int, weights: FloatArray | None = None) -> None:
    """Write a projector with one row per frame of any length of audio. `weights` map a frame to a row; else random."""
    with ModelWriter(path, "clip", seed=seed, kind="mmproj") as writer:
        writer.add_metadata("clip", {"has_audio_encoder": True, "use_gelu": True})
        _write_gemma4ua_tensors(writer, weights)


def _write_gemma4ua_tensors(writer: ModelWriter, weights: FloatArray | None = None) -> None:
    name = "mm.a.input_projection.weight"
    writer.add_metadata("clip.audio", build_audio_metadata("gemma4ua", GEMMA4UA_METADATA))
    if weights is None:
        writer.add_matrix(name, TEXT_EMBEDDING_LENGTH, FRAME_SAMPLES)
    else:
        writer.add_tensor(name, weights)


def write_vision_and_audio(path: Path) -> None:
    """Write a projector for images, as llava, and for audio."""
    with ModelWriter(path, "clip", seed=13, kind="mmproj") as writer:
        writer.add_metadata("clip", {"has_vision_encoder": True, "has_audio_encoder": True, "use_gelu": False})
        writer.add_metadata("clip.vision", {"projector_type": "mlp", **build_vision_metadata(SMALLEST_SIZE)})
        write_llava_tensors(writer, SMALLEST_SIZE)
        _write_gemma4ua_tensors(writer)


def write_ultravox(path: Path) -> None:
    """Write a projector with one chunk of a fixed number of rows per started 30 s."""
    encoder = {
        "embedding_length": EMBEDDING_LENGTH,
        "feed_forward_length": FEED_FORWARD_LENGTH,
        "block_count": 1,
        "attention.head_count": HEADS,
        "num_mel_bins": MEL_BINS,
        "projector.stack_factor": STACK_FACTOR,
    }
    with ModelWriter(path, "clip", seed=14, kind="mmproj") as writer:
        writer.add_metadata("clip", {"has_audio_encoder": True, "use_gelu": True})
        writer.add_metadata("clip.audio", build_audio_metadata("ultravox", encoder))
        for number, before in ((1, MEL_BINS), (2, EMBEDDING_LENGTH)):
            writer.add_noise(
                f"a.conv1d.{number}.weight", EMBEDDING_LENGTH, before, 3, scale=(3 * before) ** -0.5, half=True
            )
            writer.add_constant(f"a.conv1d.{number}.bias", 0.0, EMBEDDING_LENGTH, 1)
        writer.add_noise("a.position_embd.weight", ENCODER_POSITIONS, EMBEDDING_LENGTH, scale=0.1)
        for name in ("attn_q", "attn_v", "attn_out"):
            writer.add_linear(f"a.blk.0.{name}", EMBEDDING_LENGTH, EMBEDDING_LENGTH)
        writer.add_matrix(
            "a.blk.0.attn_k.weight", EMBEDDING_LENGTH, EMBEDDING_LENGTH
        )  # mtmd requires keys without bias
        writer.add_linear("a.blk.0.ffn_up", FEED_FORWARD_LENGTH, EMBEDDING_LENGTH)
        writer.add_linear("a.blk.0.ffn_down", EMBEDDING_LENGTH, FEED_FORWARD_LENGTH)
        writer.add_norm("a.blk.0.ln1", EMBEDDING_LENGTH)
        writer.add_norm("a.blk.0.ln2", EMBEDDING_LENGTH)
        writer.add_norm("a.post_ln", EMBEDDING_LENGTH)
        writer.add_constant("mm.a.norm_pre.weight", 1.0, EMBEDDING_LENGTH * STACK_FACTOR)
        writer.add_matrix("mm.a.mlp.1.weight", 2 * FEED_FORWARD_LENGTH, EMBEDDING_LENGTH * STACK_FACTOR)
        writer.add_constant("mm.a.norm_mid.weight", 1.0, FEED_FORWARD_LENGTH)
        writer.add_matrix("mm.a.mlp.2.weight", TEXT_EMBEDDING_LENGTH, FEED_FORWARD_LENGTH)
