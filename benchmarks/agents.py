"""What agents do all day, against llama-server of the same build: same model, same threads, alternating, over HTTP.

Ten workloads (`workloads.py`) on a model with attention and on a hybrid one. For each: time to the first token, total
time, gaps between tokens, memory, and tokens computed beside those that a cache that forgets nothing would compute.

    python benchmarks/agents.py [--quick] [--only a,b] [--model smollm2|hybrid] [--pairs N] [--threads N]

A ratio is ours to llama-server's median. `--quick` plays the same workloads with less in them, once each. Counts are
held to the same bars, times to half as much again because a short run is mostly noise, and what only means something
with long prompts (a restart, a long prompt among streams, bytes of the cache) is shown and not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import conditions
import hybrid
from measures import BARS, Result, alternating, summary
from peers import PEERS, KeepingLlamaServer, Shape, absent, started
from playing import Player, Reader
from workloads import WORKLOADS, Workload

from afterglow import registry
from afterglow.cli.serve import serve
from afterglow.llama.model import LlamaModel, ModelSettings

MODELS = {"smollm2": lambda: registry.resolve("smollm2", fetch=True), "hybrid": hybrid.path}
PROJECTORS = {"hybrid": hybrid.projector}
PAIRS, FEW = 5, 2  # an hour has no room for more
# Where a few per cent decide, every pair has servers of its own: of two equal processes one is faster by up to 5 %, for
# as long as it runs, by where its memory happens to lie.
CLOSE = "ah"
QUICK_SLOTS, QUICK_CONTEXT = 9, 2048  # one pair of servers for all
SHOWN = ("total", "first_median", "first_p95", "gap_median", "gap_p95", "gap_largest")


class Bench:
    """One model: its servers while they are needed, and the runs of its workloads."""

    def __init__(self, model: str, path: Path, *, quick: bool, threads: int, pairs: int) -> None:
        self.model, self.path = model, path
        self.projector: Callable[[], Path] | None = None  # what lets it see
        self.quick, self.threads, self.pairs = quick, threads, pairs
        self._stack = contextlib.ExitStack()
        self._players: dict[str, Player] = {}
        self._shape: Shape | None = None

    def results(self, letters: Sequence[str]) -> Iterator[Result]:
        with self._stack, LlamaModel.load(self.path, ModelSettings(vocab_only=True)) as model:
            reader = Reader(model)
            self._stack.callback(reader.close)
            servers = self._stack.enter_context(contextlib.ExitStack())
            for letter in letters:
                began = time.perf_counter()
                workload = WORKLOADS[letter]("example", self.quick)
                result = Result(letter, workload.name, self.model, skipped=self._lacks(workload))
                if not result.skipped:
                    result.runs = self._compare(letter, self._shape_for(workload, model), reader, servers)
                if letter == "d" and not self.quick:
                    result.runs[KeepingLlamaServer.name] = [self._keeping(workload, model, reader)]
                result.seconds = time.perf_counter() - began
                yield result

    def _compare(
        self, letter: str, shape: Shape, reader: Reader, servers: contextlib.ExitStack
    ) -> dict[str, list[dict[str, float]]]:
        def begin(pair: int) -> None:
            if pair == 0 or letter in CLOSE:
                self._serve(shape, reader, servers)

        names = [kind.name for kind in PEERS]
        return alternating(self._pairs_of(letter), names, self._runner(letter), begin)

    def _pairs_of(self, letter: str) -> int:
        """Where no time is compared, two show what there is to see."""
        return self.pairs if any(bar.ratio for bar in BARS[letter]) else min(self.pairs, FEW)

    def _lacks(self, workload: Workload) -> str:
        if workload.needs != "pictures":
            return ""
        if "projector" not in inspect.signature(serve).parameters:
            return "the server reads no pictures yet"
        return "" if self.projector else "there is no projector for this model"

    def _shape_for(self, workload: Workload, model: LlamaModel) -> Shape:
        slots = QUICK_SLOTS if self.quick else workload.slots
        context = QUICK_CONTEXT if self.quick else workload.context
        projector = self.projector() if self.projector and workload.needs == "pictures" else None
        sizes = {"threads": self.threads, "slots": slots, "context": context}
        return Shape(model=self.path, projector=projector, ends=model.vocabulary.eog_tokens, **sizes)

    def _serve(self, shape: Shape, reader: Reader, servers: contextlib.ExitStack) -> None:
        """Fresh servers; where there is little time, the same for all."""
        if self.quick and shape == self._shape:
            return
        servers.close()
        peers = servers.enter_context(started(shape))
        self._shape, self._players = shape, {peer.name: Player(peer, reader) for peer in peers}
        for name, player in self._players.items():  # what every process pays once
            player.play(WORKLOADS["i"](f"warming {name}", True))

    def _keeping(self, workload: Workload, model: LlamaModel, reader: Reader) -> dict[str, float]:
        """Once, for its bytes: the other one keeps nothing here."""
        with started(self._shape_for(workload, model), (KeepingLlamaServer,)) as (peer,):
            return summary(Player(peer, reader).play(workload))

    def _runner(self, letter: str):  # type: ignore[no-untyped-def]
        def run(peer: str, pair: int) -> dict[str, float]:
            # The same texts for both; other ones for the next pair, so that nothing is known yet.
            return summary(self._players[peer].play(WORKLOADS[letter](f"{letter} {pair}", self.quick)))

        return run


def show(result: Result, quick: bool) -> None:
    """A block of lines for one workload."""
    print(f"\n({result.letter}) {result.name}, {result.model}")
    if result.skipped:
        print(f"    skipped: {result.skipped}")
        return
    for peer in result.runs:
        numbers = result.medians(peer)
        times = "  ".join(f"{measure} {numbers[measure]:.3f}" for measure in SHOWN)
        print(f"    {peer:13} {times}")
        others = {name: value for name, value in numbers.items() if name not in SHOWN}
        counts = f"computed {others.pop('computed'):,.0f} of {others.pop('needed'):,.0f} needed"
        sizes = f"cache {others.pop('cache_bytes') / 1e6:.1f} MB  resident {others.pop('resident') / 1e6:.0f} MB"
        rest = "  ".join(f"{name} {value:.3f}" for name, value in others.items())
        print(f"    {'':13} {counts}  {sizes}  {rest}")
    for judged in result.judged(quick):
        print(f"      {judged}")
    print(f"      {len(result.runs['afterglow'])} pairs in {result.seconds:.0f} s")
    sys.stdout.flush()


def as_json(results: Sequence[Result], chosen: argparse.Namespace) -> dict[str, object]:
    """What is kept of a run: medians, bars, and the conditions."""
    rows = []
    for result in results:
        row: dict[str, object] = {"workload": result.letter, "name": result.name, "model": result.model}
        if result.skipped:
            rows.append(row | {"skipped": result.skipped})
            continue
        bars = [
            {"measure": one.bar.measure, "value": round(one.value, 4), "limit": one.limit, "passed": one.passed}
            for one in result.judged(chosen.quick)
        ]
        row["pairs"] = len(result.runs["afterglow"])
        row["medians"] = {
            peer: {name: round(value, 4) for name, value in result.medians(peer).items()} for peer in result.runs
        }
        rows.append(row | {"bars": bars})
    settings = {"quick": chosen.quick, "threads": chosen.threads}
    return {"benchmark": "agents", **settings, **conditions.now(), "absent": absent(), "rows": rows}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="less in each workload, once, under 90 s")
    arguments.add_argument("--only", default="".join(WORKLOADS), help="letters of workloads, such as a,b")
    arguments.add_argument("--model", choices=[*MODELS, "both"], default="both")
    arguments.add_argument("--pairs", type=int, help=f"alternating runs ({PAIRS}; 1 if quick)")
    arguments.add_argument("--threads", type=int, default=2)
    chosen = arguments.parse_args()
    letters = [letter for letter in chosen.only if letter in WORKLOADS]
    results: list[Result] = []
    for model in MODELS if chosen.model == "both" else [chosen.model]:
        pairs = chosen.pairs or (1 if chosen.quick else PAIRS)
        bench = Bench(model, MODELS[model](), quick=chosen.quick, threads=chosen.threads, pairs=pairs)
        bench.projector = PROJECTORS.get(model)
        for result in bench.results(letters):
            show(result, chosen.quick)
            results.append(result)
    for name, reason in absent().items():
        print(f"\n{name} is not compared: {reason}")
    print(json.dumps(as_json(results, chosen)))
    return 0 if all(one.passed for result in results for one in result.judged(chosen.quick)) else 1


if __name__ == "__main__":
    sys.exit(main())
