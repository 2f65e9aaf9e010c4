"""C3, C4 and C5: where checkpoints are taken, which are kept, and that the prefill is really cut there."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from afterglow.engine.kvcache.checkpoints import choose_checkpoint_positions, choose_positions_to_drop
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import InvalidArgument
from support.play import ask, fake, prompt

DEFAULTS = CheckpointSettings()


def cuts(length, boundaries=(), taken=(), ubatch=512, **settings):
    return choose_checkpoint_positions(length, boundaries, taken, ubatch, CheckpointSettings(**settings))


def test_c4_the_defaults_are_the_documented_ones():
    assert (DEFAULTS.max_checkpoints, DEFAULTS.every_n_tokens, DEFAULTS.min_tokens, DEFAULTS.min_gap) == (
        8,
        8192,
        64,
        64,
    )


def test_c4_near_the_end_cuts_fall_4_and_4_plus_a_ubatch_before_it():
    assert cuts(2000) == [2000 - 4 - 512, 2000 - 4]
    assert cuts(2000, ubatch=128) == [2000 - 4 - 128, 2000 - 4]


def test_c4_near_the_end_cuts_keep_the_minimum_length_and_gap():
    assert cuts(67) == []  # 63 is too early
    assert cuts(68) == [64]
    assert cuts(500, ubatch=32) == [496]  # 464 is too close to 496
    assert cuts(500, boundaries=[450]) == [450]  # 496 is too close to the message's end
    assert cuts(500, boundaries=[450], min_gap=10) == [450, 496]


def test_c4_the_cadence_cuts_every_n_tokens():
    assert cuts(20_000) == [8192, 16_384, 20_000 - 516, 20_000 - 4]
    assert cuts(20_000, every_n_tokens=0) == [20_000 - 516, 20_000 - 4]


def test_c4_the_ends_of_messages_are_always_cut():
    assert cuts(60, boundaries=[10, 20, 59]) == [10, 20, 59]
    assert cuts(60, boundaries=[0, 60, 70]) == []  # not at the beginning, not at the end, not behind it


def test_c4_zero_checkpoints_is_off():
    assert cuts(20_000, boundaries=[10, 5000], max_checkpoints=0) == []


def test_c4_what_is_taken_is_not_taken_again():
    assert cuts(2000, boundaries=[300, 600], taken=[300, 1996]) == [600, 1484]


@pytest.mark.parametrize("name", ["max_checkpoints", "every_n_tokens", "min_tokens", "min_gap", "max_bytes"])
def test_c4_a_negative_setting_is_refused(name):
    with pytest.raises(InvalidArgument):
        CheckpointSettings(**{name: -1})


def test_c3_thinning_keeps_the_first_the_newest_and_thins_the_old():
    depths = list(range(100, 1700, 100))
    gone = choose_positions_to_drop(depths, 8)
    kept = [depth for depth in depths if depth not in gone]
    assert len(kept) == 8
    assert kept[0] == 100
    assert kept[-2:] == [1500, 1600]
    gaps = [second - first for first, second in itertools.pairwise(kept)]
    assert max(gaps[:4]) > max(gaps[-3:])  # the old are sparse, the recent dense


def test_c3_the_oldest_goes_when_only_one_may_stay():
    assert choose_positions_to_drop([10, 20, 30], 1) == [20, 10]
    assert choose_positions_to_drop([10, 20, 30], 3) == []


@pytest.mark.parametrize("kind", ["window", "recurrent", "hybrid"])
def test_c4_the_prefill_is_really_cut_where_a_checkpoint_is_taken(kind):
    """Trap 2: near-end checkpoints that never fire, because prefill is cut only at the batch."""
    engine = fake(kind, batch_cells=512, cells=4096)
    ask(engine, prompt(2000, 1), boundaries=frozenset({700}), max_tokens=1)
    assert [checkpoint.position for checkpoint in engine.prefix_cache.all_checkpoints] == [700, 2000 - 516, 2000 - 4]
    ends = []
    for spans in engine.backend.history:
        ends.append((ends[-1] if ends else 0) + spans[0][1])
    assert {700, 1484, 1996} <= set(ends)


def test_c2_attention_needs_no_checkpoints_and_takes_none():
    engine = fake("attention", batch_cells=512, cells=4096)
    ask(engine, prompt(2000, 1), boundaries=frozenset({700}), max_tokens=1)
    assert engine.prefix_cache.all_checkpoints == []


@pytest.mark.parametrize("kind", ["window", "recurrent", "hybrid"])
def test_c5_the_newest_checkpoint_within_the_common_prefix_is_restored(kind):
    engine = fake(kind, batch_cells=512, cells=4096, sequences=1)
    entries = prompt(400, 1)
    ask(engine, entries, boundaries=frozenset({100, 200, 300}), max_tokens=1)
    edited = entries[:250] + prompt(50, 2)
    assert ask(engine, edited, max_tokens=1).cached == 200
    depths = sorted(checkpoint.position for checkpoint in engine.prefix_cache.all_checkpoints)
    assert [depth for depth in depths if depth in (100, 200)] == [100, 200]
    assert 300 in depths  # that branch left memory, and is stored
    engine.prefix_cache.clear_store()
    left = {checkpoint.position for checkpoint in engine.prefix_cache.all_checkpoints}
    assert 300 not in left  # and its checkpoints go with it


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_c2_without_any_checkpoint_a_pure_extension_still_works(kind):
    settings = EngineSettings(checkpoints=CheckpointSettings(max_checkpoints=0))
    engine = fake(kind, settings)
    first = ask(engine, prompt(40, 1))
    assert ask(engine, prompt(40, 1) + first.tokens + [5, 6]).cached == 40 + len(first.tokens) - 1
    assert ask(engine, prompt(30, 1)).cached == 0  # and a cut back starts over, correctly


def test_c4_a_stop_right_behind_where_a_sequence_stands_is_taken_there_without_a_decode_more():
    engine = fake("hybrid")
    first = prompt(200)
    answer = ask(engine, first, max_tokens=8)
    turn = [*first, *answer.tokens, *prompt(60, seed=1)]
    held = len(next(slot for slot in engine.prefix_cache.slots if len(slot)))
    before = engine.counters.decodes
    assert ask(engine, turn, boundaries=frozenset({held + 5}), max_tokens=1).cached == held
    assert engine.counters.decodes - before == 1  # none for the edge of the message
    assert held in {one.position for one in engine.prefix_cache.all_checkpoints}
    edited = [*turn[: held + 5], *prompt(40, seed=2)]
    assert ask(engine, edited, max_tokens=1).cached == held


def test_checkpoints_are_looked_through_only_where_something_was_lost(monkeypatch):
    engine = fake("hybrid", sequences=2)
    looks = []
    covered = engine.prefix_cache._has_cells_for
    monkeypatch.setattr(engine.prefix_cache, "_has_cells_for", lambda one: looks.append(one) or covered(one))
    first = prompt(200)
    answer = ask(engine, first, boundaries=frozenset({100}), max_tokens=8)
    assert engine.prefix_cache.all_checkpoints
    ask(engine, [*first, *answer.tokens, *prompt(30, seed=1)], max_tokens=1)
    assert looks == []  # the conversation only grew
    engine.prefix_cache.discard(next(slot for slot in engine.prefix_cache.slots if len(slot)))
    assert looks
    assert engine.prefix_cache.all_checkpoints == []


def test_checkpoints_go_with_the_stored_cells_before_them_while_a_conversation_only_grows():
    engine = fake("hybrid", EngineSettings(block_size=8, ram_cache_bytes=10**8), sequences=1)
    ask(engine, prompt(120, 1), boundaries=frozenset({64}), max_tokens=1)
    growing = prompt(120, 2)
    growing += ask(engine, growing, max_tokens=4).tokens  # takes the only sequence
    stored = np.array(prompt(120, 1))
    assert list(engine.prefix_cache.checkpoints.find_on_path(stored, ""))
    engine.prefix_cache.store.clear()
    ask(engine, growing + prompt(90, 3), boundaries=frozenset({180}), max_tokens=1)
    assert list(engine.prefix_cache.checkpoints.find_on_path(stored, "")) == []
