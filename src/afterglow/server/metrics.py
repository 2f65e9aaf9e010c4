"""Prometheus metrics of the server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from afterglow.engine.host.remote_calls import EngineStats
from afterglow.engine.types.request import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BUCKETS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
INTER_TOKEN_BUCKETS_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(slots=True)
class SlotCounters:
    """Loads and unloads of one model since the server started."""

    loads: int = 0
    unloads: int = 0
    load_seconds: float = 0.0
    unload_seconds: float = 0.0


@dataclass(slots=True)
class ThroughputWindow:
    """Tokens and seconds of the requests that finished in a window of time.

    >>> window = ThroughputWindow()
    >>> window.add(Usage(prompt_tokens=30, cached_tokens=10, prefill_seconds=0.5))
    >>> window.prompt_rate, window.generated_rate
    (40.0, 0.0)
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generated_seconds: float = 0.0

    def add(self, usage: Usage) -> None:
        """Add the usage of a request."""
        self.prompt_tokens += usage.prompt_tokens - usage.cached_tokens
        self.prompt_seconds += usage.prefill_seconds
        self.generated_tokens += usage.generated_tokens
        self.generated_seconds += usage.decode_seconds

    @property
    def prompt_rate(self) -> float:
        """Computed prompt tokens per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generated_rate(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.generated_seconds if self.generated_seconds else 0.0


class SlotStatus(Protocol):
    """What the metrics read from a model slot."""

    name: str
    counters: SlotCounters
    has_room: bool

    @property
    def nbytes(self) -> Mapping[str, int]: ...


class Metrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, description: str, *labels: str) -> Gauge:
            return Gauge(name, description, ["model", *labels], registry=registry)

        def histogram(name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, description, ["model"], buckets=buckets, registry=registry)

        self.requests = Counter(
            "afterglow_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        self.stalled_connections = Counter(
            "afterglow_stalled_connections", "Connections closed because the client read nothing", registry=registry
        )
        self.volatile_spans = Counter(
            "afterglow_volatile_spans", "Volatile spans of system prompts by rule", ["rule"], registry=registry
        )
        self.tokens = Counter(
            "afterglow_tokens",
            "Prompt, cached, media, generated and draft tokens",
            ["model", "kind"],
            registry=registry,
        )
        self.seconds = Counter(
            "afterglow_seconds", "Seconds of prefill and of decoding", ["model", "kind"], registry=registry
        )
        self.max_tokens = 0  # of one request, prompt and output together
        self.started = int(time.time())
        self._window = ThroughputWindow()
        self.time_to_first_token = histogram(
            "afterglow_time_to_first_token_seconds", "Time to first token", FIRST_TOKEN_BUCKETS_SECONDS
        )
        self.inter_token_latency = histogram(
            "afterglow_inter_token_latency_seconds", "Time between two tokens", INTER_TOKEN_BUCKETS_SECONDS
        )
        self.choices_in_flight = gauge("afterglow_choices_in_flight", "Choices that run or wait")
        self.choices_waiting = gauge("afterglow_choices_waiting", "Choices that wait for a sequence")
        self.restarts = gauge("afterglow_engine_restarts", "Restarts of the engine process")
        self.engine_counters = gauge("afterglow_engine", "Counters of the engine", "counter")
        self.speculation = gauge(
            "afterglow_speculation",
            "Speculative decoding: draft tokens, accepted tokens, mean draft length, seconds saved",
            "statistic",
        )
        self.model_loaded = gauge("afterglow_model_loaded", "Whether the model is loaded")
        self.model_bytes = gauge("afterglow_model_bytes", "Estimated memory of the model if it is loaded", "device")
        self.model_swaps = gauge("afterglow_model_swaps", "Loads and unloads of the model since the start", "kind")
        self.model_swap_seconds = gauge("afterglow_model_swap_seconds", "Seconds of all loads and unloads", "kind")
        self.cache_tiers = gauge("afterglow_cache", "Prefix cache tiers: size, limit and counters", "tier", "counter")

    def build_latency_recorder(self, model: str) -> LatencyRecorder:
        """Return the latency recorder of one choice."""
        return LatencyRecorder(self, model)

    def record_slot(self, slot: SlotStatus) -> None:
        """Set the gauges that mirror the state of a model slot."""
        name, counters = slot.name, slot.counters
        self.model_loaded.labels(name).set(slot.has_room)
        for device, nbytes in slot.nbytes.items():
            self.model_bytes.labels(name, device).set(nbytes if slot.has_room else 0)
        self.model_swaps.labels(name, "load").set(counters.loads)
        self.model_swaps.labels(name, "unload").set(counters.unloads)
        self.model_swap_seconds.labels(name, "load").set(counters.load_seconds)
        self.model_swap_seconds.labels(name, "unload").set(counters.unload_seconds)

    def record_engine_stats(self, model: str, stats: EngineStats) -> None:
        """Set the gauges that mirror the counters of an engine."""
        for name, value in stats.counters.items():
            self.engine_counters.labels(model, name).set(value)
        for name in ("draft_tokens", "accepted_tokens", "mean_draft_length", "seconds_saved"):
            self.speculation.labels(model, name).set(getattr(stats.speculation, name))
        for tier, usage in stats.tiers.items():
            values = {"bytes": usage.nbytes, "limit_bytes": usage.limit_bytes, **asdict(usage.counters)}
            for name, number in values.items():
                self.cache_tiers.labels(model, tier, name).set(number)

    def record_usage(self, model: str, usages: Iterable[Usage]) -> None:
        """Add the token counts of finished choices."""
        for usage in usages:
            self.tokens.labels(model, "prompt").inc(usage.prompt_tokens)
            self.tokens.labels(model, "cached").inc(usage.cached_tokens)
            self.tokens.labels(model, "media").inc(usage.media_tokens)
            self.tokens.labels(model, "cached_media").inc(usage.cached_media_tokens)
            self.tokens.labels(model, "generated").inc(usage.generated_tokens)
            self.tokens.labels(model, "draft").inc(usage.draft_tokens)
            self.tokens.labels(model, "accepted").inc(usage.accepted_tokens)
            self.seconds.labels(model, "prefill").inc(usage.prefill_seconds)
            self.seconds.labels(model, "decode").inc(usage.decode_seconds)
            self.max_tokens = max(self.max_tokens, usage.prompt_tokens + usage.generated_tokens)
            self._window.add(usage)

    def take_rates(self) -> tuple[float, float]:
        """Return prompt and generated tokens per second since the last call, as far as requests have finished."""
        window, self._window = self._window, ThroughputWindow()
        return window.prompt_rate, window.generated_rate

    def render(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class LatencyRecorder:
    """Records time to first token and inter-token latency of one choice."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._time_to_first_token = metrics.time_to_first_token.labels(model)
        self._inter_token_latency = metrics.inter_token_latency.labels(model)
        self._last_token_time = time.monotonic()
        self._has_first_token = False

    def record_token(self) -> None:
        """Record that a token arrived now."""
        now = time.monotonic()
        histogram = self._inter_token_latency if self._has_first_token else self._time_to_first_token
        histogram.observe(now - self._last_token_time)
        self._last_token_time, self._has_first_token = now, True
