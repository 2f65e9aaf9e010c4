"""Models whose responses are repeatable: greedy unless a request says otherwise."""

from __future__ import annotations

import os
from typing import Any

import afterglow


def load_greedy(model: str | os.PathLike[str], **options: Any) -> afterglow.Model:
    """Load a model with a default temperature of 0."""
    return afterglow.load(model, sampling_defaults={"temperature": 0}, **options)
