"""Refuses files on which llama.cpp would abort, hang or take absurd memory.

What passes may still not load, and some of it still aborts: `probe` tries it in a child process.
"""

from __future__ import annotations

import re
from pathlib import Path

from afterglow.llama.gguf.header import GGUFHeader, read_header
from afterglow.llama.gguf.inspection.dimensions import check_dimensions
from afterglow.llama.gguf.inspection.metadata import MetadataReader
from afterglow.llama.gguf.inspection.projector import check_adapter, check_projector
from afterglow.llama.gguf.inspection.tokens import check_tokens
from afterglow.llama.gguf.inspection.weights import check_weights

SPLIT_FILE_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

__all__ = ["inspect_file"]


def inspect_file(path: Path) -> GGUFHeader:
    """Read a file's header and check that what it says can be loaded; `InvalidModel` says what cannot."""
    header = read_header(path)
    facts = MetadataReader(header)
    if _get_split_index(facts) > 0:
        return header  # the first part of a split model speaks for the others
    if not facts.architecture:
        facts.fail("it does not say which architecture it has (general.architecture is missing or empty)")
    kind = facts.get_string("general.type")
    if kind == "adapter":
        check_adapter(facts)
    elif kind == "mmproj" or facts.architecture == "clip":
        check_projector(facts)
    else:
        check_dimensions(facts)
        check_tokens(facts)
    check_weights(facts)
    return header


def _get_split_index(metadata: MetadataReader) -> int:
    """Which part of a split model this is, from 0. llama.cpp finds the others by this file's name."""
    number, count = metadata.get_uint16("split.no"), metadata.get_uint16("split.count")
    if count > 1:
        name = SPLIT_FILE_NAME.search(metadata.header.path.name)
        if name is None or (int(name[1]), int(name[2])) != (number + 1, count):
            metadata.fail(
                f"it is part {number + 1} of {count}, its name should end in -{number + 1:05}-of-{count:05}.gguf"
            )
    return number if count > 1 else 0
