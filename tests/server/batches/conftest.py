"""A server of its own for batches: it stores files, and its counters must not be those of other tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from afterglow.testing import models
from support.server_process import ServerProcess


@pytest.fixture(scope="module")
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def batch_server(caches_of_our_own: None, data_directory: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(
        f"tiny={models.get_path('successor-attention')}",
        f"vectors={models.get_path('embedding')}",
        *("--context", "2048", "--sequences", "4", "--max-batch-lines", "600", "--max-file-bytes", "2MiB"),
        AFTERGLOW_DATA=str(data_directory),
    )
    yield process
    process.stop()
