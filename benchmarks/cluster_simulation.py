"""Simulation of many replicas under an agent load: hit rate, time to first token and store traffic by routing policy.

Simulated are arrivals, queues and what replicas hold. The routing is the code of `afterglow.engine.host.routing`. The
costs are parameters; the defaults are in `Costs`. Each replica computes one prompt after another; decoding is not
simulated.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import OrderedDict
from dataclasses import dataclass, field

from afterglow.engine.host.routing import ReplicaLoad, ReplicaSpeeds, estimate_first_token_seconds

POLICIES = ("round-robin", "consistent hashing", "expected first token")
REPLICA_COUNTS = (2, 10, 100, 1000)
AGENT_KINDS = 20  # system prompts with tools that sessions share
SYSTEM_TOKENS, TURN_TOKENS = 6000, 800  # of an agent: system prompt and tools; tool results and answer of one turn
MEAN_TURNS = 15
MEAN_PAUSE_SECONDS = 5.0  # for the tools of an agent
UTILIZATION = 0.5  # of the prefill of all replicas, if every token were computed once
TURNS_PER_REPLICA = 60


@dataclass(frozen=True)
class Costs:
    """Costs of a replica and of the store. Those of a token were measured with SmolLM2: see benchmarks/LOG.md."""

    seconds_per_token: float = 0.0095
    bytes_per_token: float = 23_052.0
    store_bytes_per_second: float = 110e6  # one gigabit per second for each replica
    store_latency_seconds: float = 0.02
    replica_tokens: int = 90_000  # that fit into the RAM cache of a replica: 2 GiB

    @property
    def speeds(self) -> ReplicaSpeeds:
        load = self.bytes_per_token / self.store_bytes_per_second
        return ReplicaSpeeds(seconds_per_entry=self.seconds_per_token, load_seconds_per_entry=load)


@dataclass
class SimulatedReplica:
    """Queue and contents of one replica: prefixes by name with their tokens, least recently used first."""

    free_at: float = 0.0
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)
    tokens: int = 0

    def count_cached(self, session: str, kind: str) -> int:
        return max(self.held.get(session, 0), self.held.get(kind, 0))

    def hold(self, name: str, tokens: int, limit: int) -> None:
        self.tokens += tokens - self.held.pop(name, 0)
        self.held[name] = tokens
        while self.tokens > limit and len(self.held) > 1:
            self.tokens -= self.held.popitem(last=False)[1]


@dataclass
class SimulationResult:
    """Totals of one policy with one number of replicas."""

    policy: str
    replicas: int
    prompt_tokens: int = 0
    computed_tokens: int = 0
    needed_tokens: int = 0
    loaded_tokens: int = 0
    seconds: list[float] = field(default_factory=list)  # to the first token
    duration: float = 0.0

    def summarize(self, costs: Costs) -> dict[str, float | str]:
        """Return the row of the table."""
        ordered = sorted(self.seconds)
        return {
            "policy": self.policy,
            "replicas": self.replicas,
            "hit_rate": 1 - self.computed_tokens / self.prompt_tokens,
            "computed_per_needed": self.computed_tokens / self.needed_tokens,
            "median_seconds": statistics.median(ordered),
            "p95_seconds": ordered[int(0.95 * len(ordered))],
            "store_mb_per_second": self.loaded_tokens * costs.bytes_per_token / 1e6 / self.duration,
        }


def simulate(policy: str, count: int, costs: Costs, seed: int = 0, *, has_store: bool = True) -> SimulationResult:
    """Run one policy on `count` replicas until each has served about `TURNS_PER_REPLICA` turns."""
    generator, result = random.Random(seed), SimulationResult(policy, count)
    replicas = [SimulatedReplica() for _ in range(count)]
    idle_heap = [(0.0, number) for number in range(count)]  # by the time at which they are free, perhaps outdated
    turn_seconds = TURN_TOKENS * costs.seconds_per_token
    sessions_per_second = UTILIZATION * count / (turn_seconds * MEAN_TURNS)
    events: list[tuple[float, int, str, str, int, int]] = []  # time, number, session, kind, turn, turns
    stored: dict[str, int] = {}
    kinds: set[str] = set()  # that were computed once
    now, total = 0.0, TURNS_PER_REPLICA * count
    for number in range(total // MEAN_TURNS):
        now += generator.expovariate(sessions_per_second)
        turns = 1 + int(generator.expovariate(1 / (MEAN_TURNS - 1)))
        events.append((now, number, f"session {number}", f"kind {generator.randrange(AGENT_KINDS)}", 0, turns))
    heapq.heapify(events)
    turn_number = 0
    while events:
        now, number, session, kind, turn, turns = heapq.heappop(events)
        tokens = SYSTEM_TOKENS + (turn + 1) * TURN_TOKENS
        in_store = max(stored.get(session, 0), stored.get(kind, 0)) if has_store else 0
        chosen = choose(policy, replicas, idle_heap, turn_number, number, session, kind, tokens, in_store, now, costs)
        replica = replicas[chosen]
        held = replica.count_cached(session, kind)
        loadable = max(0, in_store - held)
        load_seconds = costs.store_latency_seconds + loadable * costs.speeds.load_seconds_per_entry
        if not loadable or load_seconds > loadable * costs.seconds_per_token:
            loadable, load_seconds = 0, 0.0
        computed = tokens - held - loadable
        ready = max(now, replica.free_at) + load_seconds + computed * costs.seconds_per_token
        replica.free_at = ready
        heapq.heappush(idle_heap, (ready, chosen))
        for name, length in ((kind, SYSTEM_TOKENS), (session, tokens)):
            replica.hold(name, length, costs.replica_tokens)
            stored[name] = max(stored.get(name, 0), length)
        result.prompt_tokens += tokens
        result.computed_tokens += computed
        result.loaded_tokens += loadable
        result.needed_tokens += TURN_TOKENS + (0 if kind in kinds else SYSTEM_TOKENS)
        kinds.add(kind)
        result.seconds.append(ready - now)
        result.duration = max(result.duration, ready)
        turn_number += 1
        if turn + 1 < turns:
            pause = generator.expovariate(1 / MEAN_PAUSE_SECONDS)
            heapq.heappush(events, (ready + pause, number, session, kind, turn + 1, turns))
    return result


def choose(
    policy: str,
    replicas: list[SimulatedReplica],
    idle_heap: list[tuple[float, int]],
    turn_number: int,
    number: int,
    session: str,
    kind: str,
    tokens: int,
    in_store: int,
    now: float,
    costs: Costs,
) -> int:
    """Return the number of the replica for a request."""
    if policy == "round-robin":
        return turn_number % len(replicas)
    if policy == "consistent hashing":
        return random.Random(number).randrange(len(replicas))
    while replicas[idle_heap[0][1]].free_at != idle_heap[0][0]:
        heapq.heappop(idle_heap)  # outdated
    candidates = {idle_heap[0][1], *find_holders(replicas, session, kind)}

    def estimate(candidate: int) -> float:
        replica = replicas[candidate]
        queued = max(0.0, replica.free_at - now) / costs.seconds_per_token
        load = ReplicaLoad(
            cached_entries=replica.count_cached(session, kind),
            queued_entries=int(queued),
            sequences=64,
            speeds=costs.speeds,
        )
        return estimate_first_token_seconds(load, tokens, in_store)

    return min(candidates, key=estimate)


def find_holders(replicas: list[SimulatedReplica], session: str, kind: str, limit: int = 4) -> list[int]:
    """Return the least busy replicas that hold the session, or else its system prompt."""
    for name in (session, kind):
        holders = [number for number, replica in enumerate(replicas) if name in replica.held]
        if holders:
            return sorted(holders, key=lambda number: replicas[number].free_at)[:limit]
    return []
