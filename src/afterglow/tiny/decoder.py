"""What all tiny text models have in common: a vocabulary, a table at each end, and blocks in between.

It knows the tensors outside the blocks. What a block is, an architecture says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol

from afterglow.tiny import vocabulary
from afterglow.tiny.writer import Value, Writer

CONTEXT_LENGTH = 4096


class Decoder(Protocol):
    """An architecture with its sizes."""

    architecture: ClassVar[str]

    @property
    def embedding(self) -> int:
        """The width of the residual stream."""

    @property
    def embedding_gain(self) -> float:
        """By how much llama.cpp multiplies the rows of the embedding table."""

    def settings(self) -> Mapping[str, Value]:
        """The architecture's own metadata, without its prefix."""

    def blocks(self, writer: Writer, gain: float) -> None:
        """Add all blocks; `gain` is how loudly they speak into the residual stream.

        With a gain of zero they still compute keys, values and states from their input, and add nothing.
        """


@contextmanager
def text_model(path: Path, decoder: Decoder, *, seed: int) -> Iterator[Writer]:
    """A writer that has the vocabulary and all settings; the caller adds the tensors."""
    with Writer(path, decoder.architecture, seed=seed) as writer:
        vocabulary.describe(writer)
        common = {
            "context_length": CONTEXT_LENGTH,
            "embedding_length": decoder.embedding,
            "vocab_size": vocabulary.SIZE,
        }
        writer.settings(decoder.architecture, {**common, **decoder.settings()})
        yield writer


def write_random(path: Path, decoder: Decoder, *, seed: int) -> None:
    """Write a model of noise: its text means nothing, and every logit depends on the whole past."""
    with text_model(path, decoder, seed=seed) as writer:
        writer.noise("token_embd.weight", vocabulary.SIZE, decoder.embedding, scale=1.0 / decoder.embedding_gain)
        writer.constant("output_norm.weight", 1.0, decoder.embedding)
        writer.matrix("output.weight", vocabulary.SIZE, decoder.embedding)
        decoder.blocks(writer, gain=1.0)
