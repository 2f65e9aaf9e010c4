"""The running and the last finished requests of a server: tokens, tier, seconds, and why tokens were computed."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.types.entries import Entry
from afterglow.engine.types.request import PlannedPrefix, PrefillProgress, Usage
from afterglow.errors import Cancelled
from afterglow.server.errors import to_api_error
from afterglow.server.events import EventRing, EventType

MAX_REQUESTS = 1000
MAX_WORDS_CHARACTERS = 80
SHOWN_ENTRIES = 400  # on each side of a difference, and of the text before it
HEAD_ENTRIES = 64  # of the prompt: they show the role of its first message
BEFORE_ENTRIES = 1024  # before a difference: they show the role of the message that contains it
DECODING_EVENT_SECONDS = 0.25  # between two events of a request that decodes
RequestState: TypeAlias = Literal["queued", "prefill", "decoding", "finished", "failed", "cancelled"]
PREFIXES = {"/v1/messages": "anthropic", "/api/": "ollama"}


@dataclass(frozen=True, slots=True)
class Difference:
    """Entries around the first difference of a prompt and the nearest cached prefix. Media entries are -1."""

    position: int
    head: NDArray[np.int32]  # of the prompt, if `before` does not begin with it
    before: NDArray[np.int32]
    prompt: NDArray[np.int32]
    cached: NDArray[np.int32]

    @property
    def is_visible(self) -> bool:
        """Whether both sides continue after the entries that they share."""
        return bool(len(self.prompt) and len(self.cached))


def extract_difference(entries: Sequence[Entry] | NDArray[np.int64], plan: PlannedPrefix) -> Difference:
    """Copy the entries around the first difference, so that the prompt itself need not be stored.

    >>> plan = PlannedPrefix(
    ...     kind="continue",
    ...     tier="device",
    ...     reused_entries=2,
    ...     seconds_saved=0.0,
    ...     shared_entries=2,
    ...     evicted_entries=0,
    ...     cause="fully reused",
    ...     common_length=2,
    ...     cached_entries=(9, 9),
    ... )
    >>> extract_difference([1, 2, 3, 4], plan).prompt.tolist()
    [3, 4]
    """
    position = plan.common_length
    start = max(0, position - BEFORE_ENTRIES)
    return Difference(
        position=position,
        head=copy_entries(entries[: min(HEAD_ENTRIES, start)]),
        before=copy_entries(entries[start:position]),
        prompt=copy_entries(entries[position : position + SHOWN_ENTRIES]),
        cached=copy_entries(plan.cached_entries[:SHOWN_ENTRIES]),
    )


def copy_entries(entries: Sequence[Entry] | NDArray[np.int64]) -> NDArray[np.int32]:
    """Return a copy with -1 for each media entry."""
    numbers = [int(entry) if isinstance(entry, int | np.integer) else -1 for entry in entries]
    return np.array([max(number, -1) for number in numbers], dtype=np.int32)


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One generation request of a client, with all its choices. It reports its progress as events."""

    id: str
    model: str
    api: str
    salt: str
    first_words: str  # of its newest message
    events: EventRing
    created: float = field(default_factory=time.time)
    state: RequestState = "queued"
    engine_ids: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefill_done: int = 0
    tier: str = "none"
    reason: str = ""
    seconds_saved: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    plan: PlannedPrefix | None = None
    difference: Difference | None = None
    _admitted_at: float = field(default_factory=time.monotonic)
    _planned_at: float | None = None
    _first_token_at: float | None = None
    _last_event_at: float = 0.0

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("queued", "prefill", "decoding")

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding, of all choices together."""
        seconds = self._measure_seconds()[2]
        return (self.generated_tokens - 1) / seconds if seconds > 0 and self.generated_tokens > 1 else 0.0

    def report(self, type: EventType, **fields: Any) -> None:
        """Add an event of this request."""
        self.events.add(type, model=self.model, salt=self.salt, request=self.id, **fields)

    def record_progress(self, progress: PrefillProgress) -> None:
        """Record the progress of the prefill, of which the first one comes with the plan."""
        if not self.is_live:
            return
        if (plan := progress.plan) is not None:
            self.plan, self.tier, self.seconds_saved = plan, plan.tier, plan.seconds_saved
            self.prompt_tokens, self.cached_tokens = progress.prompt_tokens, progress.cached_tokens
        if self.state == "decoding":  # another choice was faster
            return
        if self.state == "queued":
            self.state, self._planned_at = "prefill", time.monotonic()
        # In tokens: an image is one entry and many tokens.
        self.prefill_done = round(progress.share * self.prompt_tokens)
        self.report("progress", done=self.prefill_done, total=self.prompt_tokens)

    def record_reason(self, reason: str) -> None:
        """Record why the rest of the prompt is computed."""
        self.reason = reason
        assert self.plan is not None
        self.report(
            "plan",
            reused=self.cached_tokens,
            computed=self.prompt_tokens - self.cached_tokens,
            kind=self.plan.kind,
            tier=self.tier,
            reason=reason,
        )

    def record_token(self) -> None:
        """Record a generated token."""
        now = time.monotonic()
        self.generated_tokens += 1
        if self._first_token_at is None:
            self.state, self._first_token_at, self.prefill_done = "decoding", now, self.prompt_tokens
            self._last_event_at = now
            self.report("first_token")
        elif now - self._last_event_at >= DECODING_EVENT_SECONDS:
            self._last_event_at = now
            speed = round(self.tokens_per_second, 2)
            self.report("decoding", generated=self.generated_tokens, tokens_per_second=speed)

    def finish(self, usages: Sequence[Usage], finish_reasons: Sequence[str], choices_per_prompt: int) -> None:
        """Record the end of all choices. The choices of one prompt share its prefill, so that it counts once."""
        if not self.is_live:
            return
        prompts = usages[::choices_per_prompt]
        self.prompt_tokens = self.prefill_done = sum(usage.prompt_tokens for usage in prompts)
        self.cached_tokens = sum(usage.cached_tokens for usage in prompts)
        self.generated_tokens = sum(usage.generated_tokens for usage in usages)
        self.queue_seconds = max(usage.queue_seconds for usage in usages)
        self.prefill_seconds = max(usage.prefill_seconds for usage in usages)
        self.decode_seconds = max(usage.decode_seconds for usage in usages)
        self.state = "finished"
        self.report(
            "finished",
            finish_reason=",".join(dict.fromkeys(finish_reasons)),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            seconds=round(time.time() - self.created, 3),
        )

    def fail(self, error: BaseException) -> None:
        """Record that the request ended without a result: an error, or the client cancelled it."""
        if not self.is_live:
            return
        self.queue_seconds, self.prefill_seconds, self.decode_seconds = self._measure_seconds()
        is_cancelled = isinstance(error, Cancelled) or not isinstance(error, Exception)
        self.state = "cancelled" if is_cancelled else "failed"
        self.report("failed", error="cancelled" if is_cancelled else to_api_error(error).message)

    def _measure_seconds(self) -> tuple[float, float, float]:
        """Return the seconds in the queue, in prefill and in decoding, up to now if the request is live."""
        if not self.is_live:
            return self.queue_seconds, self.prefill_seconds, self.decode_seconds
        now = time.monotonic()
        planned_at = now if self._planned_at is None else self._planned_at
        first_token_at = now if self._first_token_at is None else self._first_token_at
        return planned_at - self._admitted_at, first_token_at - planned_at, now - first_token_at

    def describe(self) -> dict[str, Any]:
        """Return the request as JSON values."""
        queue_seconds, prefill_seconds, decode_seconds = self._measure_seconds()
        return {
            "id": self.id,
            "model": self.model,
            "api": self.api,
            "state": self.state,
            "created": round(self.created, 3),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.prompt_tokens - self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "prefill_done": self.prefill_done,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "tier": self.tier,
            "reason": self.reason,
            "queue_seconds": round(queue_seconds, 4),
            "prefill_seconds": round(prefill_seconds, 4),
            "decode_seconds": round(decode_seconds, 4),
            "seconds_saved": round(self.seconds_saved, 4),
            "first_words": self.first_words,
            "has_difference": self.difference is not None and self.difference.is_visible,
        }


class RequestHistory:
    """Requests of a server by id, the newest last: all live ones, and the last finished ones up to a limit."""

    def __init__(self, events: EventRing, limit: int = MAX_REQUESTS) -> None:
        self._events = events
        self._limit = limit
        self._requests: OrderedDict[str, TrackedRequest] = OrderedDict()

    def start(self, id: str, *, model: str, path: str, salt: str, first_words: str) -> TrackedRequest:
        """Add a request that was admitted. `path` is that of its HTTP request."""
        api = next((api for prefix, api in PREFIXES.items() if path.startswith(prefix)), "openai")
        while id in self._requests:
            id += "-2"  # another generation of the same HTTP request
        request = TrackedRequest(id, model, api, salt, shorten_words(first_words), self._events)
        self._requests[id] = request
        if len(self._requests) > self._limit:
            ended = next((id for id, other in self._requests.items() if not other.is_live), None)
            if ended is not None:
                del self._requests[ended]
        return request

    def find(self, id: str, salt: str) -> TrackedRequest | None:
        """Return a request of a tenant."""
        request = self._requests.get(id)
        return request if request is not None and request.salt == salt else None

    def list_newest(self, salt: str, limit: int) -> list[TrackedRequest]:
        """Return the requests of a tenant, newest first."""
        own = [request for request in reversed(self._requests.values()) if request.salt == salt]
        return own[:limit]

    def map_engine_ids(self, model: str, salt: str) -> dict[str, str]:
        """Return the ids of the live requests of a tenant by those that the engine of a model uses."""
        live = (request for request in self._requests.values() if request.is_live and request.model == model)
        return {engine_id: request.id for request in live if request.salt == salt for engine_id in request.engine_ids}


def shorten_words(text: str, limit: int = MAX_WORDS_CHARACTERS) -> str:
    """Return the first words of a text in one line.

    >>> shorten_words("one\\n two three", limit=9)
    'one two…'
    """
    line = " ".join(text[: 4 * limit].split())
    if len(line) <= limit and len(text) <= 4 * limit:
        return line
    return line[: limit - 1].rpartition(" ")[0] + "…" if " " in line[: limit - 1] else line[: limit - 1] + "…"
