"""Chooses the quantization of a model that is pulled: the largest one that fits this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from afterglow.api.fit import GPU_RESERVE_FRACTION, RAM_RESERVE_FRACTION, WANTED_CONTEXT_TOKENS
from afterglow.errors import OutOfMemory
from afterglow.llama.gguf.footprint import estimate_footprint
from afterglow.llama.gguf.header import read_header
from afterglow.llama.library.devices import MachineMemory, get_free_memory
from afterglow.llama.settings import ContextSettings
from afterglow.registry import Variant


def choose_quantization(header: Path, variants: Sequence[Variant], memory: MachineMemory | None = None) -> Variant:
    """Return the largest variant that fits with a context of 32,768 tokens into the GPUs, otherwise into RAM.

    `variants` are sorted by size, largest first; `header` has the header of one of them. `memory` is the free memory,
    by default of now. Raises `OutOfMemory` if none fits.
    """
    context_bytes = estimate_context_bytes(header)
    gpu_bytes = get_free_memory(gpu=True) if memory is None else sum(memory.gpu_bytes)
    ram_bytes = get_free_memory(gpu=False) if memory is None else memory.ram_bytes
    budgets = [int(gpu_bytes * (1 - GPU_RESERVE_FRACTION)), int(ram_bytes * (1 - RAM_RESERVE_FRACTION))]
    for budget in budgets:
        for variant in variants:
            if variant.size + context_bytes <= budget:
                return variant
    smallest = variants[-1]
    advice = (
        f"no quantization fits with a context of {WANTED_CONTEXT_TOKENS:,} tokens; the smallest is "
        f"{smallest.quantization}. Name it to pull it anyway (owner/repo:QUANT), and load it with a shorter context"
    )
    raise OutOfMemory(smallest.size + context_bytes, max(budgets), advice)


def estimate_context_bytes(header: Path) -> int:
    """Return the bytes of one context of 32,768 tokens, in addition to the weights."""
    return estimate_footprint(
        read_header(header), ContextSettings(cells=WANTED_CONTEXT_TOKENS, sequences=1)
    ).context_bytes
