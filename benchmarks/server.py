"""The server against llama-server of the same llama.cpp build: same model, same threads, alternating, over HTTP.

Measures tokens per second of one stream and of eight concurrent ones, time to first token of the eighth turn of a
growing conversation, and how long a cancelled prompt of 3,000 tokens keeps the engine busy.

    python benchmarks/server.py [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from measures import QUICK_TOLERANCE
from peers import Peer, ServerSize, start_peers

from afterglow import registry
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel, ModelSettings

CONTEXT, SLOTS = 4096, 8


@dataclass
class Row:
    """One comparison. The bar applies to the ratio: a minimum if larger is better, else a maximum."""

    name: str
    ours: float
    theirs: float
    unit: str
    bar: float | None
    larger_is_better: bool = True
    spread: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs if self.theirs else float("inf")

    def widen_bar(self) -> None:
        """Widen the bar for a quick run, which measures too little to detect small differences."""
        if self.bar is not None:
            self.bar *= 1 / QUICK_TOLERANCE if self.larger_is_better else QUICK_TOLERANCE

    @property
    def passed(self) -> bool:
        if self.bar is None:
            return True
        return self.ratio >= self.bar if self.larger_is_better else self.ratio <= self.bar


def build_messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": text}]


def measure_tokens_per_second(server: Peer, length: int, tag: str, count: int = 1) -> float:
    """Measure the total speed of `count` streams: of one from its first token, of several from their requests."""
    times: list[list[float]] = [[] for _ in range(count)]

    def run(index: int) -> None:
        question = f"{tag} {index}: write a long story about a river, a mill and a child, with many details."
        body = {"messages": build_messages(question), "max_tokens": length, "seed": index, **server.build_ignore_eos()}
        times[index] += [chunk.received_at for chunk in server.chat(body) if chunk.text]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    sent_at = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    started = times[0][0] if count == 1 else sent_at
    return (sum(map(len, times)) - count) / (max(stream[-1] for stream in times) - started)


def measure_eighth_turn(server: Peer, tag: str) -> float:
    """Measure the time to first token of the eighth turn of a growing conversation."""
    messages = build_messages(f"{tag}: let us talk about rivers. " + "The river is long and wide. " * 20)
    for turn in range(8):
        sent_at = time.perf_counter()
        chunks = [chunk for chunk in server.chat({"messages": messages, "max_tokens": 16}) if chunk.text]
        answer = "".join(chunk.text for chunk in chunks)
        messages += [{"role": "assistant", "content": answer}]
        messages += [{"role": "user", "content": f"Question {turn}: and then?"}]
    return chunks[0].received_at - sent_at


def measure_free_after_cancel(server: Peer, tag: str, length: int) -> float:
    """Measure the time from a disconnect during a long prefill to the first token of another client's request."""
    body = {"messages": build_messages(f"{tag} " + "The river is long and wide. " * (length // 7)), "max_tokens": 4}
    connection = server.post(body)
    time.sleep(1.0)  # until the prefill runs
    connection.close()
    sent_at = time.perf_counter()
    chunks = server.chat({"messages": build_messages(f"{tag}: hello"), "max_tokens": 2})
    return next(chunk.received_at for chunk in chunks if chunk.text) - sent_at


def compare(
    name: str, unit: str, bar: float, measure: Callable[[Peer, str], float], ours: Peer, theirs: Peer, pairs: int,
    larger_is_better: bool = True,
) -> Row:  # fmt: skip
    """Compare medians of alternating pairs. The first pair is a warm-up."""
    values: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        for side in (0, 1) if pair % 2 else (1, 0):
            value = measure((ours, theirs)[side], f"{name} {pair}")
            if pair:
                values[side].append(value)
    ratios = sorted(our / their for our, their in zip(*values, strict=True))
    row = Row(name, statistics.median(values[0]), statistics.median(values[1]), unit, bar, larger_is_better)
    row.spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return row


def compare_free_after_cancel(ours: Peer, theirs: Peer, length: int, repeat: int) -> Row:
    """Check that afterglow frees the engine within a second. llama-server is printed beside it."""
    our_seconds = [measure_free_after_cancel(ours, f"cancel {number}", length) for number in range(repeat)]
    their_seconds = measure_free_after_cancel(theirs, "cancel", length)
    row = Row("free after a cancelled prompt", max(our_seconds), their_seconds, "s", None)
    row.spread = f"{min(our_seconds):.2f} to {max(our_seconds):.2f} s, at most 1 s"
    if max(our_seconds) > 1.0:
        row.bar, row.larger_is_better = 0.0, False
    return row


def measure_all(quick: bool, threads: int) -> list[Row]:
    path = registry.pull("smollm2")
    with LlamaModel.load(path, ModelSettings(vocab_only=True)) as model:
        eog_tokens = model.vocabulary.eog_tokens
    size = ServerSize(model=path, threads=threads, slots=SLOTS, context=CONTEXT, eog_tokens=eog_tokens)
    pairs, eight_stream_pairs, length = (3, 3, 24) if quick else (7, 9, 128)

    def measure_one_stream(server: Peer, tag: str) -> float:
        return measure_tokens_per_second(server, length, tag)

    def measure_eight_streams(server: Peer, tag: str) -> float:
        return measure_tokens_per_second(server, length, tag, 8)

    with start_peers(size) as (ours, theirs):
        return [
            compare("one stream", "tok/s", 0.97, measure_one_stream, ours, theirs, pairs),
            compare("eight streams", "tok/s", 0.97, measure_eight_streams, ours, theirs, eight_stream_pairs),
            compare("eighth turn", "s", 1.05, measure_eighth_turn, ours, theirs, 1 if quick else pairs, False),
            compare_free_after_cancel(ours, theirs, 1000 if quick else 3000, 1 if quick else 3),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer pairs, shorter answers, wider bars")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    rows = measure_all(arguments.quick, arguments.threads)
    if arguments.quick:
        for row in rows:
            row.widen_bar()
    print(f"{'':32} {'afterglow':>10} {'llama-server':>13} {'':6} {'ratio':>6} {'bar':>6}")
    for row in rows:
        bar = "" if row.bar is None else f"{row.bar:.2f}"
        verdict = "" if row.passed else "MISSED"
        print(
            f"{row.name:32} {row.ours:10.2f} {row.theirs:13.2f} {row.unit:6} {row.ratio:6.2f} {bar:>6} "
            f"({row.spread}) {verdict}"
        )
    print(json.dumps({"benchmark": "server", "build": get_library().build, "rows": [vars(row) for row in rows]}))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
