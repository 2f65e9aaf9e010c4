"""Model files for benchmarks: synthetic models of realistic sizes, and a pruned copy of a real one as draft model.

The blocks of synthetic models compute but add nothing to the residual stream, so that the models follow the cycle of
`afterglow.testing.models`. Each file is written once and cached.
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
from afterglow.testing.models.hybrid import MTPHead, Qwen35
from afterglow.testing.models.writer import FloatArray, ModelWriter, draw_noise


@dataclass(frozen=True)
class ModelSize:
    embedding_length: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward_length: int
    state_heads: int


SIZES = {
    "60m": ModelSize(512, 8, 4, 1, 1536, 4),
    "245m": ModelSize(1024, 16, 8, 2, 3072, 8),
    "1b": ModelSize(2048, 20, 16, 4, 6144, 16),
    "8b": ModelSize(4096, 36, 32, 8, 14336, 32),
}
HEAD_SIZE = 128  # of attention; CUDA has flash attention for the head sizes of published models only
CONTEXT_LENGTH_TOKENS = 131_072


class QuantizedWriter(ModelWriter):
    """Writes the matrices of blocks in a given type. Their noise repeats: the same work to compute, faster to write."""

    kind = gguf.GGMLQuantizationType.Q4_0
    _noise = draw_noise(7, "block", 1 << 20, scale=1.0)

    def add_matrix(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        self.add_tensor(name, np.resize(self._noise * np.float32(gain / math.sqrt(columns)), (rows, columns)))

    def add_tensor(self, name: str, array: FloatArray, *, half: bool = False) -> None:
        if not name.startswith("blk.") or array.ndim != 2 or "conv1d" in name:
            super().add_tensor(name, array, half=half)
        elif self.kind == gguf.GGMLQuantizationType.F16:
            super().add_tensor(name, array, half=True)
        else:
            self._gguf.add_tensor(name, gguf.quants.quantize(array, self.kind), raw_dtype=self.kind)


def get_hybrid_path(size: str, quantization: str, acceptance: int) -> Path:
    """Return the file of a hybrid model whose MTP head is right in `acceptance` per cent of the cases, 100 or 75."""
    decoder = _build_hybrid(SIZES[size], acceptance)
    name = f"successor-{size}-{quantization}-{acceptance}"
    return get_cached_file(name, lambda file: _write(file, decoder, quantization))


def get_attention_path(size: str, quantization: str, vocabulary_size: int = vocabulary.VOCABULARY_SIZE) -> Path:
    """Return the file of an attention model with a vocabulary of the given size."""
    model = SIZES[size]
    decoder = Llama(
        embedding_length=model.embedding_length, layers=model.layers, heads=model.heads, kv_heads=model.kv_heads,
        feed_forward_length=model.feed_forward_length, head_size=HEAD_SIZE,
    )  # fmt: skip
    name = f"attention-{size}-{quantization}-{vocabulary_size}-{HEAD_SIZE}"
    return get_cached_file(name, lambda file: _write(file, decoder, quantization, vocabulary_size))


def get_cached_file(name: str, write: Callable[[Path], None]) -> Path:
    """Return a GGUF file of the benchmark cache. If it does not exist yet, write it."""
    file = get_cache_directory("benchmarks") / f"{name}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        write(temporary)
        os.replace(temporary, file)
    return file


def prune_model(source: Path, target: Path, layers: int) -> None:
    """Write a copy of a model with `layers` layers, the first ones and the last one, as a draft model."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    count = reader.fields[f"{architecture}.block_count"].contents()
    new_prefixes = {f"blk.{old}.": f"blk.{new}." for new, old in enumerate([*range(layers - 1), count - 1])}
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = layers if name == f"{architecture}.block_count" else field.contents()
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        prefix = tensor.name[: tensor.name.index(".", 4) + 1] if tensor.name.startswith("blk.") else ""
        if not prefix or prefix in new_prefixes:
            name = tensor.name.replace(prefix, new_prefixes[prefix], 1) if prefix else tensor.name
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _build_hybrid(size: ModelSize, acceptance: int) -> Qwen35:
    misdrafted = frozenset() if acceptance == 100 else constructed.MISDRAFTED_TOKENS
    width = size.embedding_length
    small_head = constructed.build_mtp_head(misdrafted)
    assert small_head.token_embedding is not None
    fusion = np.concatenate([np.eye(width), np.zeros((width, width))], axis=1).astype(np.float32)
    return Qwen35(
        embedding_length=width, layers=size.layers, full_attention_interval=4, heads=size.heads,
        kv_heads=size.kv_heads, head_size=128, feed_forward_length=size.feed_forward_length, state_size=128,
        state_key_heads=size.state_heads, state_heads=size.state_heads,
        mtp_head=MTPHead(fusion, _pad_columns(small_head.token_embedding, width)),
    )  # fmt: skip


def _write(
    file: Path, decoder: Qwen35 | Llama, quantization: str, vocabulary_size: int = vocabulary.VOCABULARY_SIZE
) -> None:
    width, half = decoder.embedding_length, vocabulary_size > vocabulary.VOCABULARY_SIZE
    token_embedding = _append_rows(constructed._build_token_embedding(), vocabulary_size)
    output = _append_rows(constructed._build_output(), vocabulary_size)
    with QuantizedWriter(file, decoder.architecture, seed=7) as writer:
        writer.kind = gguf.GGMLQuantizationType[quantization.upper()]
        vocabulary.write_tokenizer(writer, vocabulary_size)
        common = {"context_length": CONTEXT_LENGTH_TOKENS, "embedding_length": width, "vocab_size": vocabulary_size}
        writer.add_metadata(decoder.architecture, {**common, **decoder.build_metadata()})
        writer.add_tensor("token_embd.weight", _pad_columns(token_embedding, width), half=half)
        writer.add_constant("output_norm.weight", 1.0, width)
        writer.add_tensor("output.weight", _pad_columns(output, width), half=half)
        decoder.write_blocks(writer, gain=0.0)


def _append_rows(table: FloatArray, rows: int) -> FloatArray:
    """Append rows for further tokens. None is ever the most likely; their logits are spread as in real models."""
    return np.concatenate([table, draw_noise(7, "more", rows - len(table), table.shape[1], scale=0.5)])


def _pad_columns(table: FloatArray, width: int) -> FloatArray:
    """Put the table of the tiny model into the first dimensions. Norms do not change the zeros in the others."""
    padded = np.zeros((len(table), width), np.float32)
    padded[:, : table.shape[1]] = table
    return padded
