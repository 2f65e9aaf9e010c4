"""The prefetcher holds at most a number of bytes, and not those of cancelled requests."""

from __future__ import annotations

import time

import pytest

from afterglow.engine.kvcache.disk import prefetch
from afterglow.engine.kvcache.disk.files import LoadedFile
from afterglow.engine.kvcache.disk.prefetch import FileKey, Prefetcher

SIZES: dict[FileKey, int] = {("cells", bytes([number]) * 32): 100 for number in range(5)}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    monkeypatch.setattr(prefetch, "MAX_HELD_BYTES", 250)
    return []


@pytest.fixture
def prefetcher(loads: list[bytes]) -> Prefetcher:
    def load(kind: str, key: bytes) -> LoadedFile:
        loads.append(key)
        return LoadedFile(None, memoryview(key))  # type: ignore[arg-type]

    return Prefetcher(load)


def wait(prefetcher: Prefetcher, sizes: dict[FileKey, int]) -> None:
    while prefetcher.submit(sizes):
        time.sleep(0.001)


def test_files_beyond_the_limit_are_read_but_not_held(prefetcher: Prefetcher, loads: list[bytes]) -> None:
    wait(prefetcher, SIZES)
    assert len(loads) == 5, "all are in the page cache now"
    held = [prefetcher.pop(*file_key) for file_key in SIZES]
    assert [item is not None for item in held] == [True, True, False, False, False]
    wait(prefetcher, SIZES)
    assert len(loads) == 10


def test_files_that_no_request_waits_for_are_dropped(
    prefetcher: Prefetcher, loads: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = SIZES.items()
    wait(prefetcher, dict([first]))
    monkeypatch.setattr(prefetch, "STALE_AFTER_SECONDS", 0.2)
    time.sleep(0.3)
    wait(prefetcher, dict(others))
    assert prefetcher.pop(*first[0]) is None
