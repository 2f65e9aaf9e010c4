"""What the runs of a workload say: medians over alternating runs, ratios to llama-server, and the bars.

Pure: numbers in, numbers out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from playing import Played, Reply

TOKENS = 1.05  # of what an ideal cache computes, for every workload
FREE = 1.0  # seconds until the engine is free after a client went away
KEEPING = "llama-server, keeping"
QUICK = 1.5  # short runs of little work are not held to more than this many times a bar in time


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One measure that has to stay under a limit: as it is, or as a ratio to llama-server's."""

    measure: str
    limit: float
    ratio: bool = True
    exact: bool = False  # a count, which no noise can move
    full: bool = False  # means something only where prompts are long
    peer: str = "llama-server"


BARS: dict[str, tuple[Bar, ...]] = {
    "a": (Bar(measure="total", limit=1.05),),
    "b": (Bar(measure="total", limit=0.6),),
    "c": (Bar(measure="total", limit=0.4),),
    "d": (Bar(measure="total", limit=1.05), Bar(measure="cache_bytes", limit=0.4, exact=True, full=True, peer=KEEPING)),
    "e": (Bar(measure="first_after_restart", limit=0.05, full=True),),
    "f": (Bar(measure="gap_largest", limit=0.25, full=True), Bar(measure="streams", limit=1.3, full=True)),
    "g": (Bar(measure="free", limit=FREE, ratio=False),),
    "h": (Bar(measure="total", limit=1.05),),
    "i": (),
    "j": (),
}
EVERY = Bar(measure="excess", limit=TOKENS, ratio=False, exact=True)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so many do not exceed; 0 where there are none.

    >>> quantile([3, 1, 2], 0.5), quantile([], 0.5)
    (2, 0.0)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summary(played: Played) -> dict[str, float]:
    """One run in numbers. Times are seconds."""
    replies = played.replies
    running = [reply for reply in replies if not reply.ask.after]
    gaps = [gap for reply in running for gap in reply.gaps]
    computed, needed = sum(reply.computed for reply in replies), sum(reply.needed for reply in replies)
    numbers = {
        "total": played.seconds,
        "first_median": quantile([reply.first for reply in replies], 0.5),
        "first_p95": quantile([reply.first for reply in replies], 0.95),
        "gap_median": quantile(gaps, 0.5),
        "gap_p95": quantile(gaps, 0.95),
        "gap_largest": max(gaps, default=0.0),
        "computed": computed,
        "needed": needed,
        "excess": computed / needed,
        "cache_bytes": played.cache_bytes,
        "resident": played.resident,
    }
    return numbers | special(played)


def special(played: Played) -> dict[str, float]:
    """What only some workloads have: a restart, a disconnect, a long prompt among streams."""
    numbers: dict[str, float] = {}
    if after := [reply.first for reply in played.replies if reply.restarted]:
        numbers["first_after_restart"] = max(after)
    if free := [reply.first for reply in played.replies if reply.freed]:
        numbers["free"] = max(free)
    if disturbed := [group for group in played.groups if any(reply.ask.after for reply in group)]:
        company = [reply for reply in disturbed[0] if not reply.ask.after]
        alone = next(group for group in played.groups if group is not disturbed[0])
        numbers["gap_largest"] = max(gap for reply in company for gap in reply.gaps)
        numbers["streams"] = duration(company)
        numbers["slowdown"] = duration(company) / duration(alone)
        numbers["first_of_the_long"] = next(reply.first for reply in disturbed[0] if reply.ask.after)
    return numbers


def duration(replies: Sequence[Reply]) -> float:
    """Seconds from the first asking to the last piece."""
    return max(reply.times[-1] for reply in replies) - min(reply.asked for reply in replies)


@dataclass
class Judged:
    """A bar and where we stand."""

    bar: Bar
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        of = f"of that of {self.bar.peer}" if self.bar.ratio else "s" if self.bar.measure == "free" else "of needed"
        return f"{self.bar.measure} {self.value:.3f} {of}, at most {self.limit:g}{'' if self.passed else ': MISSED'}"


@dataclass
class Result:
    """All runs of one workload on one model."""

    letter: str
    name: str
    model: str
    runs: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # by server, in the order of the pairs
    skipped: str = ""
    seconds: float = 0.0  # that all of them took

    def median(self, peer: str, measure: str) -> float:
        return statistics.median(run[measure] for run in self.runs[peer])

    def medians(self, peer: str) -> dict[str, float]:
        return {measure: self.median(peer, measure) for measure in self.runs[peer][0]}

    def judged(self, quick: bool) -> list[Judged]:
        """Every bar of this workload. Counts take the worst run, times the medians."""
        if self.skipped:
            return []
        return [self._judge(bar, quick) for bar in (EVERY, *BARS[self.letter]) if not (quick and bar.full)]

    def _judge(self, bar: Bar, quick: bool) -> Judged:
        limit = bar.limit * QUICK if quick and not bar.exact else bar.limit
        if not bar.ratio:
            return Judged(bar, max(run[bar.measure] for run in self.runs["afterglow"]), limit)
        theirs = self.median(bar.peer, bar.measure)
        return Judged(bar, self.median("afterglow", bar.measure) / theirs if theirs else float("inf"), limit)


def alternating(
    pairs: int,
    peers: Sequence[str],
    run: Callable[[str, int], dict[str, float]],
    begin: Callable[[int], None] = lambda pair: None,
) -> dict[str, list[dict[str, float]]]:
    """Each pair, once it has begun, runs every server once; who is first changes from pair to pair.

    >>> order = []
    >>> _ = alternating(2, ["x", "y"], lambda peer, pair: order.append(peer) or {}, order.append)
    >>> order
    [0, 'x', 'y', 1, 'y', 'x']
    """
    runs: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
    for pair in range(pairs):
        begin(pair)
        for peer in peers if pair % 2 == 0 else reversed(peers):
            runs[peer].append(run(peer, pair))
    return runs
