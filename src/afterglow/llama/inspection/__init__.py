"""Refuses files on which llama.cpp would abort, hang or take absurd memory.

What passes may still not load, and some of it still aborts: `probe` tries it in a child process.
"""

from __future__ import annotations

import re
from pathlib import Path

from afterglow.llama.header import Header, read_header
from afterglow.llama.inspection.dimensions import check_dimensions
from afterglow.llama.inspection.facts import Facts
from afterglow.llama.inspection.projector import check_adapter, check_projector
from afterglow.llama.inspection.tokens import check_tokens
from afterglow.llama.inspection.weights import check_weights

PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

__all__ = ["inspect"]


def inspect(path: Path) -> Header:
    """Read a file's header and check that what it says can be loaded; `InvalidModel` says what cannot."""
    header = read_header(path)
    facts = Facts(header)
    if _part(facts) > 0:
        return header  # the first part of a split model speaks for the others
    if not facts.architecture:
        facts.fail("it does not say which architecture it has (general.architecture is missing or empty)")
    kind = facts.text("general.type")
    if kind == "adapter":
        check_adapter(facts)
    elif kind == "mmproj" or facts.architecture == "clip":
        check_projector(facts)
    else:
        check_dimensions(facts)
        check_tokens(facts)
    check_weights(facts)
    return header


def _part(facts: Facts) -> int:
    """Which part of a split model this is, from 0. llama.cpp finds the others by this file's name."""
    number, count = facts.short("split.no"), facts.short("split.count")
    if count > 1:
        name = PART.search(facts.header.path.name)
        if name is None or (int(name[1]), int(name[2])) != (number + 1, count):
            facts.fail(
                f"it is part {number + 1} of {count}, its name should end in -{number + 1:05}-of-{count:05}.gguf"
            )
    return number if count > 1 else 0
