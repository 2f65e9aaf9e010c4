"""Agent workloads against llama-server of the same build: same model, same threads, alternating, over HTTP.

Runs the thirteen workloads of `workloads.py` on an attention model and on a hybrid one. Measures time to first token,
total time, gaps between tokens, memory, and computed tokens relative to those that a cache without eviction computes.
Beside each ratio it prints the one that llama-server would reach with such a cache. Where llama-server computes notably
more tokens, a third server measures that: before each request, outside of the measured time, its slot computes what an
ideal cache has of the prompt. Less is possible with speculation, forced tokens of a grammar, and stored last logits.

    python benchmarks/agents.py [--quick] [--only a,b] [--model smollm2|hybrid] [--pairs N] [--threads N]

Ratios are medians of afterglow over medians of llama-server. `--quick` runs smaller versions of the workloads, once
each. Counts have the same bars. Times have a tolerance of 50 %, because short runs are mostly noise. Measures that need
long prompts (a restart, a long prompt among streams, bytes of the cache) are printed but not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hybrid
import psutil
from measures import BARS, MEASURED_IDEAL, Result, run_alternating, summarize
from peers import (
    PEERS,
    IdealLlamaServer,
    KeepingLlamaServer,
    Peer,
    RenderingAfterglow,
    ServerSize,
    list_absent_peers,
    start_peers,
)
from workload_runner import AGENT_TEMPLATE, PromptTokenizer, WorkloadRunner
from workloads import WORKLOADS, Workload

from afterglow import registry
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.version import __version__

MODELS = {"smollm2": lambda: registry.resolve("smollm2", fetch=True), "hybrid": hybrid.get_path}
PROJECTORS = {"hybrid": hybrid.get_projector_path}
PAIRS = 5  # more do not fit into an hour
PAIRS_WITHOUT_TIME_BARS = 2
# The bars of these workloads are a few per cent, so every pair has its own servers: of two equal processes one is up to
# 5 % faster for as long as it runs, depending on the placement of its memory.
FRESH_SERVERS_PER_PAIR = "ah"
QUICK_SLOTS, QUICK_CONTEXT = 9, 2048  # one pair of servers for all workloads, except (k)
TIME_MEASURES = ("total", "first_median", "first_p95", "gap_median", "gap_p95", "gap_largest")


class Bench:
    """Runs workloads on one model, and starts the servers they need."""

    def __init__(self, model: str, path: Path, *, quick: bool, threads: int, pairs: int) -> None:
        self.model, self.path = model, path
        self.get_projector_path: Callable[[], Path] | None = None
        self.quick, self.threads, self.pairs = quick, threads, pairs
        self._stack = contextlib.ExitStack()
        self._runners: dict[str, WorkloadRunner] = {}
        self._server_size: ServerSize | None = None

    def run(self, letters: Sequence[str]) -> Iterator[Result]:
        with self._stack, LlamaModel.load(self.path, ModelSettings(vocab_only=True)) as model:
            tokenizer = PromptTokenizer(model)
            self._stack.callback(tokenizer.close)
            servers = self._stack.enter_context(contextlib.ExitStack())
            for letter in letters:
                started = time.perf_counter()
                workload = WORKLOADS[letter]("example", self.quick)
                result = Result(letter, workload.name, self.model, skipped=self._get_skip_reason(workload))
                if not result.skipped:
                    result.runs = self._compare(letter, self._get_server_size(workload, model), tokenizer, servers)
                if letter == "d" and not self.quick:
                    result.runs[KeepingLlamaServer.name] = [
                        self._run_alone(KeepingLlamaServer, workload, model, tokenizer)
                    ]
                if letter == "k" and not self.quick:
                    result.runs[RenderingAfterglow.name] = [
                        self._run_alone(RenderingAfterglow, workload, model, tokenizer)
                    ]
                result.seconds = time.perf_counter() - started
                yield result

    def _compare(
        self, letter: str, size: ServerSize, tokenizer: PromptTokenizer, servers: contextlib.ExitStack
    ) -> dict[str, list[dict[str, float]]]:
        kinds = (*PEERS, IdealLlamaServer) if letter in MEASURED_IDEAL and not self.quick else PEERS

        def prepare(pair: int) -> None:
            if pair == 0 or letter in FRESH_SERVERS_PER_PAIR:
                self._start_servers(kinds, size, tokenizer, servers)

        def run(peer: str, pair: int) -> dict[str, float]:
            # All servers get the same texts; each pair has its own, so that nothing is cached yet.
            return summarize(self._runners[peer].run(WORKLOADS[letter](f"{letter} {pair}", self.quick)))

        return run_alternating(self._get_pairs(letter), [kind.name for kind in kinds], run, prepare)

    def _get_pairs(self, letter: str) -> int:
        has_time_bar = any(bar.ratio for bar in BARS[letter])
        return self.pairs if has_time_bar else min(self.pairs, PAIRS_WITHOUT_TIME_BARS)

    def _get_skip_reason(self, workload: Workload) -> str:
        needs_projector = workload.needs == "pictures" and self.get_projector_path is None
        return "no projector for this model" if needs_projector else ""

    def _get_server_size(self, workload: Workload, model: LlamaModel) -> ServerSize:
        has_shared_server = self.quick and workload.needs != "tools"
        return ServerSize(
            model=self.path,
            projector=self.get_projector_path() if self.get_projector_path and workload.needs == "pictures" else None,
            template=AGENT_TEMPLATE if workload.needs == "tools" else None,
            eog_tokens=model.vocabulary.eog_tokens,
            threads=self.threads,
            slots=QUICK_SLOTS if has_shared_server else workload.slots,
            context=QUICK_CONTEXT if has_shared_server else workload.context,
        )

    def _start_servers(
        self,
        kinds: tuple[type[Peer], ...],
        size: ServerSize,
        tokenizer: PromptTokenizer,
        servers: contextlib.ExitStack,
    ) -> None:
        """Start new servers. Quick runs reuse servers of the same size."""
        if self.quick and size == self._server_size:
            return
        servers.close()
        peers = servers.enter_context(start_peers(size, kinds))
        self._server_size, self._runners = size, {peer.name: WorkloadRunner(peer, tokenizer) for peer in peers}
        for name, runner in self._runners.items():  # warm-up: first-use costs of each process
            runner.run(WORKLOADS["i"](f"warming {name}", True))

    def _run_alone(
        self, kind: type[Peer], workload: Workload, model: LlamaModel, tokenizer: PromptTokenizer
    ) -> dict[str, float]:
        """Run once on another server: llama-server caches nothing in (d) by default; (k) shows what replay saves."""
        with start_peers(self._get_server_size(workload, model), (kind,)) as (peer,):
            return summarize(WorkloadRunner(peer, tokenizer).run(workload))


def print_result(result: Result, quick: bool) -> None:
    """Print the lines of one workload."""
    print(f"\n({result.letter}) {result.name}, {result.model}")
    if result.skipped:
        print(f"    skipped: {result.skipped}")
        return
    for peer in result.runs:
        medians = result.get_medians(peer)
        times = "  ".join(f"{measure} {medians[measure]:.3f}" for measure in TIME_MEASURES)
        print(f"    {peer:13} {times}")
        others = {name: value for name, value in medians.items() if name not in TIME_MEASURES}
        counts = f"computed {others.pop('computed'):,.0f} of {others.pop('needed'):,.0f} needed"
        sizes = f"cache {others.pop('cache_bytes') / 1e6:.1f} MB  resident {others.pop('resident') / 1e6:.0f} MB"
        rest = "  ".join(f"{name} {value:.3f}" for name, value in others.items())
        print(f"    {'':13} {counts}  {sizes}  {rest}")
    ratio = result.get_median("afterglow", "total") / result.get_median("llama-server", "total")
    print(f"      total {ratio:.3f} of llama-server; it would take {result.get_ideal_ratio():.3f} with an ideal cache")
    for verdict in result.judge(quick):
        print(f"      {verdict}")
    print(f"      {len(result.runs['afterglow'])} pairs in {result.seconds:.0f} s")
    sys.stdout.flush()


def to_json(results: Sequence[Result], arguments: argparse.Namespace) -> dict[str, object]:
    """Return the result file of a run: medians, bars and conditions."""
    rows = []
    for result in results:
        row: dict[str, object] = {"workload": result.letter, "name": result.name, "model": result.model}
        if result.skipped:
            rows.append(row | {"skipped": result.skipped})
            continue
        bars = [
            {
                "measure": verdict.bar.measure,
                "value": round(verdict.value, 4),
                "limit": verdict.limit,
                "passed": verdict.passed,
            }
            for verdict in result.judge(arguments.quick)
        ]
        row["pairs"] = len(result.runs["afterglow"])
        row["medians"] = {
            peer: {name: round(value, 4) for name, value in result.get_medians(peer).items()} for peer in result.runs
        }
        rows.append(row | {"bars": bars})
    settings = {"quick": arguments.quick, "threads": arguments.threads}
    return {"benchmark": "agents", **settings, **get_conditions(), "absent": list_absent_peers(), "rows": rows}


def get_conditions() -> dict[str, object]:
    """Return the conditions of a measurement: date, build, machine, and its load by other processes."""
    return {
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "build": get_library().build,
        "processor": get_processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "busy_percent": psutil.cpu_percent(interval=0.5),  # by others: the benchmark is idle now
    }


def get_processor_name() -> str:
    """Return the name of the processor, its architecture if the system does not provide the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller workloads, once each, under 90 s")
    parser.add_argument("--only", default="".join(WORKLOADS), help="letters of workloads, e.g. a,b")
    parser.add_argument("--model", choices=[*MODELS, "both"], default="both")
    parser.add_argument("--pairs", type=int, help=f"number of alternating runs (default {PAIRS}, 1 with --quick)")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    letters = [letter for letter in arguments.only if letter in WORKLOADS]
    results: list[Result] = []
    for model in MODELS if arguments.model == "both" else [arguments.model]:
        pairs = arguments.pairs or (1 if arguments.quick else PAIRS)
        bench = Bench(model, MODELS[model](), quick=arguments.quick, threads=arguments.threads, pairs=pairs)
        bench.get_projector_path = PROJECTORS.get(model)
        for result in bench.run(letters):
            print_result(result, arguments.quick)
            results.append(result)
    for name, reason in list_absent_peers().items():
        print(f"\n{name} is not compared: {reason}")
    print(json.dumps(to_json(results, arguments)))
    return 0 if all(verdict.passed for result in results for verdict in result.judge(arguments.quick)) else 1


if __name__ == "__main__":
    sys.exit(main())
