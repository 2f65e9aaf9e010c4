"""What a server did, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from afterglow.engine.host.remote_calls import EngineStats
from afterglow.engine.types.request import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BUCKETS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
INTER_TOKEN_BUCKETS_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "afterglow_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        tokens = "Tokens of prompts and answers; cached ones were not computed again"
        self.tokens = Counter("afterglow_tokens", tokens, ["model", "kind"], registry=registry)
        self.time_to_first_token = Histogram(
            "afterglow_first_token_seconds",
            "Time to the first token",
            ["model"],
            buckets=FIRST_TOKEN_BUCKETS_SECONDS,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "afterglow_token_gap_seconds",
            "Time between two tokens",
            ["model"],
            buckets=INTER_TOKEN_BUCKETS_SECONDS,
            registry=registry,
        )
        self.choices_in_flight = Gauge("afterglow_answers", "Answers that run or wait", ["model"], registry=registry)
        self.choices_waiting = Gauge("afterglow_answers_waiting", "Answers that wait", ["model"], registry=registry)
        self.restarts = Gauge("afterglow_engine_restarts", "Engines started again", ["model"], registry=registry)
        self.engine_counters = Gauge(
            "afterglow_engine", "The engine's own counters", ["model", "counter"], registry=registry
        )
        guessed = "Guessing ahead: drafted, accepted, their mean length, and the seconds saved"
        self.speculation = Gauge("afterglow_speculation", guessed, ["model", "number"], registry=registry)
        kept = "What is kept in RAM and on disk: bytes, limit, and what came of it"
        self.cache_tiers = Gauge("afterglow_cache", kept, ["model", "tier", "counter"], registry=registry)

    def build_latency_recorder(self, model: str) -> LatencyRecorder:
        """For one answer."""
        return LatencyRecorder(self, model)

    def record_engine_stats(self, model: str, stats: EngineStats) -> None:
        for name, value in stats.counters.items():
            self.engine_counters.labels(model, name).set(value)
        for name in ("draft_tokens", "accepted_tokens", "mean_draft_length", "seconds_saved"):
            self.speculation.labels(model, name).set(getattr(stats.speculation, name))
        for tier, usage in stats.tiers.items():
            kept = {"bytes": usage.nbytes, "limit": usage.limit_bytes, **asdict(usage.counters)}
            for name, number in kept.items():
                self.cache_tiers.labels(model, tier, name).set(number)

    def record_usage(self, model: str, usages: Iterable[Usage]) -> None:
        """Tokens of answers to one prompt."""
        for usage in usages:
            self.tokens.labels(model, "prompt").inc(usage.prompt_tokens)
            self.tokens.labels(model, "cached").inc(usage.cached_tokens)
            self.tokens.labels(model, "media").inc(usage.media_tokens)
            self.tokens.labels(model, "media_cached").inc(usage.cached_media_tokens)
            self.tokens.labels(model, "generated").inc(usage.generated_tokens)
            self.tokens.labels(model, "drafted").inc(usage.draft_tokens)
            self.tokens.labels(model, "accepted").inc(usage.accepted_tokens)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class LatencyRecorder:
    """Measures one answer as it comes."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._time_to_first_token = metrics.time_to_first_token.labels(model)
        self._inter_token_latency = metrics.inter_token_latency.labels(model)
        self._last_token_time = time.monotonic()
        self._has_first_token = False

    def record_token(self) -> None:
        now = time.monotonic()
        (self._inter_token_latency if self._has_first_token else self._time_to_first_token).observe(
            now - self._last_token_time
        )
        self._last_token_time, self._has_first_token = now, True
