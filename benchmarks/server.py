"""The server against llama-server of the same llama.cpp build: same model, same threads, alternating, over HTTP.

Tokens per second of one stream and of eight at once, the time to the first token of the eighth turn of a growing
conversation, and how long a cancelled 3,000-token prompt keeps the engine busy.

    python benchmarks/server.py [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from dataclasses import dataclass

from measures import QUICK
from peers import Peer, Shape, started

from afterglow import registry
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel, ModelSettings

CONTEXT, SLOTS = 4096, 8


@dataclass
class Row:
    """One comparison. `ratio` is ours to theirs; `bar` is what it must reach, or for times stay under."""

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

    def widen(self) -> None:
        """So little was measured that only what is badly wrong can be seen."""
        if self.bar is not None:
            self.bar *= 1 / QUICK if self.larger_is_better else QUICK

    @property
    def passed(self) -> bool:
        if self.bar is None:
            return True
        return self.ratio >= self.bar if self.larger_is_better else self.ratio <= self.bar


def messages(text: str) -> list[dict]:
    return [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": text}]


def tokens_per_second(server: Peer, length: int, tag: str, count: int = 1) -> float:
    """Tokens of `count` streams over the time of all: of one from its first token, of several from their asking."""
    times: list[list[float]] = [[] for _ in range(count)]

    def ask(index: int) -> None:
        question = f"{tag} {index}: write a long story about a river, a mill and a child, with many details."
        body = {"messages": messages(question), "max_tokens": length, "seed": index, **server.endless()}
        times[index] += [chunk.when for chunk in server.chat(body) if chunk.text]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(count)]
    asked = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = times[0][0] if count == 1 else asked
    return (sum(len(one) for one in times) - count) / (max(one[-1] for one in times) - first)


def eighth_turn(server: Peer, tag: str) -> float:
    """Seconds to the first token of the eighth question of a conversation that grows."""
    talk = messages(f"{tag}: let us talk about rivers. " + "The river is long and wide. " * 20)
    for turn in range(8):
        asked = time.perf_counter()
        chunks = [chunk for chunk in server.chat({"messages": talk, "max_tokens": 16}) if chunk.text]
        said = "".join(chunk.text for chunk in chunks)
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Question {turn}: and then?"}]
    return chunks[0].when - asked


def freed_after_cancel(server: Peer, tag: str, length: int) -> float:
    """Seconds from hanging up in the middle of a long prompt to the first token of somebody else's short question."""
    body = {"messages": messages(f"{tag} " + "The river is long and wide. " * (length // 7)), "max_tokens": 4}
    connection = server.post(body)
    time.sleep(1.0)  # by now it is being computed
    connection.close()
    asked = time.perf_counter()
    answer = server.chat({"messages": messages(f"{tag}: hello"), "max_tokens": 2})
    return next(chunk.when for chunk in answer if chunk.text) - asked


def compared(
    name: str, unit: str, bar: float | None, measure, ours: Peer, theirs: Peer, pairs: int, better: bool = True
) -> Row:
    """Medians of alternating pairs; the first pair warms up and is not counted."""
    values: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        order = (0, 1) if pair % 2 else (1, 0)
        for which in order:
            value = measure((ours, theirs)[which], f"{name} {pair}")
            if pair:
                values[which].append(value)
    ratios = sorted(one / other for one, other in zip(*values, strict=True))
    row = Row(name, statistics.median(values[0]), statistics.median(values[1]), unit, bar, better)
    row.spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return row


def measured(quick: bool, threads: int) -> list[Row]:
    path = registry.pull("smollm2")
    with LlamaModel.load(path, ModelSettings(vocab_only=True)) as model:
        ends = model.vocabulary.eog_tokens
    shape = Shape(model=path, threads=threads, slots=SLOTS, context=CONTEXT, ends=ends)
    pairs, more, length = (3, 3, 24) if quick else (7, 9, 128)
    with started(shape) as (ours, theirs):
        return [
            compared("one stream", "tok/s", 0.97, lambda s, t: tokens_per_second(s, length, t), ours, theirs, pairs),
            compared(
                "eight streams", "tok/s", 0.97, lambda s, t: tokens_per_second(s, length, t, 8), ours, theirs, more
            ),
            compared("eighth turn", "s", 1.05, eighth_turn, ours, theirs, 1 if quick else pairs, False),
            freed(ours, theirs, 1000 if quick else 3000, 1 if quick else 3),
        ]


def freed(ours: Peer, theirs: Peer, length: int, times: int) -> Row:
    """Ours must free the engine within a second; theirs is shown beside it."""
    mine = [freed_after_cancel(ours, f"cancel {n}", length) for n in range(times)]
    peer = freed_after_cancel(theirs, "cancel", length)
    row = Row("free after a cancelled prompt", max(mine), peer, "s", None)
    row.spread = f"{min(mine):.2f} to {max(mine):.2f} s, at most 1 s"
    if max(mine) > 1.0:
        row.bar, row.larger_is_better = 0.0, False
    return row


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="fewer pairs, shorter answers, wider bars")
    arguments.add_argument("--threads", type=int, default=2)
    chosen = arguments.parse_args()
    rows = measured(chosen.quick, chosen.threads)
    if chosen.quick:
        for row in rows:
            row.widen()
    print(f"{'':32} {'afterglow':>10} {'llama-server':>13} {'':6} {'ratio':>6} {'bar':>6}")
    for row in rows:
        bar = "" if row.bar is None else f"{row.bar:.2f}"
        mark = "" if row.passed else "MISSED"
        print(
            f"{row.name:32} {row.ours:10.2f} {row.theirs:13.2f} {row.unit:6} {row.ratio:6.2f} {bar:>6} "
            f"({row.spread}) {mark}"
        )
    print(json.dumps({"benchmark": "server", "build": get_library().build, "rows": [vars(row) for row in rows]}))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
