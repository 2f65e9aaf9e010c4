"""Conversations in a disk tier directory: list, pin, clear, nearest prefix."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.inspect import cache, disk
from afterglow.engine.kvcache.disk.index import open_index
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from support.play import ask, fake, prompt

pytestmark = pytest.mark.slow


def flush(engine: Engine) -> None:
    """Run all idle tasks and write everything to disk."""
    while engine.run_idle_task():
        pass
    assert engine.prefix_cache.store.disk_tier.writer.flush()


@pytest.mark.parametrize("kind", ["attention", "hybrid", "recurrent"])
def test_the_conversations_of_a_directory_are_listed(build_engine, folder, kind):
    engine = build_engine(kind)
    for last in (10, 11):
        ask(engine, prompt(80, 1) + prompt(40, last))
    engine.close()
    conversations = disk.list_conversations(folder)
    assert len(conversations) == 2
    assert {stored.first_entries[:80] for stored in conversations} == {tuple(prompt(80, 1))}
    assert all(stored.entries >= 120 and stored.idle_seconds < 60 and not stored.pinned for stored in conversations)
    assert sum(stored.nbytes for stored in conversations) == cache.list_stored_models(folder)[0].nbytes
    engine = build_engine(kind)
    ask(engine, prompt(80, 1) + prompt(40, 10) + [5])
    engine.prefix_cache.store.disk_tier.writer.flush()
    best = max(disk.list_conversations(folder), key=lambda stored: stored.hits)
    assert best.hits == 1
    assert best.seconds_saved > 0


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_pinned_conversation_is_not_evicted_from_disk(build_engine, folder, kind):
    engine = build_engine(kind)
    ask(engine, prompt(60, 1), boundaries=frozenset({40}))
    engine.close()
    (first,) = disk.list_conversations(folder)
    disk.pin(folder, first.id[:6])
    assert disk.list_conversations(folder)[0].pinned
    small = EngineSettings(
        block_size=8, ram_cache_bytes=10**7, disk_cache_directory=folder, disk_cache_bytes=int(first.nbytes * 2.5)
    )
    engine = fake(kind, small)
    for number in range(2, 8):
        ask(engine, prompt(60, number))
        flush(engine)
    engine.close()
    assert first.id in {stored.id for stored in disk.list_conversations(folder)}
    assert ask(build_engine(kind), [*prompt(40, 1), 5]).cached == 40
    disk.pin(folder, first.id, pinned=False)
    assert not any(stored.pinned for stored in disk.list_conversations(folder))
    with pytest.raises(InvalidArgument, match="no conversation"):
        disk.pin(folder, "fff0fff")


def test_unpinning_keeps_blocks_pinned_by_another_conversation(build_engine, folder):
    engine = build_engine()
    for last in (10, 11):
        ask(engine, prompt(80, 1) + prompt(40, last))
    engine.close()
    first, second = (stored.id for stored in disk.list_conversations(folder))
    disk.pin(folder, first)
    disk.pin(folder, second)
    disk.pin(folder, first, pinned=False)
    with open_index(folder) as index:
        assert sum(row.pinned for row in index.list_rows()) == 18  # blocks of 80 shared entries and 51 others, logits


def test_a_directory_is_cleared_by_model(store_conversation, folder):
    model = store_conversation()
    store_conversation("hybrid")
    assert disk.clear(folder, [model]) > 0
    (remaining,) = cache.list_stored_models(folder)
    assert remaining.model != model
    assert disk.clear(folder) == remaining.nbytes
    assert cache.list_stored_models(folder) == []


@pytest.mark.parametrize(("kind", "reused"), [("attention", 50), ("hybrid", 40), ("recurrent", 40)])
def test_the_nearest_prefix_is_found_without_an_engine(store_conversation, folder, kind, reused):
    model = store_conversation(kind)
    entries = np.array(prompt(50, 1) + prompt(9, 9))
    nearest = disk.find_nearest(folder, [model], entries)
    assert (nearest.explanation.reused_entries, nearest.explanation.shared_entries) == (reused, 50)
    assert nearest.cached_entries[:10] == tuple(prompt(60, 1)[50:])
    assert disk.find_nearest(folder, ["0" * 64], entries).explanation.cause == "nothing in common"
