"""What a server did, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from afterglow.engine.request import Usage
from afterglow.engine.services import Numbers

TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
GAPS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "afterglow_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        tokens = "Tokens of prompts and answers; cached ones were not computed again"
        self.tokens = Counter("afterglow_tokens", tokens, ["model", "kind"], registry=registry)
        self.first = Histogram(
            "afterglow_first_token_seconds", "Time to the first token", ["model"], buckets=FIRST, registry=registry
        )
        self.gaps = Histogram(
            "afterglow_token_gap_seconds", "Time between two tokens", ["model"], buckets=GAPS, registry=registry
        )
        self.inside = Gauge("afterglow_answers", "Answers that run or wait", ["model"], registry=registry)
        self.waiting = Gauge("afterglow_answers_waiting", "Answers that wait", ["model"], registry=registry)
        self.restarts = Gauge("afterglow_engine_restarts", "Engines started again", ["model"], registry=registry)
        self.engine = Gauge("afterglow_engine", "The engine's own counters", ["model", "counter"], registry=registry)
        guessed = "Guessing ahead: drafted, accepted, their mean length, and the seconds saved"
        self.speculation = Gauge("afterglow_speculation", guessed, ["model", "number"], registry=registry)
        kept = "What is kept in RAM and on disk: bytes, limit, and what came of it"
        self.cache = Gauge("afterglow_cache", kept, ["model", "tier", "counter"], registry=registry)

    def watch(self, model: str) -> Watch:
        """For one answer."""
        return Watch(self, model)

    def note_engine(self, model: str, numbers: Numbers) -> None:
        for name, value in numbers.counters.items():
            self.engine.labels(model, name).set(value)
        for name in ("drafted", "accepted", "mean_length", "seconds_saved"):
            self.speculation.labels(model, name).set(getattr(numbers.speculation, name))
        for tier, usage in numbers.tiers.items():
            kept = {"bytes": usage.nbytes, "limit": usage.limit, **asdict(usage.counters)}
            for name, number in kept.items():
                self.cache.labels(model, tier, name).set(number)

    def note_usage(self, model: str, usages: Iterable[Usage]) -> None:
        """Tokens of answers to one prompt."""
        for usage in usages:
            self.tokens.labels(model, "prompt").inc(usage.prompt)
            self.tokens.labels(model, "cached").inc(usage.cached)
            self.tokens.labels(model, "media").inc(usage.media)
            self.tokens.labels(model, "media_cached").inc(usage.media_cached)
            self.tokens.labels(model, "generated").inc(usage.generated)
            self.tokens.labels(model, "drafted").inc(usage.drafted)
            self.tokens.labels(model, "accepted").inc(usage.accepted)

    def page(self) -> bytes:
        return generate_latest(self.registry)


class Watch:
    """Measures one answer as it comes."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._first = metrics.first.labels(model)
        self._gaps = metrics.gaps.labels(model)
        self._last = time.monotonic()
        self._begun = False

    def token(self) -> None:
        now = time.monotonic()
        (self._gaps if self._begun else self._first).observe(now - self._last)
        self._last, self._begun = now, True
