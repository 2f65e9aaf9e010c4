"""Estimates the memory of a model and a context from the header alone, in total and for each device."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from afterglow.llama.gguf.header import GGUFHeader
from afterglow.llama.settings import ContextSettings

# Bytes per element of each cache type: block bytes / block length.
ELEMENT_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
CELL_PADDING = 256  # llama.cpp rounds the cells of a sequence up to a multiple of this
MASK_ELEMENT_BYTES = {True: 2, False: 4}  # by flash attention
EMBEDDING_BUFFERS = 4  # in RAM if a GPU computes all layers; measured
BLOCK_NAME = re.compile(r"^blk\.(\d+)\.")
EXPERT_NAME = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
# One of so many layers has full attention, the others a sliding window. llama.cpp has these numbers in its code.
WINDOW_PATTERNS = {
    "gpt-oss": 2, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "olmo2": 4, "olmo3": 4, "exaone4": 4,
    "smallthinker": 4, "llama4": 4,
}  # fmt: skip
DEFAULT_WINDOW_PATTERN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes by purpose. `weight_bytes` belongs to the model, the rest to one context."""

    weight_bytes: int
    kv_cache_bytes: int
    recurrent_bytes: int
    compute_bytes: int
    output_bytes: int = 0  # logits, always in RAM

    @property
    def context_bytes(self) -> int:
        return self.kv_cache_bytes + self.recurrent_bytes + self.compute_bytes + self.output_bytes

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.context_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Bytes of the weights of one layer; those of MoE experts are separate, because they can stay in RAM."""

    dense_bytes: int = 0
    expert_bytes: int = 0


def estimate_footprint(header: GGUFHeader, settings: ContextSettings) -> Footprint:
    """Estimate the memory of the model with a context of `settings`.

    KV cache and recurrent states are exact for the tested models; `compute_bytes` is within a few percent if the KV
    cache is large.
    """
    return ModelFacts([header]).estimate(settings)


class ModelFacts:
    """What the headers of a model, one per file of a split model, say about its memory."""

    def __init__(self, headers: Sequence[GGUFHeader]) -> None:
        self.hyperparameters = parameters = Hyperparameters(headers[0])
        count = parameters.get_number("block_count")
        dense, experts, self.input_bytes, self.output_bytes = [0] * count, [0] * count, 0, 0
        has_output = False
        for tensor in (tensor for header in headers for tensor in header.tensors):
            block = BLOCK_NAME.match(tensor.name)
            if block is not None and int(block[1]) < count:
                (experts if EXPERT_NAME.search(tensor.name) else dense)[int(block[1])] += tensor.nbytes
            elif tensor.name.startswith("output"):
                self.output_bytes += tensor.nbytes
                has_output = has_output or tensor.name == "output.weight"
            else:
                self.input_bytes += tensor.nbytes
        self.layers = [
            LayerWeights(dense_bytes=dense_bytes, expert_bytes=expert_bytes)
            for dense_bytes, expert_bytes in zip(dense, experts, strict=True)
        ]
        # Without an output matrix the token embeddings serve as one; a GPU needs a copy of them.
        self._tied_bytes = 0 if has_output else self.input_bytes
        self.moe_layers = [layer for layer, weights in enumerate(self.layers) if weights.expert_bytes]

    @property
    def weight_bytes(self) -> int:
        return self.input_bytes + self.output_bytes + sum(x.dense_bytes + x.expert_bytes for x in self.layers)

    def estimate(self, settings: ContextSettings) -> Footprint:
        """Estimate the memory of the model with a context of `settings`, all of it on one device."""
        return self.estimate_devices(settings)[0]

    def estimate_devices(
        self, settings: ContextSettings, *, gpu_layers: int = 0, cpu_moe_layers: int = 0
    ) -> tuple[Footprint, Footprint]:
        """Estimate the memory in RAM and on GPUs.

        As in llama.cpp, the last `gpu_layers` layers are on the GPU, and the output counts as one of them; -1: all. The
        experts of the first `cpu_moe_layers` layers stay in RAM.
        """
        count = len(self.layers)
        first = 0 if gpu_layers < 0 else max(0, count + 1 - gpu_layers)  # layer on the GPU; `count` is the output
        ram_weights, gpu_weights = self.input_bytes, 0
        for number, weights in enumerate(self.layers):
            on_gpu = number >= first
            experts_on_gpu = on_gpu and number >= cpu_moe_layers
            gpu_weights += weights.dense_bytes * on_gpu + weights.expert_bytes * experts_on_gpu
            ram_weights += weights.dense_bytes * (not on_gpu) + weights.expert_bytes * (not experts_on_gpu)
        if first <= count and gpu_layers:
            gpu_weights += self.output_bytes + self._tied_bytes
        else:
            ram_weights += self.output_bytes
        caches = self.hyperparameters.count_cache_bytes(settings)
        states = self.hyperparameters.count_state_bytes(settings)
        compute = self.hyperparameters.estimate_compute_bytes(settings)
        ram = Footprint(
            weight_bytes=ram_weights,
            kv_cache_bytes=sum(caches[:first]) if gpu_layers else sum(caches),
            recurrent_bytes=sum(states[:first]) if gpu_layers else sum(states),
            compute_bytes=compute,
            output_bytes=settings.max_outputs * self.hyperparameters.vocabulary_size * 4,
        )
        gpu = Footprint(
            weight_bytes=gpu_weights,
            kv_cache_bytes=sum(caches) - ram.kv_cache_bytes,
            recurrent_bytes=sum(states) - ram.recurrent_bytes,
            compute_bytes=compute if gpu_layers else 0,
        )
        if gpu_layers and not ram.kv_cache_bytes and not ram.recurrent_bytes:
            # Only the inputs of the graph are in RAM: masks, and embeddings in several buffers.
            rows, width = min(settings.ubatch, settings.batch), self.hyperparameters.get_number("embedding_length")
            masks = self.hyperparameters.count_mask_bytes(settings)
            ram = replace(ram, compute_bytes=masks + EMBEDDING_BUFFERS * 4 * rows * width)
        return ram, gpu


class Hyperparameters:
    """Hyperparameters that determine how much memory a model needs."""

    def __init__(self, header: GGUFHeader) -> None:
        self._metadata = header.metadata
        self.architecture = str(header.metadata.get("general.architecture", ""))
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        token_count = 0 if tokens is None else len(tokens)  # type: ignore[arg-type]
        self.vocabulary_size = self.get_number("vocab_size") or token_count
        self.is_recurrent = self.get_number("ssm.inner_size") > 0
        self.is_causal = header.metadata.get(f"{self.architecture}.attention.causal", True) is not False
        self.trained_context = self.get_number("context_length")

    def get_number(self, name: str, default: int = 0) -> int:
        value = self._metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, np.ndarray):
            return int(value.max()) if value.size else default
        return int(value) if isinstance(value, int | float) else default

    def get_per_layer(self, name: str, layers: int) -> list[int]:
        """Return a number that a file may store once, or once per layer."""
        value = self._metadata.get(f"{self.architecture}.{name}")
        if isinstance(value, np.ndarray):
            return [int(number) for number in value[:layers]]
        return [self.get_number(name)] * layers

    # --- cells and states

    def get_head_widths(self) -> tuple[int, int]:
        """Return the elements of one head's keys and values."""
        heads = self.get_per_layer("attention.head_count", 1)
        default = self.get_number("embedding_length") // max([*heads, 1])
        return self.get_number("attention.key_length", default), self.get_number("attention.value_length", default)

    @functools.cached_property
    def kv_widths(self) -> list[tuple[int, int]]:
        """For each layer, the elements of keys and of values in one cell; (0, 0) for a recurrent layer."""
        count = self.get_number("block_count") - self.get_number("nextn_predict_layers")
        if latent := self.get_number("attention.kv_lora_rank"):
            return [(latent + self.get_number("rope.dimension_count"), 0)] * count
        key, value = self.get_head_widths()
        groups = self.get_per_layer("attention.head_count_kv", count)
        if not any(groups) and not self.is_recurrent:
            groups = self.get_per_layer("attention.head_count", count)
        if interval := self.get_number("full_attention_interval"):
            groups = [number if (layer + 1) % interval == 0 else 0 for layer, number in enumerate(groups)]
        return [(number * key, number * value) for number in groups]

    def count_cache_bytes(self, settings: ContextSettings) -> list[int]:
        """Return the bytes of the KV cache of each layer. A model without causal attention has none."""
        if not self.is_causal:
            return []
        keys, values = ELEMENT_BYTES[settings.cache_type_k], ELEMENT_BYTES[settings.cache_type_v]
        cells = self._count_cells(settings, is_window=False), self._count_cells(settings, is_window=True)
        return [
            int(cells[is_window] * (key_width * keys + value_width * values)) if key_width else 0
            for is_window, (key_width, value_width) in zip(self._window_layers, self.kv_widths, strict=True)
        ]

    def count_state_bytes(self, settings: ContextSettings) -> list[int]:
        """Return the bytes of the recurrent states of each layer."""
        if not self.is_recurrent:
            return []
        states = settings.sequences * (1 + settings.recurrent_snapshots)
        nbytes = self.count_recurrent_floats() * 4 * states
        return [0 if keys else nbytes for keys, _ in self.kv_widths]

    def _count_cells(self, settings: ContextSettings, *, is_window: bool) -> int:
        """Return the cells of a layer over all sequences."""
        streams = 1 if settings.kv_unified else settings.sequences
        cells = pad_cells(settings.cells // streams)
        window = self.get_number("attention.sliding_window")
        if is_window and window and not settings.swa_full:
            sequences = settings.sequences if settings.kv_unified else 1
            cells = min(cells, pad_cells(window * sequences + min(settings.ubatch, settings.batch)))
        return cells * streams

    @functools.cached_property
    def _window_layers(self) -> list[bool]:
        """Whether each layer has a sliding window."""
        has_window = self.get_number("attention.sliding_window") > 0
        return [has_window and self._is_sliding_window_layer(layer) for layer in range(len(self.kv_widths))]

    def _is_sliding_window_layer(self, layer: int) -> bool:
        default = WINDOW_PATTERNS.get(self.architecture, DEFAULT_WINDOW_PATTERN)
        pattern = self._metadata.get(f"{self.architecture}.attention.sliding_window_pattern", default)
        if isinstance(pattern, np.ndarray):
            return bool(pattern[layer]) if layer < len(pattern) else False
        return (layer + 1) % max(int(pattern), 1) != 0  # type: ignore[arg-type]

    def count_recurrent_floats(self) -> int:
        """Return the floats of one recurrent layer's state of one sequence: convolution window and state."""
        inner, state = self.get_number("ssm.inner_size"), self.get_number("ssm.state_size")
        window = max(self.get_number("ssm.conv_kernel") - 1, 0)
        return window * (inner + 2 * self.get_number("ssm.group_count") * state) + state * inner

    # --- compute buffers

    def estimate_compute_bytes(self, settings: ContextSettings) -> int:
        """Estimate the buffer for intermediate results of one ubatch.

        Its parts are the attention masks, without flash attention the scores of one layer, and the larger one of a
        layer's activations and the logits. The last layer drops the rows without an output before its feed-forward
        part, so a model of one layer has those activations of its outputs only.
        """
        rows, width = min(settings.ubatch, settings.batch), self.get_number("embedding_length")
        experts = self.get_number("expert_used_count")
        expert_width = self.get_number("expert_feed_forward_length") or self.get_number("feed_forward_length")
        feed_forward_rows = rows if len(self.kv_widths) > 1 else min(rows, settings.max_outputs)
        feed_forward_floats = max(
            3 * self.get_number("feed_forward_length"),
            experts * (expert_width + max(2 * expert_width, width)),
        )
        inner_floats = max(
            feed_forward_rows * feed_forward_floats,
            rows * max((keys + values for keys, values in self.kv_widths), default=0),
            rows * 5 * self.get_number("ssm.inner_size"),
        )
        logits = settings.max_outputs * self.vocabulary_size
        states = settings.sequences * self.count_recurrent_floats() if self.is_recurrent else 0  # of one layer
        floats = rows * 5 * width + max(inner_floats + states, logits)
        return self.count_mask_bytes(settings) + self._count_score_bytes(settings) + 4 * floats

    def count_mask_bytes(self, settings: ContextSettings) -> int:
        """Return the bytes of the attention masks: one for full attention, one for sliding windows."""
        if not self.is_causal:
            return 0
        rows = min(settings.ubatch, settings.batch)
        element_bytes = MASK_ELEMENT_BYTES[settings.flash_attention is not False]
        return sum(cells * rows * element_bytes for cells in self._list_mask_cells(settings))

    def _list_mask_cells(self, settings: ContextSettings) -> set[int]:
        """Return the different numbers of cells that a token attends to."""
        streams = 1 if settings.kv_unified else settings.sequences
        kinds = {is_window for is_window, (keys, _) in zip(self._window_layers, self.kv_widths, strict=True) if keys}
        return {self._count_cells(settings, is_window=is_window) // streams for is_window in kinds}

    def _count_score_bytes(self, settings: ContextSettings) -> int:
        if settings.flash_attention is not False or not self.is_causal:
            return 0
        rows, heads = min(settings.ubatch, settings.batch), max(self.get_per_layer("attention.head_count", 1))
        return max(self._list_mask_cells(settings), default=0) * rows * heads * 4


def pad_cells(cells: int) -> int:
    return -(-cells // CELL_PADDING) * CELL_PADDING
