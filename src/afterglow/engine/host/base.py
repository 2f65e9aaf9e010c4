"""Base class of the hosts: what follows from `submit_together` and `call`."""

from __future__ import annotations

import abc
import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from afterglow.closeable import Closeable
from afterglow.engine.engine import Engine
from afterglow.engine.host.loop import call_with_sequence
from afterglow.engine.host.stream import EventStream, build_failed_stream
from afterglow.engine.kvcache.prefix_cache import CLOSE_TIMEOUT_SECONDS
from afterglow.engine.types.counters import StoreReport
from afterglow.engine.types.request import Request
from afterglow.errors import InvalidArgument

ResultT = TypeVar("ResultT")


class EngineHost(Closeable, abc.ABC):
    """Runs engines of one model. By default there is one engine."""

    store_report: StoreReport | None  # set by `close`

    @property
    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Whether an engine runs."""

    @property
    @abc.abstractmethod
    def has_given_up(self) -> bool:
        """Whether no engine runs or will run again, so that every request and call raises `EngineCrashed`."""

    @property
    @abc.abstractmethod
    def restarts(self) -> int:
        """Number of engines started after a crash."""

    @abc.abstractmethod
    def submit_together(self, requests: Sequence[Request]) -> list[EventStream]:
        """Submit several requests at once, so that a common prefix is prefilled once."""

    @abc.abstractmethod
    def call(self, function: Callable[[Engine], ResultT | Future[ResultT]]) -> ResultT:
        """Run a function on the engine and return its result, or that of its future."""

    @abc.abstractmethod
    def cancel(self, id: str) -> None:
        """Cancel a request, even during a decode. An unknown id is ignored."""

    @abc.abstractmethod
    def attach_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver events in an event loop, without a thread in between."""

    @abc.abstractmethod
    def close(self, store_timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """End every request with `Closed`, with `store_timeout` seconds for the prefix cache."""

    def submit(self, request: Request) -> EventStream:
        """Submit a request without blocking. An invalid request gets its error as its only event."""
        try:
            return self.submit_together([request])[0]
        except InvalidArgument as error:
            return build_failed_stream(request.id, error)

    def call_each(self, function: Callable[[Engine], ResultT | Future[ResultT]]) -> list[ResultT]:
        """Run a function on every engine of the host."""
        return [self.call(function)]

    def call_on_sequence(self, function: Callable[..., ResultT], sequence: int | None) -> tuple[ResultT, int]:
        """Run a function on the engine of a sequence; return the result and the number of the first sequence there."""
        return self.call(functools.partial(call_with_sequence, function=function, sequence=sequence)), 0

    def select(self) -> EngineHost:
        """Return the host for calls that belong together."""
        return self
