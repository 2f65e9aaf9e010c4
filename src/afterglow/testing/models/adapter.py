"""LoRA adapters for the random models of every memory kind, plain and activated (aLoRA)."""

from __future__ import annotations

from pathlib import Path

from afterglow.testing.models.decoder import Decoder
from afterglow.testing.models.vocabulary import get_byte_token
from afterglow.testing.models.writer import FloatArray, ModelWriter

LORA_RANK, LORA_ALPHA = 4, 8.0
ADAPTED_MATRICES = ("attn_q", "attn_qkv", "attn_output", "ssm_in", "ssm_out")
INVOCATION_TEXT = "#!"  # from its last occurrence in a prompt on, an activated adapter is active


class MatrixRecorder(ModelWriter):
    """Writes nothing; collects the names and shapes of the matrices that a decoder would write."""

    def __init__(self) -> None:
        self.seed = 0
        self.shapes: dict[str, tuple[int, int]] = {}

    def add_matrix(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        self.shapes[name] = rows, columns

    def add_tensor(self, name: str, array: FloatArray, *, half: bool = False) -> None:
        """Ignore it."""


def write_adapter(path: Path, *, decoder: Decoder, seed: int, activated: bool = False) -> None:
    """Write an adapter for the input and output matrices of the layers, which clearly changes the logits."""
    recorder = MatrixRecorder()
    decoder.write_blocks(recorder, 1.0)
    with ModelWriter(path, decoder.architecture, seed=seed, kind="adapter") as writer:
        writer.add_metadata("adapter", {"type": "lora", "lora.alpha": LORA_ALPHA})
        if activated:
            tokens = [get_byte_token(byte) for byte in INVOCATION_TEXT.encode()]
            writer.add_uint32_array("adapter.alora.invocation_tokens", tokens)
        for name, (rows, columns) in recorder.shapes.items():
            if name.split(".")[-2] in ADAPTED_MATRICES:  # llama.cpp adds b x a x alpha / rank to it
                writer.add_matrix(f"{name}.lora_a", LORA_RANK, columns)
                writer.add_matrix(f"{name}.lora_b", rows, LORA_RANK)
