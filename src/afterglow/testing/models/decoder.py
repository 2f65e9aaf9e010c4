"""Common part of all tiny text models: vocabulary, token embedding, output matrix. A `Decoder` writes the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol

from afterglow.testing.models import vocabulary
from afterglow.testing.models.writer import MetadataInput, ModelWriter

CONTEXT_LENGTH_TOKENS = 4096


class Decoder(Protocol):
    """An architecture and its sizes."""

    architecture: ClassVar[str]

    @property
    def embedding_length(self) -> int:
        """The width of the residual stream."""

    @property
    def embedding_gain(self) -> float:
        """Factor by which llama.cpp multiplies the rows of the embedding table."""

    def build_metadata(self) -> Mapping[str, MetadataInput]:
        """Return the architecture's metadata, without its prefix."""

    def write_blocks(self, writer: ModelWriter, gain: float) -> None:
        """Write all blocks; `gain` scales what they add to the residual stream.

        With a gain of zero they compute keys, values and states from their input but add nothing.
        """


@contextmanager
def open_text_model_writer(path: Path, decoder: Decoder, *, seed: int) -> Iterator[ModelWriter]:
    """Open a writer with the vocabulary and all metadata; the caller adds the tensors."""
    with ModelWriter(path, decoder.architecture, seed=seed) as writer:
        vocabulary.write_tokenizer(writer)
        common = {
            "context_length": CONTEXT_LENGTH_TOKENS,
            "embedding_length": decoder.embedding_length,
            "vocab_size": vocabulary.VOCABULARY_SIZE,
        }
        writer.add_metadata(decoder.architecture, {**common, **decoder.build_metadata()})
        yield writer


def write_random_model(path: Path, decoder: Decoder, *, seed: int) -> None:
    """Write a model of random weights: every logit depends on the whole context."""
    with open_text_model_writer(path, decoder, seed=seed) as writer:
        writer.add_noise(
            "token_embd.weight",
            vocabulary.VOCABULARY_SIZE,
            decoder.embedding_length,
            scale=1.0 / decoder.embedding_gain,
        )
        writer.add_constant("output_norm.weight", 1.0, decoder.embedding_length)
        writer.add_matrix("output.weight", vocabulary.VOCABULARY_SIZE, decoder.embedding_length)
        decoder.write_blocks(writer, gain=1.0)
