"""Projector files (pictures and sound): llama.cpp reads their numbers unchecked, and aborts on a stored type."""

from __future__ import annotations

from afterglow.llama.inspection.facts import Facts


def check_projector(facts: Facts) -> None:
    pass
