"""SmolLM2, loaded once for each file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import afterglow
from support.greedy import load_greedy


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[afterglow.Model]:
    with load_greedy(smollm2, context=4096) as model:
        yield model
