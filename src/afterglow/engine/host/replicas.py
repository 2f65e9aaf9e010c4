"""Replica group: several engine processes of one model behind one host.

Each request goes to the replica that is expected to give its first token soonest: `routing` decides. The replicas share
the directory of the disk tier and write through to it, so that what one computed, the others can load. If a replica
dies, the others serve its requests that have no token yet, while it restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from afterglow.engine.engine import Engine
from afterglow.engine.host import remote_calls
from afterglow.engine.host.base import EngineHost
from afterglow.engine.host.loop import logger
from afterglow.engine.host.process import EngineProcess, Submission
from afterglow.engine.host.routing import (
    ReplicaLoad,
    ReplicaReport,
    RoutedNames,
    choose_replica,
    choose_speeds,
    count_leading,
    list_names,
)
from afterglow.engine.host.stream import EventStream
from afterglow.engine.kvcache.prefix_cache import CLOSE_TIMEOUT_SECONDS
from afterglow.engine.types.counters import StoreReport
from afterglow.engine.types.request import Request
from afterglow.errors import AfterglowError, EngineCrashed, InvalidArgument

ResultT = TypeVar("ResultT")
REPORT_INTERVAL_SECONDS = 0.5
RETRY_AFTER_SECONDS = 30.0  # until a replica that could not be restarted is started again


@dataclass(eq=False, slots=True)
class Replica:
    """One engine process, and what the group knows about it."""

    number: int
    host: EngineProcess
    report: ReplicaReport = field(default_factory=ReplicaReport)
    routed: RoutedNames = field(default_factory=RoutedNames)
    computed_entries: dict[str, int] = field(default_factory=dict)  # to compute, by the id of a running request
    reported_restarts: int = 0  # at the last report: what a process held in RAM is lost with it
    retry_at: float = 0.0  # when a host that has given up may be replaced

    def count_cached(self, names: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt the replica is expected to hold."""
        return max(count_leading(names, self.report.names), count_leading(names, self.routed))


