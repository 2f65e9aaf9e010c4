"""Decode speed beside busy programs: afterglow, afterglow with a fixed number of threads, and llama-server.

Each busy program is an endless loop on one core. The fair share of a server is the part of its quiet speed that remains
if the cores are divided equally among its threads and the loops: cores / (threads + loops). The servers take turns in
each round, and medians of the rounds are compared. Speculation is off: it hides the speed of decodes. Exits with 1 if
afterglow is below 0.8 of the fair share of the fixed number of threads, or below 0.98 of it on quiet cores.

    python benchmarks/busy.py [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from peers import Afterglow, LlamaServer, Peer, ServerSize, start_peers
from synthetic_inputs import random_text

from afterglow import registry
from afterglow.llama.model import LlamaModel

LOOPS = (0, 1, 2)
MIN_FAIR_SHARE = 0.8
MIN_QUIET_SPEED = 0.98
PROMPT_WORDS = 20
SETTLE_SECONDS = 0.3  # for the scheduler of the system, after the loops have started


class AdaptiveAfterglow(Afterglow):
    """afterglow without speculation."""

    def build_command(self) -> list[str]:
        return [*super().build_command(), "--speculation", "off"]


class FixedAfterglow(AdaptiveAfterglow):
    """afterglow whose number of threads does not follow the load."""

    name = "afterglow, fixed threads"

    def build_environment(self) -> dict[str, str]:
        return {**super().build_environment(), "OMP_DYNAMIC": "false"}


KINDS: tuple[type[Peer], ...] = (AdaptiveAfterglow, FixedAfterglow, LlamaServer)


@contextlib.contextmanager
def run_loops(count: int) -> Iterator[None]:
    """Run endless loops in processes of their own."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure_speed(peer: Peer, text: str, tokens: int) -> float:
    """Return the tokens per second of one answer after its first token."""
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 1.0, "seed": 1, **peer.build_ignore_eos()}
    received = [chunk.received_at for chunk in peer.chat(body) if chunk.text]
    return (tokens - 1) / (received[-1] - received[0])


def compute_fair_share(threads: int, loops: int) -> float:
    """Return the part of its quiet speed that a program with `threads` threads keeps beside `loops` busy loops.

    >>> compute_fair_share(threads=1, loops=0)
    1.0
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(1.0, cores / (threads + loops))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter answers")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    rounds, tokens = (2, 100) if arguments.quick else (7, 200)
    path = registry.resolve("smollm2", fetch=True)
    with LlamaModel.load(path, trust=True) as model:
        eog_tokens = model.vocabulary.eog_tokens
    size = ServerSize(model=path, threads=arguments.threads, slots=1, context=1024, eog_tokens=eog_tokens)
    speeds: dict[tuple[str, int], list[float]] = {(kind.name, loops): [] for kind in KINDS for loops in LOOPS}
    with start_peers(size, KINDS) as peers:
        for peer in peers:
            measure_speed(peer, random_text("warm up", PROMPT_WORDS), 16)
        for number in range(rounds):
            for loops in LOOPS:
                for peer in peers if number % 2 else peers[::-1]:
                    with run_loops(loops):
                        text = random_text(f"round {number}", PROMPT_WORDS)
                        speeds[peer.name, loops].append(measure_speed(peer, text, tokens))
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    print(f"tokens per second with {arguments.threads} threads, median of {rounds}, share of the fair share")
    for (name, loops), values in speeds.items():
        share = medians[name, loops] / (medians[name, 0] * compute_fair_share(arguments.threads, loops))
        print(
            f"{name:26} {loops} loops {medians[name, loops]:7.1f} ({min(values):.1f} to {max(values):.1f})  {share:.2f}"
        )
    passed = True
    for loops in LOOPS:
        fair = medians[FixedAfterglow.name, 0] * compute_fair_share(arguments.threads, loops)
        bar = MIN_FAIR_SHARE if loops else MIN_QUIET_SPEED
        bar = round(0.9 * bar, 3) if arguments.quick else bar  # two rounds are noisy
        ratio = medians[AdaptiveAfterglow.name, loops] / fair
        passed &= ratio >= bar
        print(f"{loops} loops: {ratio:.2f} of the fair share, bar {bar}: {'ok' if ratio >= bar else 'MISSED'}")
    rows = [{"server": name, "loops": loops, "speeds": values} for (name, loops), values in speeds.items()]
    print(json.dumps({"benchmark": "busy", "threads": arguments.threads, "rows": rows}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
