"""Router of Ray Serve that sends each request to the replica with the earliest expected first token."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from afterglow.cluster import host
from afterglow.engine.host.child_main import unpack
from afterglow.engine.host.routing import (
    ReplicaLoad,
    ReplicaReport,
    ReplicaSpeeds,
    RoutedNames,
    choose_speeds,
    count_leading,
    rank_replicas,
)


@dataclass(slots=True)
class KnownReplica:
    """What the router knows about a replica, beside its reports."""

    routed: RoutedNames = field(default_factory=RoutedNames)
    running: dict[str, int] = field(default_factory=dict)  # entries to compute, by request; of this router only
    packed_report: bytes = b""
    report: ReplicaReport = field(default_factory=ReplicaReport)

    def update(self, packed_report: bytes) -> None:
        """Read the latest report of the replica."""
        if packed_report and packed_report is not self.packed_report and packed_report != self.packed_report:
            self.packed_report = packed_report
            self.report = unpack("report", packed_report)

    def build_load(self, names: Sequence[bytes], stats: Mapping[str, Any], speeds: ReplicaSpeeds) -> ReplicaLoad:
        """Return what a prompt with these names would find. `stats` are those of the replica.

        A replica that has computed nothing yet is expected to have these `speeds`.
        """
        cached = max(count_leading(names, self.report.names), count_leading(names, self.routed))
        return ReplicaLoad(
            cached_entries=cached * self.report.block_size,
            queued_entries=sum(self.running.values()),
            running=len(self.running) + count_running_of_others(stats),
            sequences=stats.get("sequences", 1),
            stored_blocks=max(len(self.report.names), len(self.routed)),
            speeds=self.report.speeds or speeds,
        )


def count_running_of_others(stats: Mapping[str, Any]) -> int:
    """Return the running requests that other processes sent to a replica; this one knows its own without delay."""
    running: Mapping[str, int] = stats.get("running", {})
    return sum(count for process, count in running.items() if process != host.PROCESS_ID)


class PrefixRouter(RequestRouter):
    """Ranks replicas by the expected seconds until the first token: see `afterglow.engine.host.routing`.

    The keyword arguments of a request are its `names`, those of the blocks of its prompt, and its number of `entries`;
    or the `replica` that it is for. If that one is lost, another one gets it, and rejects it. Requests are matched by
    their ids: Ray's first-in-first-out order would give a replica that was chosen for one request to another one.
    """

    def initialize_state(self, policy: str = "prefix") -> None:
        """`policy`: `prefix`, or `round_robin` for comparisons."""
        self._policy = policy
        self._turns = itertools.count()
        self._known: dict[ReplicaID, KnownReplica] = {}
        # Ray pickles this module by value, with copies of its globals; modules that it imports are not copied.
        host.replica_lists[self._deployment_id.name] = self.list_replicas

    def list_replicas(self) -> list[str]:
        """Return the ids of the replicas that run now."""
        return [replica_id.unique_id for replica_id in list(self.curr_replicas)]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, the best first, each in a rank of its own."""
        arguments: dict[str, Any] = {} if pending_request is None else pending_request.kwargs
        ordered = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        if (wanted := arguments.get("replica")) is not None:
            ordered.sort(key=lambda replica: replica.replica_id.unique_id != wanted)
            return [[replica] for replica in ordered[:1]]
        if self._policy == "round_robin" and ordered:
            turn = next(self._turns) % len(ordered)
            return [[replica] for replica in ordered[turn:] + ordered[:turn]]
        names, entries = arguments.get("names", ()), arguments.get("entries", 0)
        known = {replica: self._update_known(replica) for replica in ordered}
        speeds = choose_speeds(one.report for one in known.values())
        loads = {replica: one.build_load(names, replica.routing_stats, speeds) for replica, one in known.items()}
        ranked = rank_replicas(loads, entries)
        if pending_request is not None and ranked:  # others that arrive at the same time must know of it
            self._record(pending_request, ranked[0].replica_id)
            pending_request.future.add_done_callback(functools.partial(self._forget_cancelled, pending_request))
        return [[replica] for replica in ranked]

    def _update_known(self, replica: RunningReplica) -> KnownReplica:
        known = self._known.setdefault(replica.replica_id, KnownReplica())
        known.update(replica.routing_stats.get("report", b""))
        return known

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Use these replicas from now on, and forget those that are drained."""
        super().update_replicas(replicas)
        self._known = {id: known for id, known in self._known.items() if id in self.curr_replicas}

    def _record(self, pending_request: PendingRequest, replica_id: ReplicaID) -> None:
        """Record that a replica will hold the prompt of a request, and no other one."""
        id, names = pending_request.metadata.internal_request_id, pending_request.kwargs.get("names")
        known = self._known.setdefault(replica_id, KnownReplica())
        if names is None or id in known.running:
            return
        self._forget(id)
        cached = count_leading(names, known.routed) * known.report.block_size
        known.running[id] = max(1, pending_request.kwargs["entries"] - cached)
        known.routed.add(names)

    def _forget(self, id: str) -> None:
        for known in self._known.values():
            known.running.pop(id, None)

    def _forget_cancelled(self, pending_request: PendingRequest, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self._forget(pending_request.metadata.internal_request_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record that a replica has accepted a request, which may be another one than was expected."""
        self._record(pending_request, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record that a request has ended."""
        if (known := self._known.get(replica_id)) is not None:
            known.running.pop(internal_request_id, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica."""
        super().on_replica_actor_died(replica_id)
        self._known.pop(replica_id, None)
