"""The prefetcher holds files in the RAM budget, and not those of cancelled requests."""

from __future__ import annotations

import time

import pytest

from afterglow.engine.kvcache.disk import prefetch
from afterglow.engine.kvcache.disk.files import LoadedFile
from afterglow.engine.kvcache.disk.prefetch import FileKey, Prefetcher
from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.types.settings import EngineSettings
from support.play import fake

SIZES: dict[FileKey, int] = {("cells", bytes([number]) * 32): 100 for number in range(5)}


@pytest.fixture
def loads() -> list[bytes]:
    return []


@pytest.fixture
def ram() -> RamTier:
    """RAM tier with space for two files."""
    return fake("attention", EngineSettings(ram_cache_bytes=250)).prefix_cache.store.ram


@pytest.fixture
def prefetcher(loads: list[bytes], ram: RamTier) -> Prefetcher:
    class Reader:
        def load(self, kind: str, key: bytes) -> LoadedFile:
            loads.append(key)
            return LoadedFile(None, memoryview(key))  # type: ignore[arg-type]

    return Prefetcher(Reader(), ram)


def wait(prefetcher: Prefetcher, sizes: dict[FileKey, int]) -> None:
    while prefetcher.submit(sizes):
        time.sleep(0.001)


def test_files_beyond_the_ram_budget_are_read_but_not_held(
    prefetcher: Prefetcher, loads: list[bytes], ram: RamTier
) -> None:
    wait(prefetcher, SIZES)
    assert ram.budget.by_kind == {"prefetch": 200}
    assert len(loads) == 5, "all are in the page cache now"
    held = [prefetcher.pop(*file_key) for file_key in SIZES]
    assert [item is not None for item in held] == [True, True, False, False, False]
    assert ram.budget.used_bytes == 0
    wait(prefetcher, SIZES)
    assert len(loads) == 10


def test_files_that_no_request_waits_for_are_dropped(
    prefetcher: Prefetcher, ram: RamTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = SIZES.items()
    wait(prefetcher, dict([first]))
    monkeypatch.setattr(prefetch, "STALE_AFTER_SECONDS", 0.2)
    time.sleep(0.3)
    wait(prefetcher, dict(others[:1]))
    prefetcher.drop_stale()
    assert ram.budget.get("prefetch") == 100
    assert prefetcher.pop(*first[0]) is None
