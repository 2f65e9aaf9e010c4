"""Causal reranker: qwen3 with a classifier head for yes and no and a prompt, as Qwen3-Reranker is converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gguf import PoolingType

from afterglow.testing.models import vocabulary
from afterglow.testing.models.attention import ATTENTION_GAIN, Llama
from afterglow.testing.models.decoder import open_text_model_writer
from afterglow.testing.models.writer import MetadataInput, ModelWriter

LABELS = ("yes", "no")
RERANK_TEMPLATE = (
    "<|im_start|>system\nAnswer yes or no.<|im_end|>\n"
    "<|im_start|>user\nquery: {query}\ndocument: {document}<|im_end|>\n<|im_start|>assistant\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3(Llama):
    """Full attention with normalized queries and keys."""

    architecture: ClassVar[str] = "qwen3"

    def build_metadata(self) -> Mapping[str, MetadataInput]:
        return {
            **Llama.build_metadata(self),
            "pooling_type": int(PoolingType.RANK),
            "classifier.output_labels": LABELS,
        }

    def write_blocks(self, writer: ModelWriter, gain: float) -> None:
        Llama.write_blocks(self, writer, gain)
        for layer in range(self.layers):
            for name in ("attn_q_norm", "attn_k_norm"):
                writer.add_constant(f"blk.{layer}.{name}.weight", ATTENTION_GAIN, self.head_size)


def write_model(path: Path) -> None:
    """Write a random model. The head replaces the output matrix, as in files of models without tied embeddings."""
    decoder = Qwen3()
    with open_text_model_writer(path, decoder, seed=17) as writer:
        writer.add_metadata("tokenizer", {"chat_template.rerank": RERANK_TEMPLATE})
        writer.add_noise("token_embd.weight", vocabulary.VOCABULARY_SIZE, decoder.embedding_length, scale=1.0)
        writer.add_constant("output_norm.weight", 1.0, decoder.embedding_length)
        writer.add_matrix("cls.output.weight", len(LABELS), decoder.embedding_length)
        decoder.write_blocks(writer, gain=1.0)