class ReplicaGroup(EngineHost):
    """Host of several engine processes of one model. It has the interface of `EngineProcess`.

    Sequences are numbered through: those of the first replica come first. `call` runs on the first replica that is
    ready, `call_each` on all of them.
    """

    def __init__(self, first: EngineProcess, count: int) -> None:
        """Start `count` - 1 processes like the first one, and wait until all are ready. If that fails, close them."""
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._latest = 0  # number of the replica that got the latest request
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._replaced_restarts = 0  # restarts that replaced hosts have counted
        self._calls = ThreadPoolExecutor(count, thread_name_prefix="afterglow-replicas")  # starts threads on demand
        self.store_report: StoreReport | None = None  # set by `close`
        hosts = [first]
        try:
            first.wait_until_ready()
            hosts += [EngineProcess(first.restart_factory, wait=False) for _ in range(count - 1)]
            for host in hosts:
                host.wait_until_ready()
            self._replicas = [Replica(number, host) for number, host in enumerate(hosts)]
            self._sequences = first.call(remote_calls.get_engine_info).sequences
            for replica in self._replicas:
                replica.host.take_over = functools.partial(self._take_over, replica.number)
                self._update_report(replica)
        except BaseException:
            _close_all(hosts, 0.0)
            self._calls.shutdown(wait=False)
            raise
        self._reporter = threading.Thread(target=self._run_reporter, name="afterglow-reports", daemon=True)
        self._reporter.start()

    # --- state

    @property
    def hosts(self) -> list[EngineProcess]:
        """The processes, in the order of their sequences."""
        return [replica.host for replica in self._replicas]

    @property
    def is_ready(self) -> bool:
        """Whether at least one replica can serve requests."""
        return any(host.is_ready for host in self.hosts)

    @property
    def has_given_up(self) -> bool:
        """Whether no replica could be restarted."""
        return all(host.has_given_up for host in self.hosts)

    @property
    def restarts(self) -> int:
        """Number of processes started after a crash, of all replicas."""
        return self._replaced_restarts + sum(host.restarts for host in self.hosts)

    @property
    def restart_factory(self) -> Callable[[], Engine]:
        """The factory with which the next process starts."""
        return self.hosts[0].restart_factory

    # --- requests

    def submit_together(self, requests: Sequence[Request]) -> list[EventStream]:
        """Submit several requests to one replica, so that a common prefix is prefilled once."""
        if not requests:
            return []
        with self._lock:
            self._check_ids(requests)
            names = self._list_names(requests[0])
            replica = self._choose(requests[0], names)
            self._latest = replica.number
            streams = replica.host.submit_together([self._localize(request) for request in requests])
            self._record(replica, streams, [len(request.entries) for request in requests], names)
        return streams

    def _check_ids(self, requests: Sequence[Request]) -> None:
        running = {id for replica in self._replicas for id in list(replica.computed_entries)}
        for request in requests:
            if request.id in running:
                raise InvalidArgument("id", f"{request.id!r} is already in use by another request")

    def _list_names(self, request: Request) -> list[bytes]:
        report = self._replicas[0].report
        # Replicas report namespaces with the content of adapters; here they are only told apart.
        namespace = f"{request.salt}\n{request.adapters}" if request.adapters else request.salt
        return list_names(request.entries, namespace, model=report.model, block_size=report.block_size)

    def _choose(self, request: Request, names: Sequence[bytes]) -> Replica:
        if request.sequence is not None:
            return self._find_replica(request.sequence)
        usable = [replica for replica in self._replicas if replica.host.is_ready]
        usable = usable or [replica for replica in self._replicas if not replica.host.has_given_up]
        if not usable:
            raise EngineCrashed("processes of all replicas could not be restarted")
        loads = {replica: self._build_load(replica, names) for replica in usable}
        return choose_replica(loads, len(request.entries))

    def _build_load(self, replica: Replica, names: Sequence[bytes]) -> ReplicaLoad:
        waiting = replica.host.list_waiting()
        return ReplicaLoad(
            speeds=choose_speeds(other.report for other in self._replicas),
            cached_entries=replica.count_cached(names) * replica.report.block_size,
            queued_entries=sum(count for id, count in list(replica.computed_entries.items()) if id in waiting),
            running=len(replica.computed_entries),
            sequences=self._sequences,
            stored_blocks=max(len(replica.report.names), len(replica.routed)),
        )

    def _record(
        self, replica: Replica, streams: Iterable[EventStream], entries: Sequence[int], names: Sequence[bytes]
    ) -> None:
        """Record the requests that a replica got, until they end."""
        cached = replica.count_cached(names) * replica.report.block_size
        replica.routed.add(names)
        for stream, count in zip(streams, entries, strict=True):
            replica.computed_entries[stream.id] = max(1, count - cached)
            cached = count  # choices of one prompt share its prefill
            stream.call_at_end(functools.partial(self._forget_request, stream.id))

    def _forget_request(self, id: str) -> None:
        for replica in self._replicas:
            replica.computed_entries.pop(id, None)

    def _localize(self, request: Request) -> Request:
        """Return the request with the number of its sequence in its replica."""
        return request if request.sequence is None else replace(request, sequence=request.sequence % self._sequences)

    def _take_over(self, number: int, submission: Submission, streams: Sequence[EventStream]) -> bool:
        """Serve requests of a dead replica with another one; return False if none is ready."""
        with self._lock:
            others = [replica for replica in self._replicas if replica.number != number and replica.host.is_ready]
            request = submission.requests[0]
            if not others or self._closing.is_set() or request.sequence is not None:
                return False
            names = self._list_names(request)
            replica = choose_replica({other: self._build_load(other, names) for other in others}, len(request.entries))
            try:
                replica.host.adopt(submission, streams)
            except AfterglowError:
                return False
            for stream in streams:
                self._replicas[number].computed_entries.pop(stream.id, None)
            self._record(replica, streams, [len(request.entries)] * len(streams), names)
        logger.warning("replica %d took over %d requests of replica %d", replica.number, len(streams), number)
        return True

    def cancel(self, id: str) -> None:
        """Cancel a request, even during a decode. An unknown id is ignored."""
        for host in self.hosts:
            host.cancel(id)

    # --- calls

    def call(self, function: Callable[[Engine], ResultT | Future[ResultT]]) -> ResultT:
        """Run a function on the engine of the first replica that is ready: see `EngineProcess.call`."""
        return next((host for host in self.hosts if host.is_ready), self.hosts[0]).call(function)

    def call_each(self, function: Callable[[Engine], ResultT | Future[ResultT]]) -> list[ResultT]:
        """Run a function on the engines of all replicas, and return their results in order."""
        hosts = [host for host in self.hosts if not host.has_given_up] or self.hosts
        return list(self._calls.map(lambda host: host.call(function), hosts))

    def select(self) -> EngineProcess:
        """Return the replica for calls that belong together: the ready one with the fewest requests."""
        ready = [replica for replica in self._replicas if replica.host.is_ready] or self._replicas
        return min(ready, key=lambda replica: len(replica.computed_entries)).host

    def call_on_sequence(self, function: Callable[..., ResultT], sequence: int | None) -> tuple[ResultT, int]:
        """Run a function on the replica of a sequence, by default that of the latest request, with its number there.

        Returns the result and the number of the first sequence of that replica.
        """
        number = self._latest if sequence is None else self._find_replica(sequence).number
        local = None if sequence is None else sequence % self._sequences
        return self.hosts[number].call_on_sequence(function, local)[0], number * self._sequences

    def _find_replica(self, sequence: int) -> Replica:
        limit = len(self._replicas) * self._sequences
        if not 0 <= sequence < limit:
            raise InvalidArgument("sequence", f"must be from 0 to {limit - 1}, not {sequence}")
        return self._replicas[sequence // self._sequences]

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read messages of the replicas in the event loop of the clients."""
        self._event_loop = loop
        for host in self.hosts:
            host.attach_event_loop(loop)

    def close(self, store_timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """End every request with `Closed` and stop the replicas, at the same time."""
        self._closing.set()
        _close_all(self.hosts, store_timeout)
        self._reporter.join()
        self._calls.shutdown(wait=False)
        reports = [host.store_report for host in self.hosts if host.store_report is not None]
        self.store_report = _sum_reports(reports) if reports else None

    # --- reports

    def _run_reporter(self) -> None:
        """Ask the replicas for their reports, and replace those that have given up, until the group is closed."""
        updates: dict[int, Future[None]] = {}
        while not self._closing.wait(REPORT_INTERVAL_SECONDS):
            for replica in self._replicas:
                update = updates.get(replica.number)
                if update is not None and not update.done():
                    continue
                if replica.host.has_given_up:
                    self._replace_host(replica)
                elif replica.host.is_ready:
                    with contextlib.suppress(RuntimeError):  # the pool is closed
                        updates[replica.number] = self._calls.submit(self._update_report, replica)

    def _update_report(self, replica: Replica) -> None:
        restarts = replica.host.restarts
        with contextlib.suppress(AfterglowError):  # it died or is closed
            replica.report = replica.host.call(remote_calls.get_replica_report)
            if restarts != replica.reported_restarts:
                replica.reported_restarts = restarts
                replica.routed.clear()

    def _replace_host(self, replica: Replica) -> None:
        """Start a new process in place of one that could not be restarted, once in a while."""
        now = time.monotonic()
        if not replica.retry_at:
            replica.retry_at = now + RETRY_AFTER_SECONDS
        if now < replica.retry_at:
            return
        replica.retry_at = now + RETRY_AFTER_SECONDS
        old, host = replica.host, EngineProcess(self.restart_factory, wait=False)
        host.take_over = functools.partial(self._take_over, replica.number)
        with self._lock:
            self._replaced_restarts += old.restarts + 1
            replica.host = host
            replica.routed.clear()
            if self._event_loop is not None:
                host.attach_event_loop(self._event_loop)
        old.close()
        if self._closing.is_set():
            host.close()


def _close_all(hosts: Sequence[EngineProcess], store_timeout: float) -> None:
    """Close processes at the same time."""
    threads = [threading.Thread(target=host.close, args=(store_timeout,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _sum_reports(reports: Sequence[StoreReport]) -> StoreReport:
    return StoreReport(
        sequences=sum(report.sequences for report in reports),
        files=sum(report.files for report in reports),
        nbytes=sum(report.nbytes for report in reports),
        dropped_files=sum(report.dropped_files for report in reports),
        seconds=max(report.seconds for report in reports),
        is_complete=all(report.is_complete for report in reports),
    )
