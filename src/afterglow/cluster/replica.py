"""One replica on a Ray cluster: an engine process, and what the router learns about it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from afterglow.api.load import build_engine_settings, build_engine_spec, resolve_draft, resolve_model_path
from afterglow.api.options import LoadOptions, check_options
from afterglow.cluster.host import get_process_id
from afterglow.engine.host import remote_calls
from afterglow.engine.host.child_main import pack, to_portable_error, to_portable_event, unpack
from afterglow.engine.host.loop import try_call
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.host.stream import EventStream
from afterglow.engine.types.request import EngineEvent


class EngineReplica:
    """Deployment class of Ray Serve. The ingress sends requests that are ready for the engine, and gets its events."""

    def __init__(self, model: str, options: LoadOptions) -> None:
        """Load the model; `options` are those of `afterglow.load`. The file is looked up on this machine."""
        from ray import serve

        self._id = serve.get_replica_context().replica_id.unique_id
        checked = check_options(LoadOptions, options)
        path = resolve_model_path(model, fetch=False, needs_trial=True)
        draft = resolve_draft(checked["draft"], fetch=False)
        settings = build_engine_settings(None, checked, options, label=str(path))
        self._host = EngineProcess(build_engine_spec(path, checked, settings, draft=draft))
        self._sequences = self._host.call(remote_calls.get_engine_info).sequences
        self._running: Counter[str] = Counter()  # requests, by the process that sent them

    async def generate(self, content: bytes, *, names: Sequence[bytes], entries: int) -> AsyncIterator[bytes]:
        """Yield the pickled events of requests. `names` and `entries` are for the router. Closing it cancels them."""
        self._host.attach_event_loop(asyncio.get_running_loop())
        requests = unpack("request", content)
        streams = self._host.submit_together(requests)
        sender = get_process_id(requests[0].id)
        self._running[sender] += len(streams)
        try:
            async for events in merge_events(streams):
                yield pack("events", [to_portable_event(event) for event in events])
        finally:
            self._running[sender] -= len(streams)
            self._running += Counter()  # without those that have none
            for stream in streams:
                stream.cancel()

    async def call(self, content: bytes, *, replica: str | None = None) -> bytes | None:
        """Run a pickled function on the engine; return its pickled result and error.

        Returns None if it is meant for another `replica`: the router sends it elsewhere only if that one is lost.
        """
        if replica not in (None, self._id):
            return None
        value, error = await asyncio.to_thread(try_call, self._host.call, unpack("function", content))
        return pack("function", (value, None if error is None else to_portable_error(error)))

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what the router needs: names of the blocks in RAM, measured speeds, and running requests."""
        report = await asyncio.to_thread(self._host.call, remote_calls.get_replica_report)
        return {"report": pack("report", report), "running": dict(self._running), "sequences": self._sequences}

    async def check_health(self) -> None:
        """Raise if the engine cannot be restarted: Ray then replaces the replica."""
        if self._host.has_given_up:
            raise RuntimeError("the engine could not be restarted")

    def __del__(self) -> None:
        host = getattr(self, "_host", None)
        if host is not None:
            host.close()


async def merge_events(streams: Sequence[EventStream]) -> AsyncIterator[list[EngineEvent]]:
    """Yield the events of several requests as they arrive."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield [event]
        return
    arrivals: asyncio.Queue[EngineEvent | None] = asyncio.Queue()

    async def read(stream: EventStream) -> None:
        async for event in stream:
            await arrivals.put(event)
        await arrivals.put(None)

    readers = [asyncio.ensure_future(read(stream)) for stream in streams]
    try:
        running = len(readers)
        while running:
            if (arrival := await arrivals.get()) is None:
                running -= 1
            else:
                yield [arrival]
    finally:
        for reader in readers:
            reader.cancel()
