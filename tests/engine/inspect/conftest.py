"""Engines on fake backends with a disk tier in a temporary directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.types.settings import EngineSettings
from support.play import ask, fake, prompt

BuildEngine = Callable[..., Engine]
StoreConversation = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefix"


@pytest.fixture
def build_engine(folder: Path) -> Iterator[BuildEngine]:
    with ExitStack() as stack:

        def build(kind: str = "attention", directory: Path = folder, **options) -> Engine:
            settings = EngineSettings(
                block_size=8, ram_cache_bytes=10**7, disk_cache_directory=directory, disk_cache_label="a fake"
            )
            engine = fake(kind, settings, **options)
            stack.callback(engine.prefix_cache.store.close)
            return engine

        yield build


@pytest.fixture
def store_conversation(build_engine: BuildEngine) -> StoreConversation:
    """Returns a function that stores a conversation of 71 entries, with a checkpoint at 40, and returns its model."""

    def store(kind: str = "attention") -> str:
        engine = build_engine(kind)
        ask(engine, prompt(60, 1), boundaries=frozenset({40}))
        engine.close()
        return engine.prefix_cache.store.hasher.model.hex()

    return store
