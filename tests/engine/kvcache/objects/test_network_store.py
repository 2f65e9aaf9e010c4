"""The shared store over HTTP: a store on loopback with latency, refusals and wrong bytes costs time, never a token."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afterglow.engine.engine import Engine
from support.object_store import BUCKET, ObjectStore, run_object_store
from support.play import KINDS, ask, fake, prompt, reference
from support.sharing_engines import ask_and_store, get_tier, run_sharing_engines

pytestmark = pytest.mark.slow
ENTRIES = prompt(300, seed=3)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with run_object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


@pytest.fixture
def start(store: ObjectStore) -> Iterator[Callable[..., Engine]]:
    with run_sharing_engines(f"s3://{BUCKET}/prefixes") as start:
        yield start


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_loads_over_http_what_another_one_computed(start, store: ObjectStore, kind: str) -> None:
    answer = ask_and_store(start(kind), ENTRIES)
    assert all(name.startswith("prefixes/") for name in store.objects)
    continued = [*ENTRIES, *answer.tokens, *prompt(40, seed=4)]
    second = start(kind)
    found = ask(second, continued)
    assert found.tokens == reference(lambda: fake(kind), continued)
    assert found.cached >= 288
    assert get_tier(second).counters.hits == 1


def test_an_endpoint_without_tls_needs_no_further_variable(
    start, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    ask_and_store(start(), ENTRIES)
    assert store.objects


def test_a_store_with_latency_is_used_if_that_is_faster(start, store: ObjectStore) -> None:
    answer = ask_and_store(start(), ENTRIES)
    store.latency_seconds = 0.02
    second = start()
    found = ask(second, ENTRIES)
    assert found.tokens == answer.tokens
    assert found.cached >= 288
    assert get_tier(second).latency_seconds >= 0.01, "it is measured"


def test_a_store_that_refuses_some_requests_is_asked_again(start, store: ObjectStore) -> None:
    answer = ask_and_store(start(), ENTRIES)
    turns = itertools.count()
    store.is_refused = lambda method: next(turns) % 4 == 0
    second = start()
    assert ask_and_store(second, ENTRIES).tokens == answer.tokens
    assert sum(count for key, count in store.requests.items() if key.endswith("503")) > 0
    assert get_tier(second).health.is_available


@pytest.mark.parametrize("method", ["HEAD", "GET", "PUT"])
def test_a_store_that_refuses_all_requests_of_a_kind_costs_no_answer(start, store: ObjectStore, method: str) -> None:
    answer = ask_and_store(start(), ENTRIES)
    store.is_refused = lambda used: used == method
    second = start()
    other = prompt(200, seed=8)
    assert ask_and_store(second, ENTRIES).tokens == answer.tokens
    assert ask_and_store(second, other).tokens == reference(fake, other)
    assert store.requests[f"{method} 503"] > 0


def test_a_store_that_refuses_everything_is_left_alone(start, store: ObjectStore) -> None:
    engine = start()
    store.is_refused = lambda method: True
    for seed in range(8):
        entries = prompt(200, seed=seed)
        assert ask_and_store(engine, entries).tokens == reference(fake, entries)
    assert not get_tier(engine).health.is_available
    before = sum(store.requests.values())
    ask_and_store(engine, prompt(200, seed=50))
    assert sum(store.requests.values()) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [10, 100, -1])
def test_wrong_bytes_from_a_store_change_no_token(start, store: ObjectStore, kind: str, position: int) -> None:
    answer = ask_and_store(start(kind), ENTRIES)

    def change(body: bytes) -> bytes:
        wrong = bytearray(body)
        wrong[position] ^= 0x40
        return bytes(wrong)

    store.change_body = change
    second = start(kind)
    found = ask(second, ENTRIES)
    assert (found.tokens, found.cached) == (answer.tokens, 0)
    store.change_body = lambda body: body
    third = start(kind)
    assert ask(third, ENTRIES).tokens == answer.tokens


def test_a_truncated_object_changes_no_token(start, store: ObjectStore) -> None:
    answer = ask_and_store(start(), ENTRIES)
    store.objects = {name: data[: len(data) // 2] for name, data in store.objects.items()}
    found = ask(start(), ENTRIES)
    assert (found.tokens, found.cached) == (answer.tokens, 0)


def test_tokens_and_keys_of_an_encrypted_store_are_not_on_the_wire(start, store: ObjectStore, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("ab" * 32)
    answer = ask_and_store(start(shared_cache_key_file=key_file), ENTRIES)
    assert store.objects
    assert not any(b"afterglow" in data for data in store.objects.values())
    found = ask(start(shared_cache_key_file=key_file), ENTRIES)
    assert (found.tokens, found.cached >= 288) == (answer.tokens, True)


def test_clearing_deletes_the_objects_of_a_model(start, store: ObjectStore) -> None:
    engine = start()
    ask_and_store(engine, ENTRIES)
    assert store.objects
    engine.prefix_cache.clear_store()
    deadline = time.monotonic() + 30
    while store.objects and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not store.objects
