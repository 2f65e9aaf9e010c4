"""Measures and bars of the workloads: medians over alternating runs, and ratios to llama-server.

Contains arithmetic only. The names of measures are keys of `results/agents.json`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from report import QUICK_TOLERANCE
from workload_runner import Reply, WorkloadRun

MAX_COMPUTED_RATIO = 1.05  # to the tokens that an ideal cache computes, for every workload
MAX_FREE_SECONDS = 1.0  # until the engine serves the next request after a client disconnected
MIN_TIMED_TOKENS = 64  # of a prefill that shows the speed of a server
KEEPING = "llama-server, keeping"
IDEAL = "llama-server, ideal"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Upper limit of one measure: of its value, or of its ratio to the one of llama-server."""

    measure: str
    limit: float
    ratio: bool = True
    exact: bool = False  # a count, which has no noise
    full: bool = False  # meaningful only with long prompts
    peer: str = "llama-server"
    reference: str = ""  # measure of the peer; empty: the same one


BARS: dict[str, tuple[Bar, ...]] = {
    "a": (Bar(measure="total", limit=1.05),),
    "b": (Bar(measure="total", limit=0.6),),
    "c": (Bar(measure="total", limit=0.4),),
    "d": (Bar(measure="total", limit=1.05), Bar(measure="cache_bytes", limit=0.4, exact=True, full=True, peer=KEEPING)),
    "e": (Bar(measure="first_after_restart", limit=0.05, full=True),),
    "f": (Bar(measure="gap_largest", limit=0.25, full=True), Bar(measure="streams", limit=1.3, full=True)),
    "g": (Bar(measure="free", limit=MAX_FREE_SECONDS, ratio=False),),
    "h": (Bar(measure="total", limit=1.05),),
    "i": (),
    "j": (),
    "k": (Bar(measure="total", limit=0.8),),
    "l": (Bar(measure="total", limit=0.25, full=True),),
    "m": (),
}
# Every workload but (l), whose bar is lower than what an ideal cache of llama-server would reach in it. The time with
# an ideal cache is measured where llama-server computes notably more (`MEASURED_IDEAL`), and estimated elsewhere.
IDEAL_BAR = Bar(measure="total", limit=1.05, full=True, reference="ideal")
MEASURED_IDEAL_BAR = Bar(measure="total", limit=1.05, full=True, peer=IDEAL)
MEASURED_IDEAL = "bcdem"
WITHOUT_IDEAL_BAR = "l"
COMPUTED_BAR = Bar(measure="excess", limit=MAX_COMPUTED_RATIO, ratio=False, exact=True)
# In (l), each child of a hybrid model computes the five tokens between the history and its task, because a checkpoint
# there costs more. They are 0.4 % of the workload, and a sixth of the quick one.
COMPUTED_BARS = {
    "k": replace(COMPUTED_BAR, limit=1.02),
    "l": replace(COMPUTED_BAR, limit=1.02, full=True),
}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the measured value at a quantile, 0 if there are no values.

    >>> quantile([3, 1, 2], 0.5), quantile([], 0.5)
    (2, 0.0)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summarize(run: WorkloadRun) -> dict[str, float]:
    """Return the measures of one run. Times are in seconds."""
    replies = run.replies
    gaps = [gap for reply in replies if not reply.ask.after for gap in reply.gaps]
    first_token_seconds = [reply.first_token_seconds for reply in replies]
    computed, needed = sum(reply.computed_tokens for reply in replies), sum(reply.needed_tokens for reply in replies)
    measures = {
        "total": run.seconds,
        "ideal": estimate_ideal_seconds(run),
        "first_median": quantile(first_token_seconds, 0.5),
        "first_p95": quantile(first_token_seconds, 0.95),
        "gap_median": quantile(gaps, 0.5),
        "gap_p95": quantile(gaps, 0.95),
        "gap_largest": max(gaps, default=0.0),
        "computed": computed,
        "needed": needed,
        "excess": computed / needed,
        "cache_bytes": run.cache_bytes,
        "resident": run.resident_bytes,
    }
    return measures | summarize_events(run)


def estimate_ideal_seconds(run: WorkloadRun) -> float:
    """Return the seconds that the run would have taken if its server had computed only the needed tokens.

    Its own speed counts: the time to the first tokens of long prefills, of concurrent ones together.
    """
    concurrent = {id(reply) for group in run.groups for reply in group}
    groups = [*run.groups, *([reply] for reply in run.replies if id(reply) not in concurrent)]
    timed = [group for group in groups if sum(reply.computed_tokens for reply in group) >= MIN_TIMED_TOKENS]
    computed = sum(reply.computed_tokens for group in timed for reply in group)
    if not computed:
        return run.seconds
    seconds = sum(
        max(reply.sent_at + reply.first_token_seconds for reply in group) - min(reply.sent_at for reply in group)
        for group in timed
    )
    excess = sum(reply.computed_tokens - reply.needed_tokens for reply in run.replies)
    return run.seconds - excess * seconds / computed


