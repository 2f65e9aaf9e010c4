"""Constructed models of realistic sizes, for wall-clock measurements: their blocks compute and add nothing.

They follow the cycle of `afterglow.testing.models`; their MTP head is right always, or in three of four. A file is written once
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

from afterglow.paths import get_cache_directory
from afterglow.testing.models import constructed, vocabulary
from afterglow.testing.models.attention import Llama
from afterglow.testing.models.decoder import CONTEXT_LENGTH_TOKENS
from afterglow.testing.models.hybrid import MTPHead, Qwen35
from afterglow.testing.models.writer import FloatArray, ModelWriter, draw_noise


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


class QuantizedWriter(ModelWriter):
    """Stores the matrices of blocks in another type. Their noise repeats: for time it is as good, and sooner there."""

    kind = gguf.GGMLQuantizationType.Q4_0
    _block = draw_noise(7, "block", 1 << 20, scale=1.0)

    def add_matrix(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        self.add_tensor(name, np.resize(self._block * np.float32(gain / math.sqrt(columns)), (rows, columns)))

    def add_tensor(self, name: str, array: FloatArray, *, half: bool = False) -> None:
        if not name.startswith("blk.") or array.ndim != 2 or "conv1d" in name:
            super().add_tensor(name, array, half=half)
        elif self.kind == gguf.GGMLQuantizationType.F16:
            super().add_tensor(name, array, half=True)
        else:
            self._gguf.add_tensor(name, gguf.quants.quantize(array, self.kind), raw_dtype=self.kind)


def path(size: str, quantization: str, acceptance: int) -> Path:
    """The file of a hybrid model with `acceptance` 100 or 75 per cent; written where it is not there yet."""
    decoder = _drafting(SIZES[size], acceptance)
    return _kept(f"successor-{size}-{quantization}-{acceptance}", lambda file: _write(file, decoder, quantization))


def attention_path(size: str, quantization: str, words: int = vocabulary.VOCABULARY_SIZE) -> Path:
    """The file of a model with plain attention, and with so many tokens."""
    shape = SIZES[size]
    decoder = Llama(
        embedding_length=shape.embedding, layers=shape.layers, heads=shape.heads, kv_heads=shape.key_heads,
        feed_forward_length=shape.feed_forward,
    )  # fmt: skip
    return _kept(f"attention-{size}-{quantization}-{words}", lambda file: _write(file, decoder, quantization, words))


def _kept(name: str, write: Callable[[Path], None]) -> Path:
    file = get_cache_directory("benchmarks") / f"{name}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        write(unfinished)
        os.replace(unfinished, file)
    return file


def _drafting(size: Size, acceptance: int) -> Qwen35:
    misdrafted = frozenset() if acceptance == 100 else constructed.MISDRAFTED_TOKENS
    wide = size.embedding
    small = constructed._build_mtp_head(misdrafted)
    assert small.token_embedding is not None
    fusion = np.concatenate([np.eye(wide), np.zeros((wide, wide))], axis=1).astype(np.float32)
    return Qwen35(
        embedding_length=wide, layers=size.layers, full_attention_interval=4, heads=size.heads, kv_heads=size.key_heads, head_size=128,
        feed_forward_length=size.feed_forward, state_size=128, state_key_heads=size.state_heads, state_heads=size.state_heads,
        mtp_head=MTPHead(fusion, _padded(small.token_embedding, wide)),
    )  # fmt: skip


def _write(file: Path, decoder: Qwen35 | Llama, quantization: str, words: int = vocabulary.VOCABULARY_SIZE) -> None:
    wide, half = decoder.embedding_length, words > vocabulary.VOCABULARY_SIZE
    with QuantizedWriter(file, decoder.architecture, seed=7) as writer:
        writer.kind = gguf.GGMLQuantizationType[quantization.upper()]
        vocabulary.write_tokenizer(writer, words)
        common = {"context_length": CONTEXT_LENGTH_TOKENS, "embedding_length": wide, "vocab_size": words}
        writer.add_metadata(decoder.architecture, {**common, **decoder.build_metadata()})
        writer.add_tensor(
            "token_embd.weight", _padded(_longer(constructed._build_token_embedding(), words), wide), half=half
        )
        writer.add_constant("output_norm.weight", 1.0, wide)
        writer.add_tensor("output.weight", _padded(_longer(constructed._build_output(), words), wide), half=half)
        decoder.write_blocks(writer, gain=0.0)


def _longer(table: FloatArray, rows: int) -> FloatArray:
    """With more tokens, none of which is ever likeliest; their logits lie about as those of real models do."""
    return np.concatenate([table, draw_noise(7, "more", rows - len(table), table.shape[1], scale=0.5)])


def _padded(table: FloatArray, width: int) -> FloatArray:
    """The small model's table in the first dimensions; what a norm does to the others is nothing."""
    wide = np.zeros((len(table), width), np.float32)
    wide[:, : table.shape[1]] = table
    return wide
