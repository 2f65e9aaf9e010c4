"""Estimates the memory of a model and a context from the file's header alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afterglow.llama.gguf.header import GGUFHeader
from afterglow.llama.settings import ContextSettings

# Bytes per element of each cache type: block bytes / block length.
ELEMENT_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
CELL_PADDING = 256  # llama.cpp rounds the cells of a sequence up to a multiple of this


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes by purpose. `weight_bytes` belongs to the model, the rest to one context."""

    weight_bytes: int
    kv_cache_bytes: int
    recurrent_bytes: int
    compute_bytes: int

    @property
    def context_bytes(self) -> int:
        return self.kv_cache_bytes + self.recurrent_bytes + self.compute_bytes

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.context_bytes


def estimate_footprint(header: GGUFHeader, settings: ContextSettings) -> Footprint:
    """Estimate the memory of the model with a context of `settings`.

    KV cache and recurrent states are exact for the tested models; `compute_bytes` is a rough upper bound.
    """
    parameters = Hyperparameters(header)
    layers = parameters.get_kv_widths()
    key_bytes, value_bytes = ELEMENT_BYTES[settings.cache_type_k], ELEMENT_BYTES[settings.cache_type_v]
    kv_cache_bytes = sum(
        parameters.count_cells(settings, layer) * (keys * key_bytes + values * value_bytes)
        for layer, (keys, values) in enumerate(layers)
        if keys
    )
    recurrent_layers = sum(1 for keys, _ in layers if not keys) if parameters.is_recurrent else 0
    states = settings.sequences * (1 + settings.recurrent_snapshots)
    logits = settings.outputs * parameters.vocabulary_size * 4
    row_floats = 12 * parameters.get_number("embedding_length") + 3 * parameters.get_number("feed_forward_length")
    activations = settings.ubatch * row_floats * 4
    return Footprint(
        weight_bytes=sum(tensor.nbytes for tensor in header.tensors),
        kv_cache_bytes=int(kv_cache_bytes),
        recurrent_bytes=recurrent_layers * parameters.count_recurrent_floats() * 4 * states,
        compute_bytes=logits + activations,
    )


def count_layers_that_fit(header: GGUFHeader, settings: ContextSettings, free_bytes: int) -> int:
    """Return how many layers, with their part of the context, fit into `free_bytes` of GPU memory; -1: all."""
    footprint = estimate_footprint(header, settings)
    available = free_bytes - footprint.compute_bytes - free_bytes // 16  # reserve for drivers and graphs
    layers = max(1, Hyperparameters(header).get_number("block_count"))
    layer_bytes = (footprint.weight_bytes + footprint.kv_cache_bytes + footprint.recurrent_bytes) / layers
    count = int(max(available, 0) / layer_bytes)
    return -1 if count >= layers else count


class Hyperparameters:
    """Hyperparameters that determine how much memory a model needs."""

    def __init__(self, header: GGUFHeader) -> None:
        self._metadata = header.metadata
        self._architecture = str(header.metadata.get("general.architecture", ""))
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        token_count = 0 if tokens is None else len(tokens)  # type: ignore[arg-type]
        self.vocabulary_size = self.get_number("vocab_size") or token_count
        self.is_recurrent = self.get_number("ssm.inner_size") > 0

    def get_number(self, name: str, default: int = 0) -> int:
        value = self._metadata.get(f"{self._architecture}.{name}", default)
        return int(value) if isinstance(value, int | float) else default

    def get_per_layer(self, name: str, layers: int) -> list[int]:
        """Return a number that a file may store once, or once per layer."""
        value = self._metadata.get(f"{self._architecture}.{name}")
        if isinstance(value, np.ndarray):
            return [int(number) for number in value[:layers]]
        return [self.get_number(name)] * layers

    def get_kv_widths(self) -> list[tuple[int, int]]:
        """Return, for each layer, the elements of keys and of values in one cell; (0, 0) for a recurrent layer."""
        count = self.get_number("block_count") - self.get_number("nextn_predict_layers")
        heads = max(self.get_per_layer("attention.head_count", 1)[0], 1) if count else 1
        default = self.get_number("embedding_length") // heads
        if latent := self.get_number("attention.kv_lora_rank"):
            return [(latent + self.get_number("rope.dimension_count"), 0)] * count
        key = self.get_number("attention.key_length", default)
        value = self.get_number("attention.value_length", default)
        groups = self.get_per_layer("attention.head_count_kv", count)
        if not any(groups) and not self.is_recurrent:
            groups = self.get_per_layer("attention.head_count", count)
        if interval := self.get_number("full_attention_interval"):
            groups = [number if (layer + 1) % interval == 0 else 0 for layer, number in enumerate(groups)]
        return [(number * key, number * value) for number in groups]

    def count_cells(self, settings: ContextSettings, layer: int) -> int:
        """Return the cells of this layer over all sequences."""
        streams = 1 if settings.kv_unified else settings.sequences
        cells = pad_cells(settings.cells // streams)
        window = self.get_number("attention.sliding_window")
        if window and not settings.swa_full and self._is_sliding_window_layer(layer):
            sequences = settings.sequences if settings.kv_unified else 1
            cells = min(cells, pad_cells(window * sequences + min(settings.ubatch, settings.batch)))
        return cells * streams

    def _is_sliding_window_layer(self, layer: int) -> bool:
        pattern = self._metadata.get(f"{self._architecture}.attention.sliding_window_pattern", 6)
        if isinstance(pattern, np.ndarray):
            return bool(pattern[layer]) if layer < len(pattern) else False
        return (layer + 1) % max(int(pattern), 1) != 0  # type: ignore[arg-type]

    def count_recurrent_floats(self) -> int:
        """Return the floats of one recurrent layer's state of one sequence: convolution window and state."""
        inner, state = self.get_number("ssm.inner_size"), self.get_number("ssm.state_size")
        window = max(self.get_number("ssm.conv_kernel") - 1, 0)
        return window * (inner + 2 * self.get_number("ssm.group_count") * state) + state * inner


def pad_cells(cells: int) -> int:
    return -(-cells // CELL_PADDING) * CELL_PADDING
