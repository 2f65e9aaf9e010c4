"""Statistics and cache contents of several replicas as those of one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

from afterglow.engine.host.remote_calls import CacheContents, EngineStats, SpeculationStats
from afterglow.engine.inspect.cache import TierUsage
from afterglow.engine.kvcache.prefix_cache import ForgetReport
from afterglow.engine.types.counters import TierCounters

MAXIMA = ("max_batch_jobs",)  # counters that are not totals
OWN_TIERS = ("ram",)  # of which each replica has its own; the others are shared


def merge_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the totals of all replicas."""
    if len(stats) == 1:
        return stats[0]
    counters = merge_counters([one.counters for one in stats])
    steps = counters["draft_steps"]
    return EngineStats(
        counters=counters,
        tiers=merge_tiers([one.tiers for one in stats]),
        speculation=SpeculationStats(
            draft_tokens=counters["draft_tokens"],
            accepted_tokens=counters["accepted_tokens"],
            mean_draft_length=counters["draft_tokens"] / steps if steps else 0.0,
            seconds_saved=sum(one.speculation.seconds_saved for one in stats),
            drafters=stats[0].speculation.drafters,
        ),
    )


def merge_contents(contents: Sequence[CacheContents]) -> CacheContents:
    """Return the sequences and checkpoints of all replicas. Sequences are numbered through."""
    if len(contents) == 1:
        return contents[0]
    per_replica = len(contents[0].sequences)
    return CacheContents(
        sequences=tuple(
            replace(sequence, number=index * per_replica + sequence.number)
            for index, one in enumerate(contents)
            for sequence in one.sequences
        ),
        checkpoints=tuple(checkpoint for one in contents for checkpoint in one.checkpoints),
        tiers=merge_tiers([one.tiers for one in contents]),
        counters=merge_counters([one.counters for one in contents]),
        busy=any(one.busy for one in contents),
    )


def merge_counters(counters: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the sums of counters by name.

    >>> merge_counters([{"decodes": 2, "max_batch_jobs": 3}, {"decodes": 1, "max_batch_jobs": 1}])
    {'decodes': 3, 'max_batch_jobs': 3}
    """
    combine = {name: max if name in MAXIMA else sum for name in counters[0]}
    return {name: combine[name](one[name] for one in counters) for name in counters[0]}


def merge_tiers(tiers: Sequence[dict[str, TierUsage]]) -> dict[str, TierUsage]:
    """Return the usage of each tier: the sum of those that replicas have for themselves, else what all of them see."""
    return {name: _merge_tier(name, [one[name] for one in tiers if name in one]) for name in tiers[0]}


def _merge_tier(name: str, usages: Sequence[TierUsage]) -> TierUsage:
    combine = sum if name in OWN_TIERS else max
    kinds = Counter[str]()
    for usage in usages:
        for kind, nbytes in usage.by_kind.items():
            kinds[kind] = combine((kinds[kind], nbytes))
    counters = TierCounters()
    for field in fields(TierCounters):
        setattr(counters, field.name, sum(getattr(usage.counters, field.name) for usage in usages))
    return TierUsage(
        nbytes=combine(usage.nbytes for usage in usages),
        by_kind=dict(kinds),
        limit_bytes=combine(usage.limit_bytes for usage in usages),
        counters=counters,
    )


def merge_forget_reports(reports: Sequence[ForgetReport]) -> ForgetReport:
    """Return what all replicas removed. Blocks on disk count once for each replica that knew them."""
    merged = ForgetReport()
    for field in fields(ForgetReport):
        setattr(merged, field.name, sum(getattr(report, field.name) for report in reports))
    return merged
