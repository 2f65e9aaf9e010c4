"""Metrics with the names of llama-server, for all models together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics import MetricWrapperBase

from afterglow.server.metrics import Metrics


def render_metrics(metrics: Metrics) -> bytes:
    """Render llama-server's metrics from those of the server, in the Prometheus text format."""
    lines = []
    for name, kind, description, value in list_metrics(metrics):
        name = f"llamacpp:{name}"
        lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}", f"{name} {value:.12g}"]
    return "".join(f"{line}\n" for line in lines).encode()


def list_metrics(metrics: Metrics) -> Iterator[tuple[str, str, str, float]]:
    """Yield name, type, description and value of each metric."""
    tokens, seconds = sum_by(metrics.tokens, "kind"), sum_by(metrics.seconds, "kind")
    engine = sum_by(metrics.engine_counters, "counter")
    in_flight = sum(sum_by(metrics.choices_in_flight, "model").values())
    waiting = sum(sum_by(metrics.choices_waiting, "model").values())
    computed = tokens["prompt"] - tokens["cached"]
    prompt_rate, generated_rate = metrics.take_rates()
    yield "prompt_tokens_total", "counter", "Prompt tokens that were computed", computed
    yield "prompt_tokens_cached_total", "counter", "Prompt tokens that were a prefix hit", tokens["cached"]
    yield "prompt_seconds_total", "counter", "Seconds of prefill", seconds["prefill"]
    yield "tokens_predicted_total", "counter", "Generated tokens", tokens["generated"]
    yield "tokens_predicted_seconds_total", "counter", "Seconds of decoding", seconds["decode"]
    yield "n_decode_total", "counter", "Decodes of all engines", engine["decodes"]
    yield "n_tokens_max", "counter", "Most tokens of one request, prompt and output together", metrics.max_tokens
    yield "spec_decode_num_draft_tokens_total", "counter", "Draft tokens", tokens["draft"]
    yield "spec_decode_num_accepted_tokens_total", "counter", "Draft tokens that were accepted", tokens["accepted"]
    yield "spec_decode_num_drafts_total", "counter", "Decodes that verified draft tokens", engine["draft_steps"]
    yield "prompt_tokens_seconds", "gauge", "Prompt tokens per second since the last scrape", prompt_rate
    yield "predicted_tokens_seconds", "gauge", "Generated tokens per second since the last scrape", generated_rate
    yield "requests_processing", "gauge", "Choices that run", in_flight - waiting
    yield "requests_deferred", "gauge", "Choices that wait for a sequence", waiting
    busy = engine["batch_jobs"] / engine["decodes"] if engine["decodes"] else 0.0
    yield "n_busy_slots_per_decode", "gauge", "Mean number of sequences in a decode", busy


def sum_by(metric: MetricWrapperBase, label: str) -> Counter[str]:
    """Return the values of a metric by one label, summed over the others."""
    sums: Counter[str] = Counter()
    for family in metric.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                sums[sample.labels[label]] += sample.value  # type: ignore[assignment]
    return sums
