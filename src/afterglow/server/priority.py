"""Priorities of requests: vLLM's `priority`, OpenAI's `service_tier`, and the lines of batches.

The engine schedules higher numbers first, and those below 0 are background work. vLLM's field has the opposite sign.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Annotated, Literal, TypeAlias

import pydantic

from afterglow.server.errors import invalid_request_error
from afterglow.server.logs import get_record

TIER_PRIORITIES = {"priority": 10, "fast": 10, "flex": -10}  # of the engine; other tiers have the default, 0
MAX_PRIORITY = 2**31 - 1  # of a request, in both directions
BATCH_PRIORITY = -(2**31)  # of the engine: every request goes before the lines of batches

PriorityField: TypeAlias = Annotated[
    Annotated[int, pydantic.Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None,
    pydantic.Field(
        description="Order of scheduling, as in vLLM: lower values go first. Default: 0. Above 0: background work, "
        "which gives way to all other requests."
    ),
]
ServiceTier: TypeAlias = Annotated[
    Literal["auto", "default", "flex", "scale", "priority", "fast"] | None,
    pydantic.Field(
        description="`priority` and `fast`: before other requests, as `priority` -10. `flex`: background work, as "
        "`priority` 10. Others: the default."
    ),
]
_is_batch_line: ContextVar[bool] = ContextVar("is_batch_line", default=False)


@contextlib.contextmanager
def run_as_batch_line() -> Iterator[None]:
    """Give the request in this context the lowest priority."""
    token = _is_batch_line.set(True)
    try:
        yield
    finally:
        _is_batch_line.reset(token)


def is_batch_line() -> bool:
    """Whether the current request is a line of a batch."""
    return _is_batch_line.get()


def get_engine_priority(priority: int | None, service_tier: str | None) -> int:
    """Return the priority for the engine, or raise status 400 if the two fields of a request contradict each other.

    >>> get_engine_priority(5, None), get_engine_priority(None, "flex"), get_engine_priority(None, "auto")
    (-5, -10, 0)
    """
    if is_batch_line():
        for name, value in {"priority": priority, "service_tier": TIER_PRIORITIES.get(service_tier or "")}.items():
            if value and not get_record().accept_hint(name):
                message = f"`{name}` has no effect in a batch: its lines have the lowest priority"
                raise invalid_request_error(name, message)
        return BATCH_PRIORITY
    if priority is not None and service_tier in TIER_PRIORITIES:
        message = "`priority` and `service_tier` exclude each other: set only one of them"
        raise invalid_request_error("service_tier", message)
    return TIER_PRIORITIES.get(service_tier or "", 0) if priority is None else -priority


def get_served_tier(service_tier: str | None) -> str:
    """Return the tier that a response names.

    >>> get_served_tier("flex"), get_served_tier("auto")
    ('flex', 'default')
    """
    priority = 0 if is_batch_line() else TIER_PRIORITIES.get(service_tier or "", 0)
    return "priority" if priority > 0 else "flex" if priority < 0 else "default"
