"""`afterglow serve --replicas`: several engine processes of one model behind one address."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from afterglow.testing import models
from support.server_process import ServerProcess, get_text, wait_until

pytestmark = pytest.mark.native
TEXT = "abcdefghijklmnopqrstuvwxyz ." * 10


@pytest.fixture(scope="module")
def replicated(caches_of_our_own: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two replicas of a tiny model."""
    cache = tmp_path_factory.mktemp("cache")
    arguments = (f"tiny={models.get_path('successor-attention')}", "--context", "2048", "--sequences", "2")
    server = ServerProcess(*arguments, "--replicas", "2", AFTERGLOW_CACHE=str(cache), AFTERGLOW_DISK_CACHE="on")
    yield server
    if server.process.poll() is None:
        server.stop()


def test_one_address_serves_several_engine_processes(replicated: ServerProcess) -> None:
    assert len(replicated.list_engines()) == 2
    assert replicated.http.get("/props").json()["total_slots"] == 4
    contents = replicated.http.get("/cache").json()["models"]["tiny"]
    assert [sequence["number"] for sequence in contents["sequences"]] == [0, 1, 2, 3]


def test_requests_at_the_same_time_use_all_replicas(replicated: ServerProcess) -> None:
    def complete(number: int) -> str:
        return get_text(replicated.complete(f"{number} {TEXT[number:]}", max_tokens=200, ignore_eos=True))

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(complete, range(4)))
    assert all(texts)
    used = [sequence["tokens"] > 0 for sequence in replicated.http.get("/cache").json()["models"]["tiny"]["sequences"]]
    assert any(used[:2])
    assert any(used[2:])


def test_the_turns_of_a_conversation_are_prefix_hits(replicated: ServerProcess) -> None:
    messages = [{"role": "user", "content": f"first {TEXT}"}]
    for turn in range(4):
        completion = replicated.chat(messages=messages)
        cached = completion["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == (turn > 0), f"turn {turn}"
        messages += [{"role": "assistant", "content": get_text(completion)}, {"role": "user", "content": f"and {turn}"}]


def test_what_one_replica_stored_the_other_one_finds_within_a_second(replicated: ServerProcess) -> None:
    def ask(text: str, slot: int) -> int:
        body = {"prompt": text, "n_predict": 8, "temperature": 0, "id_slot": slot}
        return int(replicated.post("/completion", body).json()["timings"]["cache_n"])

    def count_disk_hits() -> int:
        stats = replicated.http.get("/stats").json()["models"]["tiny"]
        return int(stats["tiers"]["disk"]["counters"]["hits"])

    hits = count_disk_hits()
    for seconds in (1, 2, 4, 8, 16):  # a busy machine may need more than one
        text = f"after {seconds} {TEXT}"
        assert ask(text, slot=0) == 0
        time.sleep(seconds)
        if (cached := ask(text, slot=2)) > 0:
            break
    assert cached >= 256
    assert count_disk_hits() == hits + 1, "loaded from disk, once"


def test_requests_succeed_while_a_replica_is_dead(replicated: ServerProcess) -> None:
    expected = get_text(replicated.complete("xyz", max_tokens=8))
    os.kill(replicated.list_engines()[0].pid, signal.SIGKILL)
    assert [get_text(replicated.complete("xyz", max_tokens=8)) for _ in range(10)] == [expected] * 10
    assert wait_until(60, lambda: len(replicated.list_engines()) == 2)


def test_clearing_the_cache_clears_all_replicas(replicated: ServerProcess) -> None:
    for number in range(4):
        replicated.complete(f"{number} {TEXT}")
    assert replicated.post("/cache/clear", {"model": "tiny"}).status_code == 200
    contents = replicated.http.get("/cache").json()["models"]["tiny"]
    assert all(sequence["tokens"] == 0 for sequence in contents["sequences"])


def test_a_server_with_replicas_ends_without_orphans(replicated: ServerProcess) -> None:
    assert replicated.stop(signal.SIGTERM) == 0  # asserts that no child is left
