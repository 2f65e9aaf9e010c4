"""Model files with sampling values of their own, as converters write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from afterglow.testing.models import constructed, vocabulary
from afterglow.testing.models.attention import Llama
from afterglow.testing.models.writer import ModelWriter


def write_model_with_sampling(path: Path, values: Mapping[str, float]) -> Path:
    """Write a model that follows the cycle, with `general.sampling.*`, and return its path."""
    write_tokenizer = vocabulary.write_tokenizer

    def write_tokenizer_and_sampling(writer: ModelWriter) -> None:
        write_tokenizer(writer)
        writer.add_metadata("general.sampling", values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "write_tokenizer", write_tokenizer_and_sampling)
        constructed.write_successor_model(path, Llama())
    return path
