"""Laws of pins: what is pinned stays, with the checkpoint it is restored from, and pins leave room for the rest."""

from __future__ import annotations

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.inspect import cache
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import InvalidArgument
from support.play import KINDS, ask, fake, prompt, reference
from support.truth import check_all

every_kind = pytest.mark.parametrize("kind", KINDS)
SYSTEM = prompt(43, 1)  # does not end where a segment does


def small(kind: str, nbytes: int | None = None, **settings) -> Engine:
    nbytes = nbytes or (4_000 if kind == "recurrent" else 9_000)
    return fake(kind, EngineSettings(block_size=8, ram_cache_bytes=nbytes, **settings), sequences=1)


def crowd(engine: Engine, kind: str, count: int = 12) -> None:
    """Others come, and push out what they can."""
    for number in range(count):
        entries = prompt(60, 50 + number)
        assert ask(engine, entries).tokens == reference(lambda: fake(kind), entries)
        check_all(engine)


@every_kind
@pytest.mark.parametrize("pin_system", [True, False])
def test_system_prompts_stay_where_the_engine_is_told_to_keep_them(kind, pin_system):
    engine = small(kind, pin_system=pin_system)
    ask(engine, [*SYSTEM, 5, 6, 7], boundaries=frozenset({43}), system=43)
    crowd(engine, kind)
    assert engine.prefix_cache.store.ram_counters.evictions > 0
    again = ask(engine, [*SYSTEM, 9, 9], system=43)
    assert again.cached == (43 if pin_system else 0)
    assert again.tokens == reference(lambda: fake(kind), [*SYSTEM, 9, 9])


@every_kind
def test_a_pin_has_the_checkpoint_that_it_is_restored_from(kind):
    """Nobody said that a message ends there, checkpoints have hardly any room, and many others are taken."""
    tight = CheckpointSettings(max_checkpoints=2, max_bytes=2_000)
    engine = small(kind, checkpoints=tight)
    cache.pin(engine, SYSTEM)
    first = [*SYSTEM, *prompt(30, 2)]
    ask(engine, first, boundaries=frozenset({10, 20, 50, 60}))
    check_all(engine)
    for number in range(12):
        ask(engine, prompt(60, 50 + number), boundaries=frozenset({15, 30, 45}))
        check_all(engine)
    for last in (8, 9):
        answer = ask(engine, [*SYSTEM, last, last])
        assert answer.cached == 43
        assert answer.tokens == reference(lambda: fake(kind), [*SYSTEM, last, last])
        check_all(engine)
    assert cache.unpin(engine, SYSTEM)
    assert not any(checkpoint.pinned for checkpoint in engine.prefix_cache.all_checkpoints)
    crowd(engine, kind)
    assert ask(engine, [*SYSTEM, 7]).cached == 0


@every_kind
def test_pins_of_system_prompts_make_room_for_each_other(kind):
    engine = small(kind, pin_system=True)
    for number in range(20):
        system = prompt(43, 100 + number)
        ask(engine, [*system, 5, 6], boundaries=frozenset({43}), system=43)
        check_all(engine)
        pinning = engine.prefix_cache.store.pin_manager
        assert pinning.nbytes <= pinning.limit
    assert 0 < len(list(pinning.pins)) < 20
    ask(engine, prompt(60, 50))
    assert ask(engine, [*prompt(43, 119), 9], system=43).cached == 43
    crowd(engine, kind)  # and there is still room for others


def test_a_pin_that_does_not_fit_is_refused_with_its_numbers():
    engine = small("attention", pin_system=True)
    ask(engine, prompt(60, 1), system=20)
    ask(engine, prompt(60, 2))  # now it is known what an entry takes
    cache.pin(engine, prompt(100, 3))
    assert [pin.is_system for pin in engine.prefix_cache.store.pin_manager.pins] == [True, False]
    with pytest.raises(InvalidArgument, match=r"would take [\d,]+ bytes; pins take [\d,]+, and may 4,500"):
        cache.pin(engine, prompt(100, 4))
    assert [pin.is_system for pin in engine.prefix_cache.store.pin_manager.pins] == [
        False
    ]  # the other one made room, in vain
    cache.pin(engine, prompt(100, 3))  # pinned already
    assert cache.unpin(engine, prompt(100, 3))
    cache.pin(engine, prompt(100, 4))


def test_pins_whose_bytes_turn_out_to_be_too_many_go_the_oldest_first():
    engine = small("attention")
    pinning = engine.prefix_cache.store.pin_manager
    for number in range(4):
        cache.pin(engine, prompt(60, number))  # nobody knows yet what an entry takes
    for number in range(5):
        ask(engine, prompt(60, number))
        assert pinning.nbytes <= pinning.limit
    assert [pin.entries.tolist() for pin in pinning.pins] == [prompt(60, number) for number in (2, 3)]


@every_kind
def test_another_salt_has_pins_of_its_own(kind):
    engine = small(kind, pin_system=True)
    ask(engine, [*SYSTEM, 5], boundaries=frozenset({43}), system=43, salt="one")
    crowd(engine, kind)
    assert ask(engine, [*SYSTEM, 9], system=43, salt="other").cached == 0
    assert ask(engine, [*SYSTEM, 8], system=43, salt="one").cached == 43


@pytest.mark.parametrize("kind", KINDS)
def test_pinned_system_prompts_outlive_others_on_disk_and_a_restart(kind, tmp_path):
    settings = EngineSettings(
        block_size=8,
        ram_cache_bytes=10**7,
        disk_cache_directory=tmp_path / "prefix",
        disk_cache_bytes=8_000 if kind == "recurrent" else 40_000,
        pin_system_prompts=True,
    )
    engine = fake(kind, settings, sequences=1)
    ask(engine, [*SYSTEM, 5, 6, 7], boundaries=frozenset({43}), system=43)
    for number in range(16):
        ask(engine, prompt(60, 50 + number))
        while engine.run_idle_task():
            pass
        assert engine.prefix_cache.store.disk_tier.writer.flush(20)
    assert engine.prefix_cache.store.disk_tier.writer.counters.evictions > 0
    engine.close()
    after = fake(kind, settings, sequences=1)
    assert ask(after, [*SYSTEM, 9, 9]).cached == 43
    after.close()


def test_pins_on_disk_leave_half_of_it_for_others(tmp_path):
    settings = EngineSettings(
        block_size=8,
        ram_cache_bytes=10**7,
        disk_cache_directory=tmp_path / "prefix",
        disk_cache_bytes=20_000,
        pin_system_prompts=True,
    )
    engine = fake("attention", settings, sequences=1)
    for number in range(30):
        ask(engine, prompt(48, 200 + number), system=48)
    while engine.run_idle_task():
        pass
    disk = engine.prefix_cache.store.disk_tier.writer
    assert disk.flush(20)
    ask(engine, prompt(60, 1))
    ask(engine, prompt(60, 2))
    assert disk.flush(20)
    pinned, total = disk.query_index(lambda index: (index.total(pinned=True), index.total()))
    assert 0 < pinned <= 10_000 + 1_000  # what was written last is not counted yet
    assert pinned + 5_000 < total <= 20_000
    engine.close()


def test_more_entries_than_there_are_cannot_be_the_system_prompt():
    with pytest.raises(InvalidArgument, match="system"):
        ask(small("attention"), [1, 2, 3], system=4)
