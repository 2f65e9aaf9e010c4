"""Laws of pins: a pinned prefix is never evicted, includes its checkpoint, and pins are bounded in bytes."""

from __future__ import annotations

import time

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.inspect import cache
from afterglow.engine.kvcache.disk.index import open_index
from afterglow.engine.kvcache.pins import MAX_EXPIRING_PINS
from afterglow.engine.types.request import RetainedPrefix
from afterglow.engine.types.settings import CheckpointSettings, EngineSettings
from afterglow.errors import InvalidArgument
from support.play import KINDS, ask, fake, prompt, reference
from support.truth import check_all

pytestmark = pytest.mark.slow
every_kind = pytest.mark.parametrize("kind", KINDS)
SYSTEM = prompt(43, 1)  # does not end at a block boundary


def small_engine(kind: str, nbytes: int | None = None, **settings) -> Engine:
    nbytes = nbytes or (13_000 if kind == "recurrent" else 47_000)
    return fake(kind, EngineSettings(block_size=8, ram_cache_bytes=nbytes, **settings), sequences=1)


def run_other_prompts(engine: Engine, kind: str, count: int = 12) -> None:
    """Run other prompts that evict everything that is not pinned."""
    for number in range(count):
        entries = prompt(60, 50 + number)
        assert ask(engine, entries).tokens == reference(lambda: fake(kind), entries)
        check_all(engine)


@every_kind
@pytest.mark.parametrize("pin_system", [True, False])
def test_system_prompts_stay_cached_if_pin_system_prompts_is_set(kind, pin_system):
    engine = small_engine(kind, pin_system_prompts=pin_system)
    ask(engine, [*SYSTEM, 5, 6, 7], boundaries=frozenset({43}), system_length=43)
    run_other_prompts(engine, kind)
    assert engine.prefix_cache.store.ram.counters.evictions > 0
    again = ask(engine, [*SYSTEM, 9, 9], system_length=43)
    assert again.cached == (43 if pin_system else 0)
    assert again.tokens == reference(lambda: fake(kind), [*SYSTEM, 9, 9])


@every_kind
def test_a_pin_includes_the_checkpoint_it_is_restored_from(kind):
    """The pin does not end at a message boundary, checkpoints have few bytes, and many others are taken."""
    tight = CheckpointSettings(max_checkpoints=2, max_bytes=2_000)
    engine = small_engine(kind, checkpoints=tight)
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
    run_other_prompts(engine, kind)
    assert ask(engine, [*SYSTEM, 7]).cached == 0


@every_kind
def test_system_pins_give_way_to_newer_system_pins(kind):
    engine = small_engine(kind, pin_system_prompts=True)
    for number in range(20):
        system = prompt(43, 100 + number)
        ask(engine, [*system, 5, 6], boundaries=frozenset({43}), system_length=43)
        check_all(engine)
        pin_manager = engine.prefix_cache.store.pin_manager
        assert pin_manager.nbytes <= pin_manager.limit
    assert 0 < len(list(pin_manager.pins)) < 20
    ask(engine, prompt(60, 50))
    assert ask(engine, [*prompt(43, 119), 9], system_length=43).cached == 43
    run_other_prompts(engine, kind)  # unpinned prefixes can still be stored


def test_a_pin_that_does_not_fit_is_rejected_with_its_size():
    engine = small_engine("attention", pin_system_prompts=True)
    ask(engine, prompt(60, 1), system_length=20)
    ask(engine, prompt(60, 2))  # now the size of an entry is known
    cache.pin(engine, prompt(100, 3))
    assert [pin.is_system for pin in engine.prefix_cache.store.pin_manager.pins] == [True, False]
    with pytest.raises(InvalidArgument, match=r"needs [\d,]+ bytes to pin; existing pins use [\d,]+ of 23,500"):
        cache.pin(engine, prompt(100, 4))
    assert [pin.is_system for pin in engine.prefix_cache.store.pin_manager.pins] == [True, False], "nothing changed"
    cache.pin(engine, prompt(100, 3))  # already pinned
    assert cache.unpin(engine, prompt(100, 3))
    cache.pin(engine, prompt(100, 4))


def test_pins_beyond_the_byte_limit_are_removed_oldest_first():
    engine = small_engine("attention")
    pin_manager = engine.prefix_cache.store.pin_manager
    for number in range(4):
        cache.pin(engine, prompt(60, number))  # the size of an entry is not known yet
    for number in range(5):
        ask(engine, prompt(60, number))
        assert pin_manager.nbytes <= pin_manager.limit
    assert [pin.entries.tolist() for pin in pin_manager.pins] == [prompt(60, number) for number in (2, 3)]


@every_kind
def test_pins_are_per_salt(kind):
    engine = small_engine(kind, pin_system_prompts=True)
    ask(engine, [*SYSTEM, 5], boundaries=frozenset({43}), system_length=43, salt="one")
    run_other_prompts(engine, kind)
    assert ask(engine, [*SYSTEM, 9], system_length=43, salt="other").cached == 0
    assert ask(engine, [*SYSTEM, 8], system_length=43, salt="one").cached == 43


@pytest.mark.parametrize("kind", KINDS)
def test_pinned_system_prompts_survive_disk_eviction_and_a_restart(kind, tmp_path):
    settings = EngineSettings(
        block_size=8,
        ram_cache_bytes=10**7,
        disk_cache_directory=tmp_path / "prefix",
        disk_cache_bytes=8_000 if kind == "recurrent" else 40_000,
        pin_system_prompts=True,
    )
    engine = fake(kind, settings, sequences=1)
    ask(engine, [*SYSTEM, 5, 6, 7], boundaries=frozenset({43}), system_length=43)
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


