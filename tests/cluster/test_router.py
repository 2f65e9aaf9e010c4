"""The router of Ray Serve, without a cluster: requests at the same time, replicas that join and leave."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from afterglow.cluster import host
from afterglow.engine.host.child_main import pack
from afterglow.engine.host.routing import ReplicaReport, ReplicaSpeeds

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]
NAMES = [bytes([number]) * 8 for number in range(10)]


class FakeReplica:
    """A running replica as the router sees it. It says after `delay` seconds how many requests it has."""

    max_ongoing_requests = 100

    def __init__(self, name: str, report: ReplicaReport | None = None, delay: float = 0.01) -> None:
        from ray.serve._private.common import DeploymentID
        from ray.serve.request_router import ReplicaID

        self.name, self._delay = name, delay
        self.replica_id = ReplicaID(name, DeploymentID("engine", "test"))
        self.routing_stats: dict[str, Any] = {"sequences": 4}
        if report is not None:
            self.routing_stats["report"] = pack("report", report)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await asyncio.sleep(self._delay)
        return 0


@pytest.fixture(autouse=True)
def no_list_is_left() -> Iterator[None]:
    yield
    host.replica_lists.pop("engine", None)


async def start_router(*replicas: FakeReplica) -> Any:
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID

    from afterglow.cluster.router import PrefixRouter

    router = PrefixRouter(DeploymentID("engine", "test"), DeploymentHandleSource.REPLICA)
    router.initialize_state()
    router.update_replicas(list(replicas))
    return router


def build_request(number: int, **arguments: Any) -> Any:
    from ray.serve._private.common import RequestMetadata
    from ray.serve.request_router import PendingRequest

    metadata = RequestMetadata(request_id=f"r{number}", internal_request_id=f"i{number}", call_method="generate")
    return PendingRequest(args=[], kwargs=arguments, metadata=metadata)


async def route(router: Any, *requests: Any) -> list[str]:
    """Return the names of the replicas of requests that arrive at the same time."""
    choices = [router._choose_replica_for_request(request) for request in requests]
    return [replica.name for replica in await asyncio.wait_for(asyncio.gather(*choices), timeout=60)]


def build_report(names: list[bytes], seconds_per_entry: float = 0.01) -> ReplicaReport:
    speeds = ReplicaSpeeds(seconds_per_entry=seconds_per_entry, load_seconds_per_entry=1.0)
    return ReplicaReport(names=frozenset(names), speeds=speeds)


def test_requests_at_the_same_time_go_to_the_replicas_that_hold_their_prompts() -> None:
    async def run() -> None:
        holders = [FakeReplica(f"holder {n}", build_report([NAMES[n]]), delay=0.01 * n) for n in range(5)]
        router = await start_router(*holders)
        requests = [build_request(n, names=[NAMES[n % 5]], entries=100) for n in reversed(range(20))]
        assert await route(router, *requests) == [f"holder {n % 5}" for n in reversed(range(20))]

    asyncio.run(run())


def test_requests_at_the_same_time_spread_over_idle_replicas() -> None:
    async def run() -> None:
        router = await start_router(*(FakeReplica(f"replica {n}", build_report([])) for n in range(4)))
        requests = [build_request(n, names=[NAMES[n]], entries=100) for n in range(8)]
        replicas = await route(router, *requests)
        assert sorted(replicas) == sorted(f"replica {n % 4}" for n in range(8))
        for request, name in zip(requests, replicas, strict=True):
            replica_id = next(id for id in router.curr_replicas if id.unique_id == name)
            router.on_request_routed(request, replica_id, None)
            router.on_request_completed(replica_id, request.metadata.internal_request_id)
        assert not any(known.running for known in router._known.values())

    asyncio.run(run())


def test_a_request_that_is_cancelled_before_it_is_routed_is_not_counted() -> None:
    async def run() -> None:
        router = await start_router(FakeReplica("slow", delay=60.0))
        choice = asyncio.ensure_future(router._choose_replica_for_request(build_request(1, names=NAMES, entries=700)))
        while not any(known.running for known in router._known.values()):
            await asyncio.sleep(0.01)
        choice.cancel()
        await asyncio.wait([choice])
        await asyncio.sleep(0)
        assert not any(known.running for known in router._known.values())

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_a_call_reaches_the_replica_that_it_is_for_and_another_one_if_that_is_lost() -> None:
    async def run() -> None:
        replicas = [FakeReplica(f"replica {n}") for n in range(3)]
        router = await start_router(*replicas)
        assert router.list_replicas() == [replica.name for replica in replicas]
        calls = [build_request(n, replica=replica.name) for n, replica in enumerate(reversed(replicas))]
        assert await route(router, *calls) == ["replica 2", "replica 1", "replica 0"]
        router.update_replicas(replicas[:1])
        assert await route(router, build_request(9, replica="replica 2")) == ["replica 0"]

    asyncio.run(run())


def test_reports_count_only_the_requests_of_other_processes() -> None:
    """A report is a second old: it still has requests of this process that have ended."""

    async def run() -> None:
        first, second = FakeReplica("first", build_report([])), FakeReplica("second", build_report(NAMES))
        router = await start_router(first, second)
        second.routing_stats["running"] = {host.PROCESS_ID: 4}
        first.routing_stats["running"] = {"another": 1}
        assert await route(router, build_request(1, names=[], entries=100)) == ["second"]

    asyncio.run(run())


@pytest.mark.parametrize("seconds_per_entry", [1e-5, 1e-1])
def test_a_replica_that_joins_takes_load_at_once_and_leaves_conversations_in_place(seconds_per_entry: float) -> None:
    """Whether the others are faster or slower than the first estimate for a new replica."""

    async def run() -> None:
        holder = FakeReplica("holder", build_report(NAMES[:5], seconds_per_entry))
        router = await start_router(holder)
        router.update_replicas([holder, FakeReplica("joined", ReplicaReport())])
        held = build_request(1, names=NAMES[:5], entries=330)
        assert await route(router, held) == ["holder"]
        assert await route(router, build_request(2, names=NAMES[6:], entries=300)) == ["joined"]

    asyncio.run(run())


def test_a_replica_that_left_is_forgotten() -> None:
    async def run() -> None:
        first, second = FakeReplica("first"), FakeReplica("second")
        router = await start_router(first, second)
        for number, replica in enumerate((first, second)):
            router.on_request_routed(build_request(number, names=NAMES, entries=700), replica.replica_id, None)
        router.update_replicas([first])
        router.on_request_completed(second.replica_id, "i1")
        assert list(router._known) == [first.replica_id]
        assert await route(router, build_request(3, names=NAMES, entries=700)) == ["first"]

    asyncio.run(run())
