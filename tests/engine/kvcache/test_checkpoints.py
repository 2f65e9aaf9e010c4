"""C3, C4, C5: where checkpoints are taken, which are dropped, and that the prefill pauses at their positions."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.engine.kvcache.checkpoints import choose_checkpoint_positions
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import InvalidArgument
from support.play import ask, fake, prompt

DEFAULTS = CheckpointSettings()


def choose_positions(length, boundaries=(), existing=(), ubatch=512, **settings):
    return choose_checkpoint_positions(length, boundaries, existing, ubatch, CheckpointSettings(**settings))


def test_c4_default_settings_are_the_documented_ones():
    assert (DEFAULTS.max_checkpoints, DEFAULTS.every_n_tokens, DEFAULTS.min_tokens, DEFAULTS.min_gap) == (
        8,
        8192,
        64,
        64,
    )


def test_c4_tail_positions_are_4_and_4_plus_a_ubatch_before_the_end():
    assert choose_positions(2000) == [2000 - 4 - 512, 2000 - 4]
    assert choose_positions(2000, ubatch=128) == [2000 - 4 - 128, 2000 - 4]


def test_c4_tail_positions_respect_the_minimum_length_and_gap():
    assert choose_positions(67) == []  # 63 is too early
    assert choose_positions(68) == [64]
    assert choose_positions(500, ubatch=32) == [496]  # 464 is too close to 496
    assert choose_positions(500, boundaries=[450]) == [450]  # 496 is too close to the message boundary
    assert choose_positions(500, boundaries=[450], min_gap=10) == [450, 496]


def test_c4_regular_positions_are_every_n_tokens():
    assert choose_positions(20_000) == [8192, 16_384, 20_000 - 516, 20_000 - 4]
    assert choose_positions(20_000, every_n_tokens=0) == [20_000 - 516, 20_000 - 4]


def test_c4_message_boundaries_are_always_checkpoint_positions():
    assert choose_positions(60, boundaries=[10, 20, 59]) == [10, 20, 59]
    assert choose_positions(60, boundaries=[0, 60, 70]) == []  # not at the start, the end, or after the end


def test_c4_zero_max_checkpoints_disables_checkpoints():
    assert choose_positions(20_000, boundaries=[10, 5000], max_checkpoints=0) == []


def test_c4_existing_checkpoints_are_not_taken_again():
    assert choose_positions(2000, boundaries=[300, 600], existing=[300, 1996]) == [600, 1484]


@pytest.mark.parametrize("name", ["max_checkpoints", "every_n_tokens", "min_tokens", "min_gap", "max_bytes"])
def test_c4_a_negative_setting_raises(name):
    with pytest.raises(InvalidArgument):
        CheckpointSettings(**{name: -1})


@pytest.mark.parametrize("kind", ["window", "recurrent", "hybrid"])
def test_c4_the_prefill_pauses_at_checkpoint_positions(kind):
    """Trap 2: checkpoints near the end are never taken if the prefill is split only by batch size."""
    engine = fake(kind, batch_cells=512, cells_per_sequence=4096)
    ask(engine, prompt(2000, 1), boundaries=frozenset({700}), max_tokens=1)
    positions = [checkpoint.position for checkpoint in engine.prefix_cache.all_checkpoints]
    assert positions == [700, 2000 - 516, 2000 - 4, 2000]
    ends = []
    for spans in engine.backend.decode_history:
        ends.append((ends[-1] if ends else 0) + spans[0][1])
    assert {700, 1484, 1996} <= set(ends)


def test_c2_attention_models_take_no_checkpoints():
    engine = fake("attention", batch_cells=512, cells_per_sequence=4096)
    ask(engine, prompt(2000, 1), boundaries=frozenset({700}), max_tokens=1)
    assert engine.prefix_cache.all_checkpoints == []


@pytest.mark.parametrize("kind", ["window", "recurrent", "hybrid"])
def test_c5_the_deepest_checkpoint_within_the_common_prefix_is_restored(kind):
    engine = fake(kind, batch_cells=512, cells_per_sequence=4096, sequences=1)
    entries = prompt(400, 1)
    ask(engine, entries, boundaries=frozenset({100, 200, 300}), max_tokens=1)
    edited = entries[:250] + prompt(60, 2)
    assert ask(engine, edited, max_tokens=1).cached == 200
    positions = sorted(checkpoint.position for checkpoint in engine.prefix_cache.all_checkpoints)
    assert [position for position in positions if position in (100, 200)] == [100, 200]
    assert 300 in positions  # that branch was evicted from the device, and is stored
    engine.prefix_cache.clear_store()
    remaining = {checkpoint.position for checkpoint in engine.prefix_cache.all_checkpoints}
    assert 300 not in remaining  # its checkpoints are dropped with it


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_c2_a_pure_extension_is_cached_without_checkpoints(kind):
    settings = EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=0))
    engine = fake(kind, settings)
    first = ask(engine, prompt(40, 1))
    assert ask(engine, prompt(40, 1) + first.tokens + [5, 6]).cached == 40 + len(first.tokens) - 1
    assert ask(engine, prompt(30, 1)).cached == 0  # a shorter prompt is computed from its start


def test_c4_a_checkpoint_position_right_after_the_cached_prefix_needs_no_extra_decode():
    engine = fake("hybrid")
    first = prompt(200)
    answer = ask(engine, first, max_tokens=8)
    turn = [*first, *answer.tokens, *prompt(60, seed=1)]
    cached = len(next(slot for slot in engine.prefix_cache.slots if len(slot)))
    before = engine.counters.decodes
    assert ask(engine, turn, boundaries=frozenset({cached + 5}), max_tokens=1).cached == cached
    assert engine.counters.decodes - before == 1  # none for the message boundary
    assert cached in {checkpoint.position for checkpoint in engine.prefix_cache.all_checkpoints}
    edited = [*turn[: cached + 5], *prompt(40, seed=2)]
    assert ask(engine, edited, max_tokens=1).cached == cached


def test_orphaned_checkpoints_are_searched_only_after_entries_were_dropped(monkeypatch):
    engine = fake("hybrid", sequences=2)
    checked = []
    has_cells_for = engine.prefix_cache._has_cells_for
    monkeypatch.setattr(
        engine.prefix_cache,
        "_has_cells_for",
        lambda checkpoint: checked.append(checkpoint) or has_cells_for(checkpoint),
    )
    first = prompt(200)
    answer = ask(engine, first, boundaries=frozenset({100}), max_tokens=8)
    assert engine.prefix_cache.all_checkpoints
    ask(engine, [*first, *answer.tokens, *prompt(30, seed=1)], max_tokens=1)
    assert checked == []  # the conversation was only extended
    engine.prefix_cache.discard(next(slot for slot in engine.prefix_cache.slots if len(slot)))
    assert checked
    assert engine.prefix_cache.all_checkpoints == []


def test_checkpoints_with_stored_cells_are_searched_for_again_only_after_a_loss(monkeypatch):
    engine = fake("hybrid", EngineSettings(block_size=8, ram_cache_bytes=10**8), sequences=1)
    cache, searched = engine.prefix_cache, []
    has_path = cache.store.tree.has_path
    monkeypatch.setattr(cache.store.tree, "has_path", lambda *path: searched.append(path) or has_path(*path))
    for seed in range(4):  # each takes the only sequence
        ask(engine, prompt(120, seed), boundaries=frozenset({64}), max_tokens=1)
    count = len(searched)
    ask(engine, prompt(120, 9), max_tokens=1)
    assert len(cache.all_checkpoints) > 4
    assert len(searched) - count <= 4  # of the sequence that was evicted, and of the new one
    cache.store.tree.remove(cache.store.tree.get(searched[0][0]))
    count = len(searched)
    ask(engine, prompt(120, 10), max_tokens=1)
    assert len(searched) - count > 4


def test_checkpoints_are_dropped_with_the_stored_cells_before_them():
    """Also if, at that time, the only conversation on the device is extended and drops nothing."""
    engine = fake("hybrid", EngineSettings(block_size=8, ram_cache_bytes=10**8), sequences=1)
    ask(engine, prompt(120, 1), boundaries=frozenset({64}), max_tokens=1)
    extended = prompt(120, 2)
    extended += ask(engine, extended, max_tokens=4).tokens  # takes the only sequence
    stored = np.array(prompt(120, 1))
    assert list(engine.prefix_cache.checkpoints.find_on_path(stored, ""))
    engine.prefix_cache.store.clear()
    ask(engine, extended + prompt(90, 3), boundaries=frozenset({180}), max_tokens=1)
    assert list(engine.prefix_cache.checkpoints.find_on_path(stored, "")) == []
