"""Requests to replicas on a cluster, without Ray: a handle calls replicas of this process."""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from afterglow.cluster.host import MAX_ATTEMPTS, RayHost, replica_lists
from afterglow.cluster.replica import EngineReplica
from afterglow.engine.host import remote_calls
from afterglow.engine.host.thread import EngineThread
from afterglow.engine.types.request import Failed, Finished, Token
from afterglow.errors import Cancelled, Closed, EngineCrashed
from support.hosts import get_tokens, read_error, read_events, skip_to_first_token, wait_until
from support.play import fake, prompt, request

pytestmark = pytest.mark.slow


http_request = contextvars.ContextVar("http_request", default="")


class LocalHandle:
    """Handle of a deployment whose replicas are in this process. `faults` are raised after so many events.

    `lost` is the number of calls whose replica dies.
    """

    def __init__(self, replicas: list[EngineReplica]) -> None:
        self.replicas = replicas
        self.faults: list[int] = []
        self.lost = 0
        self.unreachable: list[AsyncIterator[bytes]] = []  # streams of replicas that cannot be reached, but go on
        self.contexts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.generate = SimpleNamespace(remote=self._generate)
        self.call = SimpleNamespace(remote=self._call)

    def options(self, *, stream: bool) -> LocalHandle:
        return self

    async def _generate(self, content: bytes, **arguments: Any) -> AsyncIterator[bytes]:
        self.calls.append(arguments)
        self.contexts.append(http_request.get())
        replica = self.replicas[len(self.calls) % len(self.replicas)]
        limit, count = self.faults.pop(0) if self.faults else None, 0
        if limit == -1:
            self.unreachable.append(replica.generate(content, **arguments))
            await anext(self.unreachable[-1])
            raise ConnectionError("the replica is unavailable")
        async with contextlib.aclosing(replica.generate(content, **arguments)) as stream:
            async for events in stream:
                if limit is not None and count >= limit:
                    raise ConnectionError("the replica died")
                count += 1
                yield events

    async def _call(self, content: bytes, *, replica: str | None) -> bytes | None:
        self.contexts.append(http_request.get())
        if self.lost:
            self.lost -= 1
            raise ConnectionError("the replica died")
        return await self.replicas[int(replica or 0) % len(self.replicas)].call(content, replica=replica)


@pytest.fixture
def handle() -> Iterator[LocalHandle]:
    replicas = []
    for number in range(2):
        replica = object.__new__(EngineReplica)
        replica._id = str(number)
        replica._host = EngineThread(fake)  # type: ignore[assignment]
        replica._running, replica._sequences = Counter(), 4
        replicas.append(replica)
    yield LocalHandle(replicas)
    for replica in replicas:
        replica._host.close()


@pytest.fixture
def host(handle: LocalHandle) -> Iterator[RayHost]:
    replica_lists["test"] = lambda: ["0", "1"]
    with RayHost(handle, "test") as host:
        yield host
    del replica_lists["test"]


def test_a_request_has_the_tokens_of_a_local_engine(host: RayHost) -> None:
    with EngineThread(fake) as local:
        expected = get_tokens(read_events(local.submit(request("one", prompt(100)))))
    assert get_tokens(read_events(host.submit(request("one", prompt(100))))) == expected


def test_the_router_gets_the_names_of_the_blocks_of_a_prompt(host: RayHost, handle: LocalHandle) -> None:
    read_events(host.submit(request("one", prompt(200), salt="a")))
    read_events(host.submit(request("two", prompt(230), salt="a")))
    read_events(host.submit(request("three", prompt(200), salt="b")))
    first, second, other = (call["names"] for call in handle.calls)
    assert len(first) == 3
    assert second[:3] == first
    assert not set(first) & set(other)
    report = handle.replicas[1]._host.call(remote_calls.get_replica_report)
    assert report.block_size == 64


