"""How much memory a model and a context will take, from the file's header alone: "does it fit?" in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afterglow.llama.header import Header
from afterglow.llama.settings import ContextSettings

# Bytes of one element of each cache type, as block bytes over block length.
ELEMENT_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
PADDING = 256  # llama.cpp rounds the cells of a sequence up to this


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes by purpose. `weights` is the file; the rest belongs to one context."""

    weights: int
    cells: int
    recurrent: int
    compute: int

    @property
    def context(self) -> int:
        return self.cells + self.recurrent + self.compute

    @property
    def total(self) -> int:
        return self.weights + self.context


def estimate(header: Header, settings: ContextSettings) -> Footprint:
    """What `header`'s model takes with `settings`. The cells and recurrent states are exact on the models
    this was tested with; what the computation takes beside them is a rough upper bound."""
    shape = Shape(header)
    layers = shape.attention_layers()
    width = ELEMENT_BYTES[settings.key_type], ELEMENT_BYTES[settings.value_type]
    total = sum(
        shape.cells(settings, layer) * (keys * width[0] + values * width[1])
        for layer, (keys, values) in enumerate(layers)
        if keys
    )
    recurrent_layers = sum(1 for keys, _ in layers if not keys) if shape.recurrent else 0
    states = settings.sequences * (1 + settings.rollback)
    logits = settings.outputs * shape.vocabulary * 4
    activations = (
        settings.ubatch * (12 * shape.number("embedding_length") + 3 * shape.number("feed_forward_length")) * 4
    )
    return Footprint(
        weights=sum(tensor.nbytes for tensor in header.tensors),
        cells=int(total),
        recurrent=recurrent_layers * shape.recurrent_floats() * 4 * states,
        compute=logits + activations,
    )


def layers_that_fit(header: Header, settings: ContextSettings, free: int) -> int:
    """How many layers, with their part of the context, fit into `free` bytes of GPU memory; -1: all of them."""
    footprint = estimate(header, settings)
    room = free - footprint.compute - free // 16  # what drivers and graphs take beside us
    layers = max(1, Shape(header).number("block_count"))
    each = (footprint.weights + footprint.cells + footprint.recurrent) / layers
    count = int(max(room, 0) / each)
    return -1 if count >= layers else count


class Shape:
    """The hyper-parameters that decide how much memory a model needs."""

    def __init__(self, header: Header) -> None:
        self._metadata = header.metadata
        self._architecture = str(header.metadata.get("general.architecture", ""))
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        self.vocabulary = self.number("vocab_size") or (0 if tokens is None else len(tokens))  # type: ignore[arg-type]
        self.recurrent = self.number("ssm.inner_size") > 0

    def number(self, name: str, otherwise: int = 0) -> int:
        value = self._metadata.get(f"{self._architecture}.{name}", otherwise)
        return int(value) if isinstance(value, int | float) else otherwise

    def per_layer(self, name: str, layers: int) -> list[int]:
        """A number that a file may give once, or once per layer."""
        value = self._metadata.get(f"{self._architecture}.{name}")
        if isinstance(value, np.ndarray):
            return [int(number) for number in value[:layers]]
        return [self.number(name)] * layers

    def attention_layers(self) -> list[tuple[int, int]]:
        """For each layer the elements of keys and of values in one cell; (0, 0) for a recurrent layer."""
        count = self.number("block_count") - self.number("nextn_predict_layers")
        heads = max(self.per_layer("attention.head_count", 1)[0], 1) if count else 1
        default = self.number("embedding_length") // heads
        if latent := self.number("attention.kv_lora_rank"):
            return [(latent + self.number("rope.dimension_count"), 0)] * count
        key, value = self.number("attention.key_length", default), self.number("attention.value_length", default)
        groups = self.per_layer("attention.head_count_kv", count)
        if not any(groups) and not self.recurrent:
            groups = self.per_layer("attention.head_count", count)
        if interval := self.number("full_attention_interval"):
            groups = [number if (layer + 1) % interval == 0 else 0 for layer, number in enumerate(groups)]
        return [(number * key, number * value) for number in groups]

    def cells(self, settings: ContextSettings, layer: int) -> int:
        """Cells that this layer keeps over all sequences."""
        streams = 1 if settings.unified else settings.sequences
        each = padded(settings.cells // streams)
        window = self.number("attention.sliding_window")
        if window and not settings.full_window and self._is_windowed(layer):
            sequences = settings.sequences if settings.unified else 1
            each = min(each, padded(window * sequences + min(settings.ubatch, settings.batch)))
        return each * streams

    def _is_windowed(self, layer: int) -> bool:
        pattern = self._metadata.get(f"{self._architecture}.attention.sliding_window_pattern", 6)
        if isinstance(pattern, np.ndarray):
            return bool(pattern[layer]) if layer < len(pattern) else False
        return (layer + 1) % max(int(pattern), 1) != 0  # type: ignore[arg-type]

    def recurrent_floats(self) -> int:
        """Floats of one recurrent layer's state of one sequence: the convolution's window and the state itself."""
        inner, state = self.number("ssm.inner_size"), self.number("ssm.state_size")
        window = max(self.number("ssm.conv_kernel") - 1, 0)
        return window * (inner + 2 * self.number("ssm.group_count") * state) + state * inner


def padded(cells: int) -> int:
    return -(-cells // PADDING) * PADDING
