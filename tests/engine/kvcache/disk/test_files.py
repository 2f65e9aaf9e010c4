"""Cache files: they are read, not mapped; a file that is damaged, foreign or changed meanwhile is an error."""

from __future__ import annotations

import math
import os
import stat
import struct
import subprocess
import sys
import time
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from afterglow.engine.kvcache.disk import files as disk_files
from afterglow.engine.kvcache.disk.files import CacheFile
from afterglow.errors import InvalidState

pytestmark = pytest.mark.slow

BLOCK = CacheFile(
    kind="cells",
    model=b"m" * 32,
    key=b"k" * 32,
    parent=b"p" * 32,
    start=0,
    entries=np.arange(64),
    cells=64,
    seconds=1.0,
    value=1.0,
    layout=b"layout",
    payload=[bytes(range(256)) * 1024],
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    disk_files.write_file(tmp_path, BLOCK)
    return tmp_path / BLOCK.name


def test_a_file_is_read_as_it_was_written(path: Path) -> None:
    loaded = disk_files.load_file(path)
    assert bytes(loaded.payload) == BLOCK.payload[0]
    assert (loaded.file.key, loaded.file.layout, loaded.file.entries.tolist()) == (b"k" * 32, b"layout", [*range(64)])
    assert loaded.to_rows().shape == (64, 4096)


TRUNCATE_AND_USE = """
import os, sys
from pathlib import Path
from afterglow.engine.kvcache.disk import files
loaded = files.load_file(Path(sys.argv[1]))
os.truncate(sys.argv[1], 0)
print(int(loaded.to_rows().sum()))
"""


def test_a_file_truncated_after_it_was_loaded_does_not_end_the_process(path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", TRUNCATE_AND_USE, str(path)], capture_output=True, text=True)
    assert (child.returncode, child.stdout.strip()) == (0, str(sum(BLOCK.payload[0]))), child.stderr


def test_a_file_truncated_while_it_is_read_is_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_header = disk_files._read_header

    def read_header_and_truncate(file: FileIO, size: int) -> tuple[bytes, CacheFile, int]:
        result = read_header(file, size)
        os.truncate(path, 1000)
        return result

    monkeypatch.setattr(disk_files, "_read_header", read_header_and_truncate)
    with pytest.raises(InvalidState, match="ended while"):
        disk_files.load_file(path)


def test_a_named_pipe_in_place_of_a_file_is_rejected_at_once(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidState, match="regular"):
        disk_files.load_file(path)


@pytest.mark.parametrize(("field", "value"), [(9, float("nan")), (9, float("inf")), (4, 2**63), (6, 2**64 - 1)])
def test_a_header_that_the_index_cannot_hold_is_rejected(path: Path, field: int, value: float) -> None:
    data = bytearray(path.read_bytes())
    fields = list(disk_files.HEADER.unpack_from(data, disk_files.HEADER_OFFSET_BYTES))
    fields[field] = value
    struct.pack_into(disk_files.HEADER.format, data, disk_files.HEADER_OFFSET_BYTES, *fields)
    path.write_bytes(data)
    with pytest.raises(InvalidState):
        disk_files.read_header(path)


def test_the_attributes_of_a_file_say_until_when_it_is_pinned(path: Path) -> None:
    assert disk_files.read_header(path)[0].pinned_until == 0
    for until in (math.inf, time.time() // 1 + 3600):
        disk_files.write_pin(path, until)
        assert disk_files.read_header(path)[0].pinned_until == until
        assert bytes(disk_files.load_file(path).payload) == BLOCK.payload[0]
        disk_files.write_file(path.parent, replace(BLOCK, pinned_until=until))  # replaces one that is write-protected
        assert disk_files.read_header(path)[0].pinned_until == until
    for until in (0.0, time.time() - 1):
        disk_files.write_pin(path, until)
        assert disk_files.read_header(path)[0].pinned_until == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
