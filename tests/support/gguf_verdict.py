"""What `inspect` says to a document."""

from __future__ import annotations

from pathlib import Path

import pytest

from afterglow.errors import InvalidModel
from afterglow.llama.gguf.header import GGUFHeader
from afterglow.llama.gguf.inspection import inspect_file
from afterglow.testing import models
from support.gguf_document import Document, parse


def opened(name: str) -> Document:
    """A tiny model, taken apart."""
    return parse(models.get_path(name).read_bytes())


def passes(document: Document, folder: Path, name: str = "model.gguf") -> GGUFHeader:
    path = folder / name
    path.write_bytes(document.write())
    return inspect_file(path)


def refusal(document: Document, folder: Path, name: str = "model.gguf") -> str:
    """The reason why it is refused."""
    with pytest.raises(InvalidModel) as caught:
        passes(document, folder, name)
    assert caught.value.path == str(folder / name)
    return caught.value.reason