def summarize_events(run: WorkloadRun) -> dict[str, float]:
    """Return the measures of workloads with a restart, a disconnect, or a long prompt among streams."""
    measures: dict[str, float] = {}
    if any(reply.calls for reply in run.replies):
        measures["generated"] = sum(reply.generated_tokens for reply in run.replies)
    if after_restart := [reply.first_token_seconds for reply in run.replies if reply.after_restart]:
        measures["first_after_restart"] = max(after_restart)
    if after_disconnect := [reply.first_token_seconds for reply in run.replies if reply.after_disconnect]:
        measures["free"] = max(after_disconnect)
    if disturbed_groups := [group for group in run.groups if any(reply.ask.after for reply in group)]:
        disturbed = disturbed_groups[0]
        streams = [reply for reply in disturbed if not reply.ask.after]
        undisturbed = next(group for group in run.groups if group is not disturbed)
        measures["gap_largest"] = max(gap for reply in streams for gap in reply.gaps)
        measures["streams"] = get_duration(streams)
        measures["slowdown"] = get_duration(streams) / get_duration(undisturbed)
        measures["first_of_the_long"] = next(reply.first_token_seconds for reply in disturbed if reply.ask.after)
    return measures


def get_duration(replies: Sequence[Reply]) -> float:
    """Return the seconds from the first request to the last chunk."""
    return max(reply.chunk_times[-1] for reply in replies) - min(reply.sent_at for reply in replies)


@dataclass
class Verdict:
    """A bar and the measured value."""

    bar: Bar
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        unit = f"of {self.bar.peer}" if self.bar.ratio else "s" if self.bar.measure == "free" else "of needed"
        unit += " with an ideal cache" if self.bar.reference == "ideal" else ""
        return f"{self.bar.measure} {self.value:.3f} {unit}, at most {self.limit:g}{'' if self.passed else ': MISSED'}"


@dataclass
class Result:
    """All runs of one workload on one model."""

    letter: str
    name: str
    model: str
    runs: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # by server, in the order of the pairs
    skipped: str = ""  # reason
    seconds: float = 0.0  # of all runs

    def get_median(self, peer: str, measure: str) -> float:
        return statistics.median(run[measure] for run in self.runs[peer])

    def get_medians(self, peer: str) -> dict[str, float]:
        return {measure: self.get_median(peer, measure) for measure in self.runs[peer][0]}

    def get_ideal_ratio(self) -> float:
        """Return the share of its time that llama-server would take with an ideal cache."""
        ideal = self.get_median(IDEAL, "total") if IDEAL in self.runs else self.get_median("llama-server", "ideal")
        return ideal / self.get_median("llama-server", "total")

    def judge(self, quick: bool) -> list[Verdict]:
        """Judge all bars of this workload: counts by the worst run, times by the medians."""
        if self.skipped:
            return []
        bars = [COMPUTED_BARS.get(self.letter, COMPUTED_BAR), *BARS[self.letter]]
        if self.letter not in WITHOUT_IDEAL_BAR:
            bars.append(MEASURED_IDEAL_BAR if IDEAL in self.runs else IDEAL_BAR)
        return [self._judge_bar(bar, quick) for bar in bars if not (quick and bar.full)]

    def _judge_bar(self, bar: Bar, quick: bool) -> Verdict:
        limit = bar.limit * QUICK_TOLERANCE if quick and not bar.exact else bar.limit
        if not bar.ratio:
            return Verdict(bar, max(run[bar.measure] for run in self.runs["afterglow"]), limit)
        reference = self.get_median(bar.peer, bar.reference or bar.measure)
        ratio = self.get_median("afterglow", bar.measure) / reference if reference else float("inf")
        return Verdict(bar, ratio, limit)


def run_alternating(
    pairs: int,
    peers: Sequence[str],
    run: Callable[[str, int], dict[str, float]],
    prepare: Callable[[int], None] = lambda pair: None,
) -> dict[str, list[dict[str, float]]]:
    """Run every server once per pair, after `prepare`. The order alternates from pair to pair.

    >>> order = []
    >>> _ = run_alternating(2, ["x", "y"], lambda peer, pair: order.append(peer) or {}, order.append)
    >>> order
    [0, 'x', 'y', 1, 'y', 'x']
    """
    runs: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
    for pair in range(pairs):
        prepare(pair)
        for peer in peers if pair % 2 == 0 else reversed(peers):
            runs[peer].append(run(peer, pair))
    return runs