def test_choices_of_one_prompt_go_to_one_replica(host: RayHost, handle: LocalHandle) -> None:
    streams = host.submit_together([request("one", prompt(50)), request("two", prompt(50))])
    assert all(isinstance(read_events(stream)[-1], Finished) for stream in streams)
    assert len(handle.calls) == 1


def test_a_request_of_a_lost_replica_is_served_by_another_one_if_it_has_no_token(
    host: RayHost, handle: LocalHandle
) -> None:
    expected = get_tokens(read_events(host.submit(request("one", prompt(50)))))
    handle.faults, handle.calls = [0, 0], []
    assert get_tokens(read_events(host.submit(request("two", prompt(50))))) == expected
    assert len(handle.calls) == 3


def test_a_request_can_return_to_a_replica_that_was_only_unreachable(host: RayHost, handle: LocalHandle) -> None:
    expected = get_tokens(read_events(host.submit(request("one", prompt(50)))))
    handle.faults, handle.replicas = [-1], handle.replicas[:1]
    long = request("two", prompt(50), max_tokens=len(expected))
    assert get_tokens(read_events(host.submit(long))) == expected


def test_a_request_fails_if_it_has_streamed_or_was_tried_too_often(host: RayHost, handle: LocalHandle) -> None:
    handle.faults = [4]
    events = list(host.submit(request("one", prompt(50))))
    assert any(isinstance(event, Token) for event in events)
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, EngineCrashed)
    assert len(handle.calls) == 1
    handle.faults, handle.calls = [0] * 5, []
    assert isinstance(read_error(host.submit(request("two", prompt(50)))), EngineCrashed)
    assert len(handle.calls) == MAX_ATTEMPTS


def test_a_cancelled_request_is_cancelled_on_its_replica(host: RayHost, handle: LocalHandle) -> None:
    stream = host.submit(request("one", prompt(10), max_tokens=100_000, ignore_eos=True))
    events = skip_to_first_token(stream)
    stream.cancel()
    end = list(events)[-1]
    assert isinstance(end, Failed)
    assert isinstance(end.error, Cancelled)
    assert wait_until(lambda: not any(contents.busy for contents in host.call_each(remote_calls.get_cache_contents)))


def test_a_call_runs_on_each_replica(host: RayHost) -> None:
    read_events(host.submit(request("one", prompt(50))))
    counters = host.call_each(remote_calls.get_counters)
    assert sorted(one["prompt_entries"] > 0 for one in counters) == [False, True]


def test_a_call_whose_replica_is_lost_goes_to_another_one(host: RayHost, handle: LocalHandle) -> None:
    handle.lost = MAX_ATTEMPTS - 1
    assert host.call(remote_calls.get_counters)
    handle.lost = MAX_ATTEMPTS
    with pytest.raises(EngineCrashed, match="replica was lost"):
        host.call(remote_calls.get_counters)


def test_a_replica_that_leaves_during_a_call_to_all_is_left_out(host: RayHost, handle: LocalHandle) -> None:
    handle.lost = 1
    assert len(host.call_each(remote_calls.get_counters)) == 1
    replica_lists["test"] = lambda: ["0", "1", "2"]  # the last one was drained: another replica gets its call
    assert len(host.call_each(remote_calls.get_counters)) == 2


def test_requests_and_calls_leave_the_context_of_their_http_request(host: RayHost, handle: LocalHandle) -> None:
    """Ray routes and counts calls by an id in that context: two of one request would be taken for one."""
    token = http_request.set("one")
    for name in ("one", "two"):
        read_events(host.submit(request(name, prompt(50))))
    host.call(remote_calls.get_counters)
    host.call_each(remote_calls.get_counters)
    http_request.reset(token)
    assert set(handle.contexts) == {""}


def test_closing_ends_requests(handle: LocalHandle) -> None:
    with RayHost(handle, "none") as host:
        stream = host.submit(request("one", prompt(10), max_tokens=100_000, ignore_eos=True))
        skip_to_first_token(stream)
    assert isinstance(stream.end_event or list(stream)[-1], Failed)
    with pytest.raises(Closed):
        host.submit(request("two", prompt(10)))
