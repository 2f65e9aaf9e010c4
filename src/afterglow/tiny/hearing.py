"""Audio projectors: what turns a sound into rows of a text model's embedding, in two dialects.

It knows what mtmd reads for gemma4ua (forty milliseconds of the wave itself to a row) and for ultravox (half a minute
at a time through whisper's encoder).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from afterglow.tiny.projector import SMALLEST, add_llava, vision_settings
from afterglow.tiny.writer import Array, Value, Writer

FRAME = 640  # samples that gemma4ua makes a row of, at 16,000 a second
TEXT = 64  # the width of the models that these are for
WIDTH, HEADS, INNER, BINS = 16, 2, 32, 16  # of whisper's encoder; BINS are the bands of sound that it hears
POSITIONS = 1500  # in half a minute
STACKED = 50  # positions that become one row
WAVE = {"embedding_length": FRAME, "feed_forward_length": 1, "attention.head_count": 1, "num_mel_bins": FRAME}


def audio_settings(dialect: str, more: Mapping[str, Value]) -> dict[str, Value]:
    """What mtmd has to know of an audio encoder. The type is where it does not speak of pictures too."""
    return {
        "projector_type": dialect,
        "block_count": 0,
        "projection_dim": TEXT,
        "attention.layer_norm_epsilon": 1e-5,
        **more,
    }


def write_wave(path: Path, *, seed: int, weights: Array | None = None) -> None:
    """A row for each frame of the wave, however long it is. Given weights map a frame to a row."""
    with Writer(path, "clip", seed=seed, kind="mmproj") as writer:
        writer.settings("clip", {"has_audio_encoder": True, "use_gelu": True})
        _add_wave(writer, weights)


def _add_wave(writer: Writer, weights: Array | None = None) -> None:
    name = "mm.a.input_projection.weight"
    writer.settings("clip.audio", audio_settings("gemma4ua", WAVE))
    if weights is None:
        writer.matrix(name, TEXT, FRAME)
    else:
        writer.given(name, weights)


def write_both(path: Path) -> None:
    """Sees as llava does, and hears."""
    with Writer(path, "clip", seed=13, kind="mmproj") as writer:
        writer.settings("clip", {"has_vision_encoder": True, "has_audio_encoder": True, "use_gelu": False})
        writer.settings("clip.vision", {"projector_type": "mlp", **vision_settings(SMALLEST)})
        add_llava(writer, SMALLEST)
        _add_wave(writer)


def write_ultravox(path: Path) -> None:
    """A piece for each half minute that has begun, with a fixed number of rows."""
    encoder = {
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "block_count": 1,
        "attention.head_count": HEADS,
        "num_mel_bins": BINS,
        "projector.stack_factor": STACKED,
    }
    with Writer(path, "clip", seed=14, kind="mmproj") as writer:
        writer.settings("clip", {"has_audio_encoder": True, "use_gelu": True})
        writer.settings("clip.audio", audio_settings("ultravox", encoder))
        for number, before in ((1, BINS), (2, WIDTH)):
            writer.noise(f"a.conv1d.{number}.weight", WIDTH, before, 3, scale=(3 * before) ** -0.5, half=True)
            writer.constant(f"a.conv1d.{number}.bias", 0.0, WIDTH, 1)
        writer.noise("a.position_embd.weight", POSITIONS, WIDTH, scale=0.1)
        _whisper_block(writer, "a.blk.0")
        writer.norm("a.post_ln", WIDTH)
        writer.constant("mm.a.norm_pre.weight", 1.0, WIDTH * STACKED)
        writer.matrix("mm.a.mlp.1.weight", 2 * INNER, WIDTH * STACKED)
        writer.constant("mm.a.norm_mid.weight", 1.0, INNER)
        writer.matrix("mm.a.mlp.2.weight", TEXT, INNER)


def _whisper_block(writer: Writer, block: str) -> None:
    for name in ("attn_q", "attn_v", "attn_out"):
        writer.linear(f"{block}.{name}", WIDTH, WIDTH)
    writer.matrix(f"{block}.attn_k.weight", WIDTH, WIDTH)  # whisper's keys have no bias, and mtmd insists
    writer.linear(f"{block}.ffn_up", INNER, WIDTH)
    writer.linear(f"{block}.ffn_down", WIDTH, INNER)
    writer.norm(f"{block}.ln1", WIDTH)
    writer.norm(f"{block}.ln2", WIDTH)


def write_random_wave(path: Path) -> None:
    """Write one of noise: what comes out means nothing, and depends on all of a frame."""
    write_wave(path, seed=12)


RECIPES: dict[str, Callable[[Path], None]] = {
    "projector-wave": write_random_wave,
    "projector-ultravox": write_ultravox,
    "projector-both": write_both,
}
