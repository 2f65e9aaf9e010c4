"""Entries: media ids, cell and position counts, and the growing buffer."""

from __future__ import annotations

import numpy as np

from afterglow.engine.types.entries import EntryBuffer, EntryInterner, Media


def test_media_are_single_entries_with_their_own_cells_and_positions():
    interner = EntryInterner()
    cat, dog = Media(b"a", cells=256, positions=16), Media(b"b", cells=256, positions=16)
    entries = interner.intern([1, 2, cat, 3, cat, dog])
    assert entries[2] == entries[4] != entries[5]
    assert entries[2] < 0
    assert interner.count_cells(entries) == 3 + 3 * 256
    assert interner.count_positions(entries) == 3 + 3 * 16
    assert interner.get_media(int(entries[5])) is dog


def test_entry_buffer_grows_and_shrinks_without_losing_entries():
    buffer = EntryBuffer()
    for entry in range(500):
        buffer.append(entry)
    buffer.extend(np.arange(500, 2000, dtype=np.int64))
    buffer.truncate(1500)
    buffer.append(7)
    assert len(buffer) == 1501
    assert list(buffer.entries[:1500]) == list(range(1500))
    assert buffer.entries[1500] == 7
