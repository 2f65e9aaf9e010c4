"""Replicas of one model: routing by prefix, what one stored the others find, failover, shutdown."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from afterglow.engine.host import remote_calls
from afterglow.engine.host.merge import merge_stats
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.host.replicas import ReplicaGroup
from afterglow.engine.host.routing import (
    ReplicaLoad,
    ReplicaReport,
    ReplicaSpeeds,
    choose_replica,
    choose_speeds,
    estimate_first_token_seconds,
)
from afterglow.engine.inspect import cache
from afterglow.engine.types.request import Failed, Finished, Request
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import Closed, EngineCrashed, InvalidArgument
from support import engine_factories
from support.hosts import build_spec, get_tokens, is_gone, read_error, read_events, skip_to_first_token, wait_until
from support.play import fake, prompt, request

native = pytest.mark.native


# --- the decision


def test_a_request_goes_to_the_replica_that_holds_its_prefix() -> None:
    loads = {"a": ReplicaLoad(), "b": ReplicaLoad(cached_entries=512)}
    assert choose_replica(loads, 600) == "b"


def test_a_long_queue_outweighs_a_held_prefix_that_can_be_loaded() -> None:
    speeds = ReplicaSpeeds(seconds_per_entry=1e-3, load_seconds_per_entry=1e-5)
    loads = {
        "holder": ReplicaLoad(cached_entries=512, queued_entries=2000, running=1, speeds=speeds),
        "idle": ReplicaLoad(speeds=speeds),
    }
    assert choose_replica(loads, 600) == "idle"


def test_a_prefix_that_loads_slower_than_it_computes_is_not_counted_as_shared() -> None:
    slow = ReplicaLoad(speeds=ReplicaSpeeds(seconds_per_entry=1e-4, load_seconds_per_entry=1e-3))
    assert estimate_first_token_seconds(slow, 1000, shared_entries=1000) == pytest.approx(0.1)


def test_without_a_shared_tier_a_busy_replica_gets_no_request_that_an_idle_one_can_serve() -> None:
    speeds = ReplicaSpeeds(load_seconds_per_entry=math.inf)
    busy, idle = ReplicaLoad(running=1, speeds=speeds), ReplicaLoad(speeds=speeds)
    assert estimate_first_token_seconds(idle, 100) < estimate_first_token_seconds(busy, 100) < math.inf
    for loads in ({"busy": busy, "idle": idle}, {"idle": idle, "busy": busy}):
        assert choose_replica(loads, 100) == "idle"


def test_requests_spread_over_replicas_that_are_equal_otherwise() -> None:
    loads = {"a": ReplicaLoad(running=1), "b": ReplicaLoad()}
    assert choose_replica(loads, 100) == "b"


def test_of_equal_replicas_the_emptier_one_gets_a_new_conversation() -> None:
    loads = {"a": ReplicaLoad(stored_blocks=10), "b": ReplicaLoad(stored_blocks=2)}
    assert choose_replica(loads, 100) == "b"


def test_a_replica_that_has_computed_nothing_is_expected_to_be_as_fast_as_the_others() -> None:
    fast = ReplicaSpeeds(seconds_per_entry=1e-5)
    assert choose_speeds([ReplicaReport(), ReplicaReport(speeds=fast)]) == fast


def test_replicas_without_a_shared_tier_cannot_load_what_another_one_computed(tmp_path: Path) -> None:
    alone, sharing = fake(), fake(settings=EngineSettings(disk_cache_directory=tmp_path / "prefix"))
    reports = [remote_calls.get_replica_report(engine) for engine in (alone, sharing)]
    loads = [report.speeds.load_seconds_per_entry for report in reports if report.speeds is not None]
    assert loads[0] == math.inf > loads[1]
    sharing.close()


# --- processes


@contextmanager
def start_group(directory: Path) -> Iterator[ReplicaGroup]:
    """Start two replicas of a tiny model that share a directory."""
    settings = EngineSettings(disk_cache_directory=directory, write_through=True, ram_cache_bytes=2**26)
    spec = replace(build_spec(sequences=2), engine_settings=settings)
    with ReplicaGroup(EngineProcess(spec), 2) as group:
        yield group


@pytest.fixture(scope="module")
def shared_group(caches_of_our_own: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaGroup]:
    with start_group(tmp_path_factory.mktemp("prefix")) as group:
        yield group


@pytest.fixture
def group(shared_group: ReplicaGroup) -> ReplicaGroup:
    """Two replicas with an empty cache. A test may kill them."""
    assert wait_until(lambda: all(host.is_ready for host in shared_group.hosts))

    def clear() -> bool:  # again if a cancelled request of the test before was stored meanwhile
        shared_group.call_each(cache.clear)
        return not any(map(count_blocks, shared_group.hosts))

    assert wait_until(clear)
    return shared_group


def run(host: ReplicaGroup | EngineProcess, one: Request) -> Finished:
    end = read_events(host.submit(one))[-1]
    assert isinstance(end, Finished), end
    return end


def count_disk_hits(host: EngineProcess) -> int:
    return host.call(remote_calls.get_engine_stats).tiers["disk"].counters.hits


def count_blocks(host: EngineProcess) -> int:
    return host.call(engine_factories.count_stored_blocks)


@native
def test_a_conversation_continues_on_the_other_replica_with_what_the_first_stored(group: ReplicaGroup) -> None:
    first, second = group.hosts
    entries, hits = prompt(300), count_disk_hits(group.hosts[1])
    assert run(first, request("turn 1", entries, max_tokens=4)).usage.cached_tokens == 0
    assert wait_until(lambda: count_blocks(second) >= 4, within=30)
    usage = run(second, request("turn 2", [*entries, *prompt(20)], max_tokens=4)).usage
    assert usage.cached_tokens >= 256
    assert count_disk_hits(second) == hits + 1


@native
def test_a_busy_replica_stores_an_answer_before_it_is_idle(group: ReplicaGroup) -> None:
    first, second = group.hosts
    long = skip_to_first_token(first.submit(request("long", prompt(10), max_tokens=1500, ignore_eos=True)))
    run(first, request("short", prompt(300, seed=5), max_tokens=4))
    assert wait_until(lambda: count_blocks(second) >= 4, within=30)
    assert first.call(remote_calls.get_cache_contents).busy
    del long


@native
def test_turns_of_a_conversation_stay_on_one_replica(group: ReplicaGroup) -> None:
    before = merge_stats(group.call_each(remote_calls.get_engine_stats))
    prompts = {seed: prompt(200, seed=seed) for seed in (101, 102)}
    first_turns = [group.submit(request(f"{seed}", entries)) for seed, entries in prompts.items()]
    assert all(isinstance(read_events(stream)[-1], Finished) for stream in first_turns)
    for turn, seed in enumerate((102, 101, 101, 102)):  # one after the other: both replicas are idle
        prompts[seed] += prompt(64, seed=10 + turn)
        run(group, request(f"{seed} {turn}", prompts[seed]))
    after = merge_stats(group.call_each(remote_calls.get_engine_stats))
    assert after.tiers["disk"].counters.hits == before.tiers["disk"].counters.hits, "a turn went to another replica"
    assert after.counters["reused_entries"] - before.counters["reused_entries"] >= 2 * (192 + 256)


@native
def test_requests_at_the_same_time_use_both_replicas(group: ReplicaGroup) -> None:
    before = [host.call(remote_calls.get_counters) for host in group.hosts]
    streams = [group.submit(request(f"{n}", prompt(100, seed=n), max_tokens=50, ignore_eos=True)) for n in range(4)]
    for stream in streams:
        assert isinstance(read_events(stream)[-1], Finished)
    after = [host.call(remote_calls.get_counters) for host in group.hosts]
    assert all(new["prompt_entries"] >= old["prompt_entries"] + 100 for old, new in zip(before, after, strict=True))


@native
def test_another_replica_serves_the_requests_of_one_that_is_killed(group: ReplicaGroup) -> None:
    (victim, other), restarts = group.hosts, group.restarts
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGSTOP)  # it accepts requests and computes nothing
    computed = other.call(remote_calls.get_counters)["prompt_entries"]
    prompts = [prompt(50, seed=200 + n) for n in range(3)]
    waiting = [victim.submit(request(f"waiting {n}", prompts[n])) for n in range(3)]
    os.kill(victim.pid, signal.SIGKILL)
    answers = [get_tokens(read_events(stream)) for stream in waiting]
    assert other.call(remote_calls.get_counters)["prompt_entries"] >= computed + 150
    assert answers == [get_tokens(read_events(other.submit(request(f"again {n}", prompts[n])))) for n in range(3)]
    assert wait_until(lambda: victim.is_ready)
    assert group.restarts == restarts + 1


@native
def test_a_request_that_has_streamed_fails_with_its_replica_and_new_ones_go_to_the_other(group: ReplicaGroup) -> None:
    stream = group.submit(request("streaming", prompt(10), max_tokens=1500, ignore_eos=True))
    events = skip_to_first_token(stream)
    victim = next(host for host in group.hosts if host.call(remote_calls.get_cache_contents).busy)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    end = list(events)[-1]
    assert isinstance(end, Failed)
    assert isinstance(end.error, EngineCrashed)
    assert wait_until(lambda: not victim.is_ready)
    run(group, request("next", prompt(10), max_tokens=4))


@native
def test_a_request_that_kills_two_replicas_is_not_tried_again(group: ReplicaGroup) -> None:
    first, second = group.hosts
    assert first.pid is not None
    assert second.pid is not None
    os.kill(first.pid, signal.SIGSTOP)
    os.kill(second.pid, signal.SIGSTOP)
    stream = first.submit(request("poison", prompt(50), max_tokens=4))
    os.kill(first.pid, signal.SIGKILL)
    assert wait_until(lambda: "poison" in second.list_waiting())
    os.kill(second.pid, signal.SIGKILL)
    assert isinstance(read_error(stream), EngineCrashed)


@native
def test_a_request_can_be_cancelled_after_another_replica_took_it_over(group: ReplicaGroup) -> None:
    first, second = group.hosts
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)
    stream = first.submit(request("one", prompt(50), max_tokens=1500, ignore_eos=True))
    os.kill(first.pid, signal.SIGKILL)
    assert wait_until(lambda: "one" in second.list_waiting() or second.call(remote_calls.get_cache_contents).busy)
    stream.cancel()
    assert isinstance(list(stream)[-1], Failed)


@native
def test_sequences_are_numbered_through_and_a_request_can_name_one(group: ReplicaGroup) -> None:
    run(group, request("one", prompt(100), max_tokens=4, sequence=3))
    contents = [host.call(remote_calls.get_cache_contents) for host in group.hosts]
    assert [sequence.tokens > 0 for one in contents for sequence in one.sequences] == [False, False, False, True]
    with pytest.raises(InvalidArgument, match="from 0 to 3, not 4"):
        group.submit_together([request("two", prompt(5), sequence=4)])


@native
def test_closing_ends_requests_and_leaves_no_process(tmp_path: Path) -> None:
    with start_group(tmp_path / "prefix") as group:
        pids = [host.pid for host in group.hosts]
        events = skip_to_first_token(group.submit(request("one", prompt(10), max_tokens=1500, ignore_eos=True)))
    end = list(events)[-1]
    assert isinstance(end, Failed)
    assert isinstance(end.error, Closed)
    assert all(pid is not None and is_gone(pid) for pid in pids)
    assert group.store_report is not None
