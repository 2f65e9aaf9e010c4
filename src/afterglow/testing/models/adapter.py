"""LoRA adapter for the tiny llama models, with a scale that clearly changes the logits.

Contains the adapter's file format; the shapes come from the model.
"""

from __future__ import annotations

from pathlib import Path

from afterglow.testing.models.attention import Llama
from afterglow.testing.models.writer import ModelWriter

LORA_RANK, LORA_ALPHA = 4, 8.0


def write_adapter(path: Path, *, model: Llama, seed: int) -> None:
    """Write an adapter for all query and attention output matrices."""
    queries = model.heads * model.head_size
    with ModelWriter(path, model.architecture, seed=seed, kind="adapter") as writer:
        writer.add_metadata("adapter", {"type": "lora", "lora.alpha": LORA_ALPHA})
        for layer in range(model.layers):
            _write_lora_pair(writer, f"blk.{layer}.attn_q.weight", queries, model.embedding_length)
            _write_lora_pair(writer, f"blk.{layer}.attn_output.weight", model.embedding_length, queries)


def _write_lora_pair(writer: ModelWriter, name: str, rows: int, columns: int) -> None:
    """Add the two factors of one matrix; llama.cpp adds b x a x alpha / rank to it."""
    writer.add_matrix(f"{name}.lora_a", LORA_RANK, columns)
    writer.add_matrix(f"{name}.lora_b", rows, LORA_RANK)
