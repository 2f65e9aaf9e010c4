"""Adapter sets: what is active where in a prompt, and the identity of a set."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.engine.types.adapters import (
    ActiveAdapters,
    LoadedAdapter,
    build_adapter_key,
    build_adapter_set,
    find_last,
    resolve_adapters,
)
from afterglow.engine.types.entries import EntryInterner, strip_labels
from afterglow.errors import InvalidArgument

LOADED = {
    "style": LoadedAdapter(digest="1"),
    "copy": LoadedAdapter(digest="1"),
    "judge": LoadedAdapter(digest="2", invocation_tokens=(5, 6)),
}


@pytest.mark.parametrize(
    ("tokens", "start"),
    [([5, 6, 1, 5, 6, 2], 3), ([5, 5, 6], 1), ([5, 6], 0), ([6, 5], None), ([5], None), ([], None), ([5, 6, 5], 0)],
)
def test_the_last_occurrence_of_the_invocation_counts(tokens, start):
    assert find_last(np.array(tokens, dtype=np.int64), (5, 6)) == start


def test_an_activated_adapter_is_active_from_its_invocation_on():
    requested = (("judge", 1.0), ("style", 0.5))
    active, activated = resolve_adapters(requested, LOADED, np.array([1, 2, 5, 6, 3]))
    assert active == ActiveAdapters(head=(("style", 0.5),), tail=requested, start=2)
    assert activated == (("judge", 1.0),)
    assert [active.find_at(index) for index in (1, 2)] == [(("style", 0.5),), requested]
    inactive, activated = resolve_adapters(requested, LOADED, np.array([1, 2]))
    assert (inactive.head, inactive.tail, activated) == ((("style", 0.5),), (("style", 0.5),), ())


def test_the_key_of_a_set_is_its_content_not_its_names():
    keys = {name: build_adapter_key(((name, 1.0),), LOADED) for name in LOADED}
    assert keys["style"] == keys["copy"] != keys["judge"]
    assert build_adapter_key((("style", 0.5),), LOADED) != keys["style"]
    assert build_adapter_key((), LOADED) == ""


@pytest.mark.parametrize("adapters", [[("a", 1), ("a", 0)], [("a", float("inf"))], [("a", "much")]])
def test_a_wrong_set_is_rejected(adapters):
    with pytest.raises(InvalidArgument, match="lora"):
        build_adapter_set(adapters)


def test_a_label_distinguishes_a_token_in_every_process():
    first, second = EntryInterner(), EntryInterner()
    second.label_token(1, "another label that is interned before")
    entries = [np.array([7, interner.label_token(7, "x"), 8]) for interner in (first, second)]
    assert entries[0][1] != entries[1][1]  # ids are those of a process
    portable = [interner.to_portable_entries(array) for interner, array in zip((first, second), entries, strict=True)]
    assert portable[0].tolist() == portable[1].tolist() != [7, 7, 8]
    assert strip_labels(portable[0]).tolist() == strip_labels(entries[1]).tolist() == [7, 7, 8]
    assert first.count_cells(entries[0]) == first.count_positions(entries[0]) == 3
    other = np.array([7, first.label_token(7, "y"), 8])
    assert first.to_portable_bytes(entries[0]) == second.to_portable_bytes(entries[1]) != first.to_portable_bytes(other)
