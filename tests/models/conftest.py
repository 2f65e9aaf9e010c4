"""SmolLM2, loaded once for each file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import afterglow


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[afterglow.Model]:
    with afterglow.load(smollm2, context=4096) as model:
        yield model
