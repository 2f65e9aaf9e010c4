"""What `inspect` says to a document."""

from __future__ import annotations

from pathlib import Path

import pytest
from document import Document, parse

from afterglow import tiny
from afterglow.errors import InvalidModel
from afterglow.llama.header import Header
from afterglow.llama.inspection import inspect


def opened(name: str) -> Document:
    """A tiny model, taken apart."""
    return parse(tiny.path(name).read_bytes())


def passes(document: Document, folder: Path, name: str = "model.gguf") -> Header:
    path = folder / name
    path.write_bytes(document.write())
    return inspect(path)


def refusal(document: Document, folder: Path, name: str = "model.gguf") -> str:
    """The reason why it is refused."""
    with pytest.raises(InvalidModel) as caught:
        passes(document, folder, name)
    assert caught.value.path == str(folder / name)
    return caught.value.reason
