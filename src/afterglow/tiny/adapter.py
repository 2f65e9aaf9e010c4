"""A LoRA adapter for the tiny llama models, loud enough to be seen in the logits.

It knows the adapter's file form; the shapes it fits it takes from the model it is for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from afterglow.tiny.attention import Llama
from afterglow.tiny.writer import Writer

RANK, ALPHA = 4, 8.0


def write_adapter(path: Path, *, model: Llama, seed: int) -> None:
    """Write an adapter of all queries and attention outputs."""
    queries = model.heads * model.head
    with Writer(path, model.architecture, seed=seed, kind="adapter") as writer:
        writer.settings("adapter", {"type": "lora", "lora.alpha": ALPHA})
        for layer in range(model.layers):
            _pair(writer, f"blk.{layer}.attn_q.weight", queries, model.embedding)
            _pair(writer, f"blk.{layer}.attn_output.weight", model.embedding, queries)


def _pair(writer: Writer, name: str, rows: int, columns: int) -> None:
    """Add the two factors; llama.cpp adds b x a x alpha / rank to the matrix of that name."""
    writer.matrix(f"{name}.lora_a", RANK, columns)
    writer.matrix(f"{name}.lora_b", rows, RANK)


RECIPES: dict[str, Callable[[Path], None]] = {"adapter": partial(write_adapter, model=Llama(), seed=11)}
