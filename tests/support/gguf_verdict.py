"""Runs `inspect_file` on documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from afterglow.errors import InvalidModel
from afterglow.llama.gguf.header import GGUFHeader
from afterglow.llama.gguf.inspection import inspect_file
from afterglow.testing import models
from support.gguf_document import Document, parse_document


def open_document(name: str) -> Document:
    """Parse a tiny model."""
    return parse_document(models.get_path(name).read_bytes())


def inspect_document(document: Document, folder: Path, name: str = "model.gguf") -> GGUFHeader:
    path = folder / name
    path.write_bytes(document.to_bytes())
    return inspect_file(path)


def get_rejection(document: Document, folder: Path, name: str = "model.gguf") -> str:
    """Return the reason why the document is rejected."""
    with pytest.raises(InvalidModel) as caught:
        inspect_document(document, folder, name)
    assert caught.value.path == str(folder / name)
    return caught.value.reason
