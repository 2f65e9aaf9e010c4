"""Writes the tables of docs/models.md and docs/memory.md: memory of models by size, quantization and context.

    make docs

The KV cache is what `estimate_footprint` computes for a header with the hyperparameters below, and the weights are
parameters times bits per weight. A test fails if the pages are not up to date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from afterglow.api.options import ContextOptions, build_context_settings, check_options
from afterglow.llama.gguf.footprint import Footprint, estimate_footprint
from afterglow.llama.gguf.header import GGUFHeader, MetadataValue

DOCS = Path(__file__).parent.parent / "docs"
GIB = 1024**3
# Average bits per weight of llama.cpp's quantizations of an 8 B model; small models are up to a fifth larger.
BITS_PER_WEIGHT = {"Q4_K_M": 4.89, "Q5_K_M": 5.70, "Q6_K": 6.56, "Q8_0": 8.50, "F16": 16.0}
CONTEXTS = (4096, 8192, 16_384, 32_768, 131_072)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Hyperparameters of a published model that determine its memory."""

    name: str
    billions: float
    layers: int
    kv_heads: int
    head_width: int
    embedding: int
    feed_forward: int
    vocabulary: int

    @property
    def header(self) -> GGUFHeader:
        """Header of a file of this model, without tensors."""
        numbers = {
            "block_count": self.layers,
            "attention.head_count": self.embedding // self.head_width,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_width,
            "attention.value_length": self.head_width,
            "embedding_length": self.embedding,
            "feed_forward_length": self.feed_forward,
            "vocab_size": self.vocabulary,
        }
        metadata: dict[str, MetadataValue] = {f"llama.{name}": value for name, value in numbers.items()}
        return GGUFHeader(
            path=Path(self.name),
            version=3,
            alignment=32,
            metadata={"general.architecture": "llama", **metadata},
            value_types={},
            tensors=(),
            data_start=0,
            file_size=0,
        )

    def count_weight_bytes(self, quantization: str) -> float:
        return self.billions * 1e9 * BITS_PER_WEIGHT[quantization] / 8

    def estimate(self, **options: object) -> Footprint:
        """Estimate the memory of a context with these options of `load`."""
        return estimate_footprint(self.header, build_context_settings(check_options(ContextOptions, options)))


MODELS = (
    ModelShape("Qwen3 0.6B", 0.60, 28, 8, 128, 1024, 3072, 151_936),
    ModelShape("Llama 3.2 1B", 1.24, 16, 8, 64, 2048, 8192, 128_256),
    ModelShape("Qwen3 4B", 4.02, 36, 8, 128, 2560, 9728, 151_936),
    ModelShape("Llama 3.1 8B", 8.03, 32, 8, 128, 4096, 14_336, 128_256),
    ModelShape("Qwen3 14B", 14.8, 40, 8, 128, 5120, 17_408, 151_936),
    ModelShape("Qwen3 30B-A3B", 30.5, 48, 4, 128, 2048, 6144, 151_936),
    ModelShape("Qwen3 32B", 32.8, 64, 8, 128, 5120, 25_600, 151_936),
    ModelShape("Llama 3.3 70B", 70.6, 80, 8, 128, 8192, 28_672, 128_256),
)


def format_gib(nbytes: float) -> str:
    """Return bytes in GiB with the digits that matter.

    >>> format_gib(0.5 * GIB), format_gib(33.4 * GIB)
    ('0.5', '33')
    """
    return f"{nbytes / GIB:.1f}" if nbytes < 20 * GIB else f"{nbytes / GIB:.0f}"


def build_weights_table() -> str:
    """Return the memory of the weights by quantization, and the RAM that a machine needs for one conversation."""
    rows = ["| model | " + " | ".join(BITS_PER_WEIGHT) + " | RAM for Q4_K_M, `--context 8192 --sequences 1` |"]
    rows.append("|---|" + "---|" * (len(BITS_PER_WEIGHT) + 1))
    for model in MODELS:
        weights = [format_gib(model.count_weight_bytes(name)) for name in BITS_PER_WEIGHT]
        context = model.estimate(context=8192, sequences=1).context_bytes
        total = format_gib(model.count_weight_bytes("Q4_K_M") + context)
        rows.append(f"| {model.name} | {' | '.join(weights)} | {total} |")
    return "\n".join(rows)


def build_context_table() -> str:
    """Return the KV cache by context length, for one sequence in f16."""
    rows = ["| model | KiB per token | " + " | ".join(f"{context:,}" for context in CONTEXTS) + " |"]
    rows.append("|---|---|" + "---|" * len(CONTEXTS))
    for model in MODELS:
        sizes = [model.estimate(context=context, sequences=1).kv_cache_bytes for context in CONTEXTS]
        rows.append(
            f"| {model.name} | {sizes[0] // CONTEXTS[0] // 1024} | {' | '.join(format_gib(size) for size in sizes)} |"
        )
    return "\n".join(rows)


def build_example_table() -> str:
    """Return the KV cache of one model for several options."""
    model = next(shape for shape in MODELS if shape.name == "Llama 3.1 8B")
    examples: dict[str, dict[str, object]] = {
        "`--context 4096 --sequences 4`": {"context": 4096, "sequences": 4},
        "`--context 32768 --sequences 4`": {"context": 32_768, "sequences": 4},
        "the same with `--kv-unified`": {"context": 32_768, "sequences": 4, "kv_unified": True},
        "`--context 32768 --sequences 1`": {"context": 32_768, "sequences": 1},
        "one sequence with `--cache-type-k q8_0 --cache-type-v q8_0`": {
            "context": 32_768, "sequences": 1, "cache_type_k": "q8_0", "cache_type_v": "q8_0",
        },
    }  # fmt: skip
    rows = [f"| flags | KV cache of {model.name}, GiB |", "|---|---|"]
    rows += [f"| {name} | {format_gib(model.estimate(**flags).kv_cache_bytes)} |" for name, flags in examples.items()]
    return "\n".join(rows)


TABLES = {
    "models.md": {"weights": build_weights_table},
    "memory.md": {"examples": build_example_table, "contexts": build_context_table},
}


def build_page(name: str) -> str:
    """Return the text of a page with its tables computed again."""
    text = (DOCS / name).read_text()
    for table, build in TABLES[name].items():
        begin, end = f"<!-- {table}: begin -->", f"<!-- {table}: end -->"
        text = re.sub(f"{begin}.*?{end}", f"{begin}\n{build()}\n{end}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for page in TABLES:
        (DOCS / page).write_text(build_page(page))
