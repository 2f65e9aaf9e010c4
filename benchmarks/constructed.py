"""Constructed models of realistic sizes, for wall-clock measurements: their blocks compute and add nothing.

They follow the cycle of `afterglow.tiny`; their MTP head is right always, or in three of four. A file is written once
and kept in the cache.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from afterglow.paths import cache_directory
from afterglow.tiny import constructed, vocabulary
from afterglow.tiny.attention import Llama
from afterglow.tiny.decoder import CONTEXT_LENGTH
from afterglow.tiny.hybrid import DraftHead, Qwen35
from afterglow.tiny.writer import Array, Writer, noise


@dataclass(frozen=True)
class Size:
    embedding: int
    layers: int
    heads: int
    key_heads: int
    feed_forward: int
    state_heads: int


SIZES = {
    "60m": Size(512, 8, 4, 1, 1536, 4),
    "245m": Size(1024, 16, 8, 2, 3072, 8),
    "1b": Size(2048, 20, 16, 4, 6144, 16),
    "8b": Size(4096, 36, 32, 8, 14336, 32),
}


class QuantizedWriter(Writer):
    """Stores the matrices of blocks in another type. Their noise repeats: for time it is as good, and sooner there."""

    kind = gguf.GGMLQuantizationType.Q4_0
    _block = noise(7, "block", 1 << 20, scale=1.0)

    def matrix(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        self.given(name, np.resize(self._block * np.float32(gain / math.sqrt(columns)), (rows, columns)))

    def given(self, name: str, array: Array, *, half: bool = False) -> None:
        if not name.startswith("blk.") or array.ndim != 2 or "conv1d" in name:
            super().given(name, array, half=half)
        elif self.kind == gguf.GGMLQuantizationType.F16:
            super().given(name, array, half=True)
        else:
            self._file.add_tensor(name, gguf.quants.quantize(array, self.kind), raw_dtype=self.kind)


def path(size: str, quantization: str, acceptance: int) -> Path:
    """The file of a hybrid model with `acceptance` 100 or 75 per cent; written where it is not there yet."""
    decoder = _drafting(SIZES[size], acceptance)
    return _kept(f"successor-{size}-{quantization}-{acceptance}", lambda file: _write(file, decoder, quantization))


def attention_path(size: str, quantization: str, words: int = vocabulary.SIZE) -> Path:
    """The file of a model with plain attention, and with so many tokens."""
    shape = SIZES[size]
    decoder = Llama(
        embedding=shape.embedding, layers=shape.layers, heads=shape.heads, key_heads=shape.key_heads,
        feed_forward=shape.feed_forward,
    )  # fmt: skip
    return _kept(f"attention-{size}-{quantization}-{words}", lambda file: _write(file, decoder, quantization, words))


def _kept(name: str, write: Callable[[Path], None]) -> Path:
    file = cache_directory("benchmarks") / f"{name}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        write(unfinished)
        os.replace(unfinished, file)
    return file


def _drafting(size: Size, acceptance: int) -> Qwen35:
    misdrafted = frozenset() if acceptance == 100 else constructed.MISDRAFTED
    wide = size.embedding
    small = constructed._draft_head(misdrafted)
    assert small.embedding is not None
    fusion = np.concatenate([np.eye(wide), np.zeros((wide, wide))], axis=1).astype(np.float32)
    return Qwen35(
        embedding=wide, layers=size.layers, interval=4, heads=size.heads, key_heads=size.key_heads, head=128,
        feed_forward=size.feed_forward, state=128, state_key_heads=size.state_heads, state_heads=size.state_heads,
        draft=DraftHead(fusion, _padded(small.embedding, wide)),
    )  # fmt: skip


def _write(file: Path, decoder: Qwen35 | Llama, quantization: str, words: int = vocabulary.SIZE) -> None:
    wide, half = decoder.embedding, words > vocabulary.SIZE
    with QuantizedWriter(file, decoder.architecture, seed=7) as writer:
        writer.kind = gguf.GGMLQuantizationType[quantization.upper()]
        vocabulary.describe(writer, words)
        common = {"context_length": CONTEXT_LENGTH, "embedding_length": wide, "vocab_size": words}
        writer.settings(decoder.architecture, {**common, **decoder.settings()})
        writer.given("token_embd.weight", _padded(_longer(constructed._embedding(), words), wide), half=half)
        writer.constant("output_norm.weight", 1.0, wide)
        writer.given("output.weight", _padded(_longer(constructed._output(), words), wide), half=half)
        decoder.blocks(writer, gain=0.0)


def _longer(table: Array, rows: int) -> Array:
    """With more tokens, none of which is ever likeliest; their logits lie about as those of real models do."""
    return np.concatenate([table, noise(7, "more", rows - len(table), table.shape[1], scale=0.5)])


def _padded(table: Array, width: int) -> Array:
    """The small model's table in the first dimensions; what a norm does to the others is nothing."""
    wide = np.zeros((len(table), width), np.float32)
    wide[:, : table.shape[1]] = table
    return wide
