"""Host of engines on a Ray cluster, as the server sees it: requests go to replicas of a Serve deployment."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from afterglow.engine.engine import Engine
from afterglow.engine.host import remote_calls
from afterglow.engine.host.base import EngineHost
from afterglow.engine.host.child_main import from_portable_event, pack, unpack
from afterglow.engine.host.loop import describe_error, logger
from afterglow.engine.host.process import Submission
from afterglow.engine.host.routing import list_names
from afterglow.engine.host.stream import EventStream, PendingRequests
from afterglow.engine.kvcache.prefix_cache import CLOSE_TIMEOUT_SECONDS
from afterglow.engine.types.counters import StoreReport
from afterglow.engine.types.request import EngineEvent, Failed, PrefillProgress, Request, Token, Usage
from afterglow.errors import Cancelled, Closed, EngineCrashed

ResultT = TypeVar("ResultT")
replica_lists: dict[str, Callable[[], list[str]]] = {}
"""Functions that return the ids of the replicas of a deployment, by its name. The routers of this process add them."""
ATTEMPT_MARK = "#"  # before the number of a repetition, in request ids
PROCESS_ID = uuid.uuid4().hex
"""Begins the ids of all requests of this process: several processes share the replicas."""
MAX_ATTEMPTS = 3  # of a call, or of a request that has no token yet, if its replica dies or is upgraded


host_numbers = itertools.count()


class RayHost(EngineHost):
    """Submits requests to a Serve deployment of `EngineReplica`. It has the interface of `EngineProcess`.

    A request whose replica is lost before its first token is sent to another one; later it fails with `EngineCrashed`.
    """

    # Ray replaces replicas; requests wait for one.
    is_ready, has_given_up, restarts = True, False, 0

    def __init__(self, handle: Any, name: str) -> None:
        """`handle` and `name` are those of the deployment."""
        self._handle = handle
        self._name = name
        self._prefix = f"{PROCESS_ID}.{next(host_numbers)}"  # of request ids
        self._pending = PendingRequests(self.cancel)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request id
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="afterglow-ray", daemon=True)
        self._thread.start()
        self.store_report: StoreReport | None = None
        report = self.call(remote_calls.get_replica_report)
        self._model, self._block_size = report.model, report.block_size

    # --- requests

    def submit_together(self, requests: Sequence[Request]) -> list[EventStream]:
        """Submit several requests to one replica, so that a common prefix is prefilled once."""
        renamed = tuple(replace(request, id=f"{self._prefix}-{request.id}") for request in requests)
        first = renamed[0]
        names = list_names(first.entries, first.salt, model=self._model, block_size=self._block_size)
        submission = Submission(renamed, self._loop.time())
        streams = self._pending.add_streams([request.id for request in renamed])
        self._schedule(self._start(submission, names))
        return streams

    def _schedule(self, coroutine: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Run a coroutine in the loop of this host, without the context of the HTTP request.

        In that context Ray would give all calls the same id, by which it routes and counts them.
        """
        return contextvars.Context().run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)

    async def _start(self, submission: Submission, names: list[bytes]) -> None:
        task = asyncio.ensure_future(self._run(submission, names))
        for request in submission.requests:
            self._tasks[request.id] = task

    async def _run(self, submission: Submission, names: list[bytes]) -> None:
        """Deliver the events of a submission, from one replica after another until one has sent a token."""
        ids = [request.id for request in submission.requests]
        error: Exception = EngineCrashed("no replica accepted the request")
        try:
            for attempt in range(MAX_ATTEMPTS):
                if attempt:
                    logger.warning("a replica was lost (%s); another one gets its request", describe_error(error))
                has_tokens = False
                content = pack("request", build_attempt(submission, attempt))
                try:
                    responses = self._handle.options(stream=True).generate.remote(
                        content, names=names, entries=len(submission.requests[0].entries)
                    )
                    async for packed in responses:
                        events = [from_portable_event(event) for event in unpack("events", packed)]
                        if attempt:
                            events = [restore_request_id(event) for event in events]
                        has_tokens = has_tokens or not all(isinstance(event, PrefillProgress) for event in events)
                        self._pending.deliver(events)
                    return
                except Exception as failure:
                    error = failure.with_traceback(None)  # its frames would hold the stream of the lost replica
                    if has_tokens:
                        break
            crash = EngineCrashed(f"replica was lost: {describe_error(error)}")
            self._pending.deliver([Failed(id, crash, Usage()) for id in ids])
        except asyncio.CancelledError:
            self._pending.deliver([Failed(id, Cancelled(f"request {id} was cancelled"), Usage()) for id in ids])
        finally:
            for id in ids:
                self._tasks.pop(id, None)

    def cancel(self, id: str) -> None:
        """Cancel a request with all that were submitted together. An unknown id is ignored."""

        def cancel_task() -> None:
            if (task := self._tasks.get(id)) is not None:
                task.cancel()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(cancel_task)

    # --- calls

    @property
    def replicas(self) -> list[str]:
        """Ids of the replicas that run now; empty if the router of this process knows none yet."""
        return replica_lists[self._name]() if self._name in replica_lists else []

    def call(self, function: Callable[[Engine], ResultT | Future[ResultT]]) -> ResultT:
        """Run a function on the engine of any replica, of another one if it is lost."""
        result: ResultT = read_result(self._schedule(self._call_any(pack("function", function))).result())
        return result

    async def _call_any(self, content: bytes) -> bytes:
        for attempt in range(MAX_ATTEMPTS):
            try:
                return await self._handle.call.remote(content, replica=None)  # type: ignore[no-any-return]
            except Exception as error:
                if attempt == MAX_ATTEMPTS - 1:
                    raise EngineCrashed(f"replica was lost: {describe_error(error)}") from None
                logger.warning("a replica was lost (%s); another one gets its call", describe_error(error))
        raise AssertionError

    def call_each(self, function: Callable[[Engine], ResultT | Future[ResultT]]) -> list[ResultT]:
        """Run a function on the engines of all replicas. Those that are lost meanwhile are left out."""
        content = pack("function", function)
        calls = [self._schedule(self._call_one(content, replica)) for replica in self.replicas]
        answers = [answer for call in calls if (answer := call.result()) is not None]
        return [read_result(answer) for answer in answers] if answers else [self.call(function)]

    async def _call_one(self, content: bytes, replica: str) -> bytes | None:
        """Return the answer of a replica; None if it is lost."""
        try:
            return await self._handle.call.remote(content, replica=replica)  # type: ignore[no-any-return]
        except Exception as error:
            logger.warning("replica %s was lost (%s)", replica, describe_error(error))
            return None

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Has no effect: events reach an event loop from the thread of this host."""

    def close(self, store_timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """End every request with `Closed`. The replicas go on."""
        self._pending.close(Closed("engine"))
        self._pending.fail_all(Closed("engine"))
        if self._loop.is_closed():
            return
        self._schedule(self._cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = set(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


def build_attempt(submission: Submission, attempt: int) -> tuple[Request, ...]:
    """Return the requests of an attempt. A replica that was only unreachable may still run those of an earlier one."""
    if attempt == 0:
        return submission.requests
    repeated = submission.build_repeat([request.id for request in submission.requests])
    return tuple(replace(request, id=f"{request.id}{ATTEMPT_MARK}{attempt}") for request in repeated)


def restore_request_id(event: EngineEvent) -> EngineEvent:
    """Return an event of a repeated request with the id of the first attempt."""
    id = event.request_id.rpartition(ATTEMPT_MARK)[0]
    return event._replace(request_id=id) if isinstance(event, Token) else replace(event, request_id=id)


def read_result(answer: bytes) -> Any:
    """Return the result of a call from the answer of a replica, or raise its error."""
    value, error = unpack("function", answer)
    if error is not None:
        raise error
    return value


def get_process_id(request_id: str) -> str:
    """Return the `PROCESS_ID` of the process that sent a request.

    >>> get_process_id("0f3a.2-response-1")
    '0f3a'
    """
    return request_id.partition(".")[0]