def test_pins_use_at_most_half_of_the_disk_tier(tmp_path):
    settings = EngineSettings(
        block_size=8,
        ram_cache_bytes=10**7,
        disk_cache_directory=tmp_path / "prefix",
        disk_cache_bytes=20_000,
        pin_system_prompts=True,
    )
    engine = fake("attention", settings, sequences=1)
    for number in range(30):
        ask(engine, prompt(48, 200 + number), system_length=48)
    while engine.run_idle_task():
        pass
    writer = engine.prefix_cache.store.disk_tier.writer
    assert writer.flush(20)
    ask(engine, prompt(60, 1))
    ask(engine, prompt(60, 2))
    assert writer.flush(20)
    with open_index(writer.directory) as index:
        pinned, total = index.count_bytes(pinned_only=True), index.count_bytes()
    assert 0 < pinned <= 10_000 + 1_000  # the last write is not counted yet
    assert pinned + 5_000 < total <= 20_000
    engine.close()


def test_a_system_length_beyond_the_prompt_is_rejected():
    with pytest.raises(InvalidArgument, match="system"):
        ask(small_engine("attention"), [1, 2, 3], system_length=4)


@every_kind
def test_a_pin_with_expiry_protects_its_prefix_until_it_expires(kind, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    engine = small_engine(kind)
    ask(engine, [*SYSTEM, 5, 6, 7], boundaries=frozenset({43}), retained=(RetainedPrefix(43, 300.0),))
    run_other_prompts(engine, kind)
    now += 299
    assert ask(engine, [*SYSTEM, 9, 9]).cached == 43, "and this use restarts the retention"
    now += 299
    run_other_prompts(engine, kind)
    assert ask(engine, [*SYSTEM, 8, 8]).cached == 43
    now += 301
    run_other_prompts(engine, kind)
    pin_manager = engine.prefix_cache.store.pin_manager
    assert (list(pin_manager.pins), pin_manager.nbytes) == ([], 0)
    assert ask(engine, [*SYSTEM, 7, 7]).cached == 0


def test_pins_with_expiry_are_bounded_in_number_and_give_way_to_others():
    engine = small_engine("attention", nbytes=2_000_000)
    ask(engine, prompt(60, 1))
    for number in range(MAX_EXPIRING_PINS + 5):
        cache.pin(engine, prompt(20, 100 + number), retention_seconds=300.0)
    pins = engine.prefix_cache.store.pin_manager.pins
    assert [pin.entries.tolist() for pin in pins] == [prompt(20, 105 + number) for number in range(MAX_EXPIRING_PINS)]
    small = small_engine("attention")
    ask(small, prompt(60, 1))
    ask(small, prompt(60, 2))  # now the size of an entry is known
    cache.pin(small, prompt(100, 3), retention_seconds=300.0)
    cache.pin(small, prompt(100, 4))
    assert [pin.can_expire for pin in small.prefix_cache.store.pin_manager.pins] == [False]
    cache.pin(small, prompt(100, 5), retention_seconds=300.0)
    assert len(small.prefix_cache.store.pin_manager.pins) == 1, "it does not fit, which is no error"


def test_the_stronger_of_two_pins_on_a_prefix_counts():
    engine = small_engine("attention")
    cache.pin(engine, SYSTEM, retention_seconds=300.0)
    cache.pin(engine, SYSTEM, retention_seconds=3600.0)
    cache.pin(engine, SYSTEM, retention_seconds=300.0)
    (pin,) = engine.prefix_cache.store.pin_manager.pins
    assert pin.retention_seconds == 3600.0
    cache.pin(engine, SYSTEM)
    cache.pin(engine, SYSTEM, retention_seconds=300.0)
    assert (pin.can_expire, pin.gives_way) == (False, False)


@every_kind
def test_the_disk_tier_keeps_a_pin_with_expiry_over_a_restart_until_it_expires(kind, tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    settings = EngineSettings(
        block_size=8,
        ram_cache_bytes=10**7,
        disk_cache_directory=tmp_path / "prefix",
        disk_cache_bytes=12_000 if kind == "recurrent" else 20_000,
    )
    engine = fake(kind, settings, sequences=1)
    ask(engine, [*SYSTEM, 5, 6, 7], boundaries=frozenset({43}), retained=(RetainedPrefix(43, 300.0),))
    run_until_evicted_from_disk(engine, 100)
    for wait_seconds, cached in ((0, 43), (10**6, 0)):  # so long that the age of a file outweighs its value
        now += wait_seconds
        engine = fake(kind, settings, sequences=1)
        run_until_evicted_from_disk(engine, 1000 + wait_seconds)
        engine = fake(kind, settings, sequences=1)
        assert ask(engine, [*SYSTEM, 9, 9]).cached == cached
        engine.close()


def run_until_evicted_from_disk(engine: Engine, seed: int) -> None:
    """Run other prompts until the disk tier has evicted files, and close the engine."""
    writer = engine.prefix_cache.store.disk_tier.writer
    for number in range(16):
        ask(engine, prompt(60, seed + number))
        while engine.run_idle_task():
            pass
        assert writer.flush(20)
    assert writer.counters.evictions > 0
    engine.close()
