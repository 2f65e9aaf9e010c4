"""Short messages after a long system prompt: time to the first token, against llama-server of the same build.

Both have the system prompt in their cache. llama.cpp's flash attention computes 64 rows together and fewer rows one by
one, so that a message of 63 tokens takes longer than one of 64. afterglow pads such prefills (`backends/padding.py`).

    python benchmarks/padding.py [--quick] [--threads N]

Values are medians over alternating requests, each with another message.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import psutil
from peers import PEERS, Peer, ServerSize, start_peers
from report import Row, print_report
from synthetic_inputs import random_text

from afterglow import registry

SYSTEM_WORDS, QUICK_SYSTEM_WORDS = 2250, 500
MESSAGE_WORDS = (12, 28, 40, 60)  # the last one has more than 64 tokens
REQUESTS, QUICK_REQUESTS = 7, 3
MAX_RATIO = 0.9  # of messages that are padded


def measure_first_token(peer: Peer, system: str, words: int, seed: str) -> tuple[float, int]:
    """Send a message; return the seconds to the first token and the number of computed prompt tokens."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": random_text(seed, words)}]
    started, first, computed = time.perf_counter(), 0.0, 0
    for chunk in peer.chat({"messages": messages, "max_tokens": 1}):
        if chunk.text and not first:
            first = chunk.received_at - started
        computed = chunk.computed_tokens or computed
    return first or time.perf_counter() - started, computed


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    arguments = parser.parse_args()
    system = random_text("system", QUICK_SYSTEM_WORDS if arguments.quick else SYSTEM_WORDS)
    model = registry.resolve("smollm2", fetch=True)
    rows: list[Row] = []
    with start_peers(ServerSize(model=model, threads=arguments.threads, slots=2, context=4096)) as peers:
        for peer in peers:
            measure_first_token(peer, system, 4, "warming")
        for words in MESSAGE_WORDS:
            times: dict[str, list[float]] = {kind.name: [] for kind in PEERS}
            counts: list[int] = []
            for number in range(QUICK_REQUESTS if arguments.quick else REQUESTS):
                for peer in peers if number % 2 else reversed(peers):
                    seconds, computed = measure_first_token(peer, system, words, f"{words} {number}")
                    times[peer.name].append(seconds)
                    counts.append(computed)
            ours, theirs = (statistics.median(times[kind.name]) for kind in PEERS)
            count = statistics.median_low(counts)
            name = f"{count} tokens after a cached system prompt"
            spread = " to ".join(f"{value:.3f}" for value in (min(times[PEERS[0].name]), max(times[PEERS[0].name])))
            bar = MAX_RATIO if 45 <= count < 64 else None
            note = f"llama-server {theirs:.3f} s; {spread}"
            rows.append(Row(name, ours, "s", share=ours / theirs, bar=bar, note=note, full=True))
    return print_report("padding", rows, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
