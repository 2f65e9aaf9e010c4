"""Events and requests of a server, without a server: the ring, its readers, and the states of a request."""

from __future__ import annotations

import asyncio
import json

from afterglow.engine.types.request import PlannedPrefix, PrefillProgress, Usage
from afterglow.errors import Cancelled, EngineCrashed
from afterglow.server.events import EventRing
from afterglow.server.history import RequestHistory, extract_difference

PLAN = PlannedPrefix(
    kind="load", tier="disk", reused_entries=80, seconds_saved=2.0, shared_entries=80, evicted_entries=0,
    cause="fully reused", common_length=80, cached_entries=tuple(range(1000)),
)  # fmt: skip


def read(ring: EventRing, salt: str, after: int | None) -> list[dict]:
    """Return what a reader gets before it would wait."""

    async def collect() -> list[dict]:
        events, lines = ring.read(salt, after), []
        while True:
            try:
                lines.append(await asyncio.wait_for(anext(events), 0.05))
            except TimeoutError:
                return [json.loads(line.decode().rpartition("data: ")[2]) for line in lines]

    return asyncio.run(collect())


def start(history: RequestHistory, id: str, salt: str = ""):
    return history.start(id, model="tiny", path="/v1/chat/completions", salt=salt, first_words="hello")


def test_a_reader_that_asks_for_events_that_are_gone_gets_a_gap():
    ring = EventRing(capacity=3)
    for number in range(5):
        ring.add("engine", model="tiny", state=str(number))
    assert [event.get("state", event["type"]) for event in read(ring, "", 0)] == ["gap", "2", "3", "4"]
    assert [event.get("state", event["type"]) for event in read(ring, "", 2)] == ["2", "3", "4"]
    assert read(ring, "", None) == []


def test_a_closed_ring_ends_its_readers():
    async def run() -> int:
        ring = EventRing()
        events = [event async for event in close_soon(ring)]
        return len(events) + ring.reader_count

    async def close_soon(ring: EventRing):
        asyncio.get_running_loop().call_later(0.01, ring.close)
        async for event in ring.read("", 0):
            yield event

    assert asyncio.run(run()) == 0


def test_a_request_passes_through_its_states():
    ring = EventRing()
    request = start(RequestHistory(ring), "one")
    assert request.state == "queued"
    request.record_progress(PrefillProgress("7", 80, 100, prompt_tokens=100, cached_tokens=80, plan=PLAN))
    assert (request.state, request.tier, request.seconds_saved) == ("prefill", "disk", 2.0)
    request.record_reason("because")
    request.record_progress(PrefillProgress("7", 90, 100, prompt_tokens=100, cached_tokens=80))
    assert request.describe()["prefill_done"] == 90
    for _ in range(3):
        request.record_token()
    assert request.state == "decoding"
    request.finish([Usage(prompt_tokens=100, cached_tokens=80, generated_tokens=3)], ["stop"], 1)
    request.fail(Cancelled("too late"))
    assert request.describe()["state"] == "finished"
    types = [event["type"] for event in read(ring, "", 0)]
    assert types == ["progress", "plan", "progress", "first_token", "finished"]


def test_the_plan_of_the_first_choice_is_recorded_after_the_first_token_of_another_one():
    ring = EventRing()
    request = start(RequestHistory(ring), "one")
    request.record_token()
    request.record_progress(PrefillProgress("7", 80, 100, prompt_tokens=100, cached_tokens=80, plan=PLAN))
    request.record_reason("because")
    assert request.state == "decoding"
    *_, plan = read(ring, "", 0)
    assert (plan["type"], plan["reused"], plan["computed"], plan["tier"]) == ("plan", 80, 20, "disk")


def test_an_error_and_a_cancel_are_different_ends():
    history = RequestHistory(EventRing())
    failed, cancelled = start(history, "one"), start(history, "two")
    failed.fail(EngineCrashed("it died"))
    cancelled.fail(Cancelled("the client is gone"))
    assert (failed.state, cancelled.state) == ("failed", "cancelled")


def test_another_tenant_gets_sizes_without_ids():
    ring = EventRing()
    request = start(RequestHistory(ring), "one", salt="a")
    request.report("failed", error="a text")
    (own,), (other,) = read(ring, "a", 0), read(ring, "b", 0)
    assert (own["request"], own["error"]) == ("one", "a text")
    assert other.keys() == {"type", "time", "model"}


def test_the_history_is_bounded_and_keeps_live_requests():
    history = RequestHistory(EventRing(), limit=3)
    live = start(history, "live")
    for number in range(5):
        start(history, str(number)).fail(Cancelled("over"))
    assert [request.id for request in history.list_newest("", 10)] == ["4", "3", "live"]
    assert history.find("live", "") is live
    assert history.find("live", "other") is None


def test_two_generations_of_one_http_request_have_two_ids():
    history = RequestHistory(EventRing())
    assert start(history, "one").id != start(history, "one").id


def test_only_the_entries_around_a_difference_are_stored():
    difference = extract_difference(list(range(100_000)), PLAN)
    assert difference.position == 80
    assert len(difference.prompt) == len(difference.cached) == 400
    far = extract_difference(list(range(100_000)), PlannedPrefix(**{**asdict_of(PLAN), "common_length": 50_000}))
    stored = (far.head, far.before, far.prompt, far.cached)
    assert sum(part.nbytes for part in stored) < 8_000


def asdict_of(plan: PlannedPrefix) -> dict:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}
