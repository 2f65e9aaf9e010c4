"""The shared store: what one engine computed, another one loads; slow, failing and lying stores cost time only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.disk.files import HEAD_BYTES
from afterglow.engine.kvcache.objects import tier as tier_module
from afterglow.engine.kvcache.objects.client import ObjectClient, check_store_url, read_key
from afterglow.engine.kvcache.objects.search import find_longest_prefix
from afterglow.errors import InvalidArgument
from support.play import KINDS, ask, fake, prompt, reference
from support.sharing_engines import ask_and_store, get_tier, run_sharing_engines

pytestmark = pytest.mark.slow
ENTRIES = prompt(300, seed=3)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    with run_sharing_engines(str(tmp_path / "store")) as start:
        yield start


def list_objects(engine: Engine) -> list[Path]:
    assert engine.settings.shared_cache is not None
    return sorted(path for path in Path(engine.settings.shared_cache).rglob("*.*"))


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_done()


# --- search


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 1000])
def test_the_longest_stored_prefix_is_found_with_few_questions(count: int) -> None:
    for stored in {0, 1, count // 3, count - 1, count} & set(range(count + 1)):
        for known in {0, stored // 2, stored}:
            asked: list[int] = []

            def has(index: int, stored: int = stored, asked: list[int] = asked) -> bool:
                asked.append(index)
                return index < stored

            assert find_longest_prefix(has, count, known) == stored
            assert len(asked) <= 2 * max(1, count - known).bit_length() + 1


# --- sharing


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_loads_what_another_one_computed(start, kind: str) -> None:
    first, second = start(kind), start(kind)
    answer = ask_and_store(first, ENTRIES)
    continued = [*ENTRIES, *answer.tokens, *prompt(40, seed=4)]
    found = ask(second, continued)
    assert found.cached >= 310, "also the part of the last block"
    assert found.tokens == reference(lambda: fake(kind), continued)
    assert get_tier(second).counters.hits == 1
    assert get_tier(second).counters.hit_entries == found.cached


def test_conversations_that_diverge_share_their_common_blocks(start) -> None:
    first, second = start(), start()
    ask_and_store(first, ENTRIES)
    before = len(list_objects(first))
    other = [*ENTRIES[:160], *prompt(60, seed=9)]
    assert ask_and_store(second, other).cached == 160
    assert len(list_objects(first)) - before <= 6, "the common blocks are stored once"


def test_an_engine_does_not_store_what_it_loaded_again(start) -> None:
    first, second = start(), start()
    ask_and_store(first, ENTRIES, max_tokens=1)
    ask_and_store(second, ENTRIES, max_tokens=1)
    assert get_tier(second).counters.saves <= 1, "the end of its own response at most"


def test_an_engine_does_not_store_the_same_checkpoints_after_every_turn(start) -> None:
    engine = start("hybrid")
    entries = list(ENTRIES)
    for turn in range(3):  # checkpoints in the same block would replace each other
        options = {"max_tokens": 20, "ignore_eos": True, "boundaries": frozenset({64, 128, 200})}
        entries += ask_and_store(engine, entries, **options).tokens
        entries += prompt(30, seed=10 + turn)
    saves = get_tier(engine).counters.saves
    engine.prefix_cache.store.write_back_prompt(engine.interner.intern(entries), "")
    assert get_tier(engine).flush(60)
    assert len(engine.prefix_cache.all_checkpoints) >= 8
    assert get_tier(engine).counters.saves == saves


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_what_replaced_an_object_after_the_same_block_stays_in_the_store(start, kind: str) -> None:
    """Both end in the block that starts at 288; a store has one tail and one checkpoint after each block."""
    reader, writer = start(kind), start(kind)
    options = {"max_tokens": 1, "boundaries": frozenset({294})}
    others = [*ENTRIES[:290], *prompt(10, seed=9)]
    ask_and_store(start(kind), ENTRIES, **options)
    tier, entries = get_tier(reader), reader.interner.intern(ENTRIES)
    assert not tier.search(entries, "", 0, is_blocking=True)
    ask_and_store(writer, others, **options)
    stored = {path: path.read_bytes() for path in list_objects(writer)}
    assert ask(reader, ENTRIES).tokens == reference(lambda: fake(kind), ENTRIES)
    assert tier.flush(60)
    assert {path: path.read_bytes() for path in list_objects(writer)} == stored
    assert tier.corrupt_objects == 0


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_checkpoints_after_the_same_block_do_not_replace_each_other_again_and_again(start, kind: str) -> None:
    engine = start(kind)
    options = {"max_tokens": 1, "boundaries": frozenset({226, 231, 236})}
    ask_and_store(engine, ENTRIES, **options)
    parents = [checkpoint.parent for checkpoint in engine.prefix_cache.all_checkpoints]
    assert len(set(parents)) < len(parents), "some are after the same block"
    saves = get_tier(engine).counters.saves
    for _ in range(3):
        engine.prefix_cache.store.write_back_prompt(engine.interner.intern(ENTRIES), "")
        assert get_tier(engine).flush(60)
    assert get_tier(engine).counters.saves == saves
    found = ask(start(kind), [*ENTRIES[:250], *prompt(20, seed=4)])
    assert found.cached == 236, "the deepest one is stored"


def test_a_longer_end_of_a_sequence_stays_in_the_store_in_place_of_the_shorter_one(start) -> None:
    engine = start()
    ask_and_store(engine, ENTRIES[:290], max_tokens=1)
    inject(engine, lambda name: time.sleep(0.2 if name == "delete" else 0.0))
    ask_and_store(engine, ENTRIES, max_tokens=1)
    assert any(path.suffix == ".tail" for path in list_objects(engine))
    assert ask(start(), [*ENTRIES, 5]).cached == 300


def test_forgetting_a_prefix_deletes_the_checkpoints_that_the_engine_stored(start) -> None:
    engine = start("hybrid")
    ask_and_store(engine, ENTRIES, boundaries=frozenset({64, 128, 200}))
    assert any(path.suffix == ".state" for path in list_objects(engine))
    engine.prefix_cache.forget(engine.interner.intern(ENTRIES), 0, "")
    wait_until(lambda: not list_objects(engine))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_forgotten_is_deleted_before_an_engine_is_closed(start, kind: str) -> None:
    engine = start(kind)
    ask_and_store(engine, ENTRIES, boundaries=frozenset({64, 128, 200}))
    assert list_objects(engine)
    inject(engine, lambda name: time.sleep(0.02))
    engine.prefix_cache.forget(engine.interner.intern(ENTRIES), 0, "")
    engine.close()
    assert not list_objects(engine)


def test_the_bytes_of_a_block_that_a_longer_one_on_disk_replaces_are_not_counted(start, tmp_path: Path) -> None:
    disk = {"disk_cache_directory": tmp_path / "disk"}
    engine, other = start(**disk), start(**disk, shared_cache=None)
    ask_and_store(engine, ENTRIES, max_tokens=1)
    ask(other, [*ENTRIES, 5, 6], max_tokens=1)
    other.write_through()
    store = engine.prefix_cache.store
    assert other.prefix_cache.store.flush(60)
    assert store.flush(60)
    found = store.find_stored_prefix(engine.interner.intern([*ENTRIES, 5, 6]), "")
    assert found.length == 302
    assert get_tier(engine).budget.used_bytes == sum(block.object_bytes for block in store.tree)


def test_salts_and_models_share_nothing_in_the_store(start) -> None:
    first, second, other = start(), start(), start(block_size=32)
    ask_and_store(first, ENTRIES, salt="one")
    assert ask(second, ENTRIES, salt="two").cached == 0
    assert ask(other, ENTRIES, salt="one").cached == 0
    assert ask(second, ENTRIES, salt="one").cached >= 288


def test_a_prefix_is_not_loaded_if_computing_it_is_faster(start) -> None:
    first = start()
    ask_and_store(first, ENTRIES)
    fast = start(seconds_per_entry=1e-7)
    assert ask(fast, ENTRIES).cached == 0
    assert get_tier(fast).counters.hits == 0


def test_the_part_in_ram_is_used_if_the_part_in_the_store_is_too_slow_to_load(start) -> None:
    first, second = start(), start()
    ask_and_store(second, ENTRIES[:160])
    ask_and_store(first, ENTRIES)
    second.prefix_cache.evict()
    tier = get_tier(second)
    tier._seconds_per_byte.value = 10.0
    assert 144 <= ask(second, ENTRIES).cached <= 160
    assert tier.counters.hits == 0


def test_clearing_removes_the_objects_of_the_model(start) -> None:
    engine = start()
    ask_and_store(engine, ENTRIES)
    assert list_objects(engine)
    engine.prefix_cache.clear_store()
    wait_until(lambda: not list_objects(engine))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remove", ["clear", "forget"])
def test_what_is_being_written_when_it_is_removed_is_deleted_and_can_be_stored_again(start, kind, remove) -> None:
    engine = start(kind)
    is_slow, tier = [True], get_tier(engine)
    inject(engine, lambda name: time.sleep(0.1 if name == "write" and is_slow[0] else 0.0))
    ask(engine, ENTRIES, boundaries=frozenset({64, 128, 200}))
    engine.write_through()
    time.sleep(0.05)
    if remove == "clear":
        engine.prefix_cache.clear_store()
    else:
        engine.prefix_cache.forget(engine.interner.intern(ENTRIES), 0, "")
    assert tier.flush(60)
    assert not list_objects(engine)
    is_slow[0] = False
    engine.prefix_cache.clear_store()
    for slot in engine.prefix_cache.slots:
        engine.prefix_cache.discard(slot)
    assert tier.flush(60)
    answer = ask_and_store(engine, ENTRIES, boundaries=frozenset({64, 128, 200}))
    assert ask(start(kind), [*ENTRIES, *answer.tokens, 5]).cached >= 310


# --- slow, failing and lying stores


class FaultyClient:
    """Client with injected faults: `fault` gets the name of a method and may sleep or raise."""

    def __init__(self, client: ObjectClient, fault: Callable[[str], None]) -> None:
        self._client, self._fault = client, fault

    def __getattr__(self, name: str):
        def call(*arguments: object) -> object:
            self._fault(name)
            return getattr(self._client, name)(*arguments)

        return call


def inject(engine: Engine, fault: Callable[[str], None]) -> None:
    tier = get_tier(engine)
    tier.client = FaultyClient(tier.client, fault)  # type: ignore[assignment]


def test_a_store_with_latency_is_still_used_if_that_is_faster(start) -> None:
    first, second = start(), start()
    ask_and_store(first, ENTRIES)
    inject(second, lambda name: time.sleep(0.01))
    assert ask(second, ENTRIES).cached >= 288


@pytest.mark.parametrize("method", ["get_size", "read", "read_head", "write"])
def test_a_store_that_fails_costs_no_request(start, method: str) -> None:
    first, second = start(), start()
    answer = ask_and_store(first, ENTRIES)

    def fail(name: str) -> None:
        if name == method:
            raise OSError("503 Slow Down")

    inject(second, fail)
    assert ask_and_store(second, ENTRIES).tokens == answer.tokens


def test_a_store_that_keeps_failing_is_left_alone_for_a_while(start) -> None:
    engine, calls = start(), []

    def fail(name: str) -> None:
        calls.append(name)
        raise OSError("503 Slow Down")

    inject(engine, fail)
    for seed in range(10):
        ask_and_store(engine, prompt(200, seed=seed))
    assert not get_tier(engine).health.is_available
    assert len(calls) < 30
    get_tier(engine).health.paused_until = 0.0
    calls.clear()
    ask(engine, prompt(200, seed=99))
    assert calls, "it is tried again"


def test_a_store_that_hangs_delays_a_request_by_a_limited_time(start, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start(), start(seconds_per_entry=0.001)
    answer = ask_and_store(first, ENTRIES)
    monkeypatch.setattr(tier_module, "SEARCH_TIMEOUT_SECONDS", 0.1)
    blocked = [True]

    def hang(name: str) -> None:
        while blocked[0]:
            time.sleep(0.01)

    get_tier(second)._latency.value = 1e-3
    inject(second, hang)
    assert ask(second, ENTRIES).tokens == answer.tokens
    blocked[0] = False


@pytest.mark.parametrize("position", [5, 60, 120, -40, -1])
def test_changed_bytes_in_an_object_are_found_and_change_no_token(start, position: int) -> None:
    first, second = start(), start()
    answer = ask_and_store(first, ENTRIES)
    for path in list_objects(first):
        data = bytearray(path.read_bytes())
        data[position] ^= 0x40
        path.write_bytes(data)
    found = ask(second, ENTRIES)
    assert found.tokens == answer.tokens
    assert found.cached == 0


def test_an_object_under_the_name_of_another_one_is_not_used(start) -> None:
    first, second = start(), start()
    answer = ask_and_store(first, ENTRIES)
    blocks = [path for path in list_objects(first) if path.suffix == ".cells"]
    contents = [path.read_bytes() for path in blocks]
    for path, data in zip(blocks, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(data)
    found = ask(second, ENTRIES)
    assert found.tokens == answer.tokens
    assert found.cached == 0
    assert get_tier(second).corrupt_objects > 0


def test_a_missing_object_in_the_middle_is_a_shorter_prefix(start) -> None:
    first, second = start(), start()
    answer = ask_and_store(first, ENTRIES)
    keys = first.prefix_cache.store.hasher.hash_prefixes(first.interner.intern(ENTRIES), "")
    (next(path for path in list_objects(first) if path.stem == keys[9].hex())).unlink()
    assert ask(second, ENTRIES).tokens == answer.tokens


# --- encryption


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(os.urandom(32).hex())
    return path


def test_an_encrypted_store_shows_neither_entries_nor_cells(start, key_file: Path) -> None:
    first, second = start(shared_cache_key_file=key_file), start(shared_cache_key_file=key_file)
    ask_and_store(first, ENTRIES)
    assert all(b"afterglow" not in path.read_bytes() for path in list_objects(first))
    assert ask(second, ENTRIES).cached >= 288


def test_another_key_finds_nothing_and_costs_no_request(start, key_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(os.urandom(32).hex())
    first, second = start(shared_cache_key_file=key_file), start(shared_cache_key_file=other)
    answer = ask_and_store(first, ENTRIES)
    found = ask(second, ENTRIES)
    assert found.cached == 0
    assert found.tokens == answer.tokens


def test_an_encrypted_object_is_bound_to_its_name(tmp_path: Path) -> None:
    client = ObjectClient(check_store_url(str(tmp_path)), head_bytes=HEAD_BYTES, key=os.urandom(32))
    client.write("a", b"h" * HEAD_BYTES, [b"body"])
    assert client.read("a") == b"h" * HEAD_BYTES + b"body"
    assert client.read_head("a") == b"h" * HEAD_BYTES
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes())
    with pytest.raises(OSError, match="damaged or was encrypted with another key"):
        client.read("b")


# --- settings


def test_a_store_that_is_no_url_is_refused(tmp_path: Path) -> None:
    for url in ("bucket", "s3://", "s3:///path", "gs://", "https://"):
        with pytest.raises(InvalidArgument, match="s3://bucket/path"):
            check_store_url(url)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_key(tmp_path / "none")
    (tmp_path / "short").write_text("abcd")
    with pytest.raises(InvalidArgument, match="64 hexadecimal digits"):
        read_key(tmp_path / "short")
