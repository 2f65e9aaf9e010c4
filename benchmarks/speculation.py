"""Speedup of speculative decoding, and its loss if drafts are wrong.

Answers prompts of a kind alternately with the default speculation and without, and takes the median of the ratios.
Every prompt is new. There is one row per drafter and kind of work: editing (most of the output is a copy), chat, and
random text.

    python benchmarks/speculation.py [--quick] [--threads 2] [--trained MODEL.gguf] [--large 245m:q4_0 ...]

SmolLM2 uses the n-gram drafter, and itself with one layer less as a draft model. On two CPU cores it is compute-bound,
so speculation must not lose there. Synthetic models use MTP heads and the n-gram drafter: editing is a cycle whose
drafts are always right, chat is one with heads that are right in three of four cases, and random text is sampled at a
high temperature. If other processes use the cores, CPU time is judged instead of wall time, and rows that are then too
low are skipped with the reason. The engine's own estimate of the time saved is printed beside it. `--trained` adds a
small model with trained heads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from benchmark_models import get_hybrid_path, prune_model
from measures import QUICK_TOLERANCE

import afterglow
from afterglow import registry
from afterglow.engine.engine import Engine
from afterglow.engine.speculation.speculator import choose_drafters
from afterglow.engine.types.request import Usage
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.library.devices import list_devices
from afterglow.testing import models

MIN_RATIO = 0.97
MIN_SPEEDUP = 1.25  # if drafts are always right, on idle cores
MIN_GPU_SPEEDUPS = {("editing", "ngram"): 1.8, ("chat", "mtp"): 1.6}  # heads are right in three of four cases in chat
MIN_TOKENS_PER_DECODE = 3.3  # of the trained model, with three draft tokens
DEFAULT_MODEL, SMALLEST_SIZE = "245m:q4_0", "60m"  # the smallest model only has to be no slower
WORKS = ("editing", "chat", "random")
PRUNED_LAYERS = 29  # of 30: a draft model that is right now and then
MAX_BUSY_PERCENT = 25.0  # of the CPU; if others use more, wall time is meaningless


@dataclass
class Row:
    name: str
    value: float
    bar: float | None
    note: str
    skipped: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.skipped) or self.bar is None or self.value >= self.bar


@dataclass
class Comparison:
    """Compares answers with and without speculation of one model.

    Of two equal models in one process, one is up to 5 % faster, depending on the placement of its memory. Therefore
    both sides use the same model.
    """

    model: afterglow.Model
    wall_ratios: list[float] = field(default_factory=list)  # of the time per token
    cpu_ratios: list[float] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, number: int, prompt: str | list[int], draft_prompt: str | list[int], **options: object) -> None:
        """Answer one prompt without drafts and another new one of the same kind with drafts."""
        runs = {}
        for drafts, question in [(False, prompt), (True, draft_prompt)][:: 1 if number % 2 else -1]:
            set_drafting(self.model, drafts)
            runs[drafts] = measure_answer(self.model, question, options)
        (plain, plain_wall, plain_cpu), (drafted, drafted_wall, drafted_cpu) = runs[False], runs[True]
        if min(plain.generated_tokens, drafted.generated_tokens) > 8:
            token_ratio = drafted.generated_tokens / plain.generated_tokens
            self.wall_ratios.append(plain_wall / drafted_wall * token_ratio)
            self.cpu_ratios.append(plain_cpu / drafted_cpu * token_ratio)
        self.draft_tokens += drafted.draft_tokens
        self.accepted_tokens += drafted.accepted_tokens
        self.decode_seconds += drafted.decode_seconds

    def describe(self) -> str:
        """Return the draft counts, and the time saved according to the engine."""
        saved = self.model._get_host().call(lambda engine: engine.speculator.loss_budget.saved_seconds)
        counts = f"draft tokens {self.draft_tokens}, accepted {self.accepted_tokens}"
        return f"{counts}, saved {saved:+.2f} s of {self.decode_seconds:.1f} s"


def set_drafting(model: afterglow.Model, enabled: bool) -> None:
    """Disable all drafters of a model, or enable them again."""

    def switch(engine: Engine) -> None:
        speculator = engine.speculator
        speculator._drafters = choose_drafters(speculator._owned_drafters, engine.settings) if enabled else []

    model._get_host().call(switch)


def measure_answer(
    model: afterglow.Model, prompt: str | list[int], options: dict[str, Any]
) -> tuple[Usage, float, float]:
    """Return the usage of an answer, and its wall and CPU time from the first token on."""
    started: list[tuple[float, float]] = []

    def on_token(_: object) -> None:
        if not started:
            started.append((time.perf_counter(), time.process_time()))

    usage = model.complete(prompt, on_token=on_token, **options).usage
    wall, cpu = time.perf_counter(), time.process_time()
    return usage, wall - started[0][0], cpu - started[0][1]


def build_editing_prompt(number: int) -> str:
    """Return a file followed by its first lines, so that most of what follows is a copy."""
    names = ["river", "stone", "cloud", "field", "tower", "bridge", "garden", "window"]
    lines = []
    for index in range(8):
        name = f"{names[(index + number) % 8]}_{number}"
        lines.append(f"def {name}(value, limit={index + number}):")
        lines.append(f"    if value > {index * 7 + number}:")
        lines.append(f"        return value - limit * {index + 2}")
        lines.append(f"    return value + {name!r}.count('e')\n")
    code = "\n".join(lines)
    return f"# before\n{code}\n# after: the same, formatted\n" + "\n".join(lines[:6])


def build_chat_prompt(number: int) -> str:
    topics = ["a river", "the moon", "old books", "a storm", "bread", "a long journey", "music", "winter"]
    return f"Here is a short story about {topics[number % 8]}, number {number}.\n\nOnce upon a time"


def build_random_prompt(number: int, vocabulary_size: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(100, vocabulary_size - 100, 60)]


def measure_smollm2(arguments: argparse.Namespace, draft: Path) -> list[Row]:
    """Measure SmolLM2 with each of its drafters on each kind of work.

    Each kind of work uses a newly loaded model: the loss budget allows time saved in one kind to be lost in the next,
    and a row would mix both.
    """
    rows = []
    settings: dict[str, Any] = {"context": 2048, "sequences": 1, "threads": arguments.threads, "fetch": True}
    for drafter in ("ngram", "draft"):
        settings |= {"engine": EngineSettings(drafters=(drafter,)), "draft": draft if drafter == "draft" else None}
        for work in WORKS:
            with afterglow.load("smollm2", **settings) as model:
                comparison = Comparison(model)
                run_smollm2(comparison, work, arguments.quick)
                rows.append(judge(f"SmolLM2, {work}, {drafter}", comparison, quick=arguments.quick))
    return rows


def run_smollm2(comparison: Comparison, work: str, quick: bool) -> None:
    # If no speedup is expected, many short answers show best that nothing is lost: the speed of the machine drifts
    # within seconds by more than a loss would be.
    rounds, tokens = (2, 48) if quick else (10, 80) if work == "editing" else (20, 40)
    vocabulary_size = comparison.model.info.vocabulary_size
    builders: dict[str, Callable[[int], str | list[int]]] = {
        "editing": build_editing_prompt,
        "chat": build_chat_prompt,
        "random": lambda number: build_random_prompt(number, vocabulary_size),
    }
    for number in range(rounds):
        sampling = {"temperature": 1.0, "seed": number} if work == "random" else {"temperature": 0}
        prompts = builders[work](2 * number), builders[work](2 * number + 1)
        comparison.add(number, *prompts, max_tokens=tokens, **sampling)


def judge(name: str, comparison: Comparison, *, quick: bool, min_speedup: float | None = None) -> Row:
    """Judge by wall time if the cores are idle, else by CPU time. A required speedup needs idle cores."""
    wall, cpu = statistics.median(comparison.wall_ratios), statistics.median(comparison.cpu_ratios)
    busy = measure_busy_percent()
    note = f"wall {wall:.2f}x, CPU {cpu:.2f}x, {busy:.0f} % of the CPU used by others, {comparison.describe()}"
    min_ratio = MIN_RATIO / QUICK_TOLERANCE if quick else MIN_RATIO
    value, bar = (wall, min_speedup) if min_speedup else (cpu if busy > MAX_BUSY_PERCENT else wall, min_ratio)
    skipped = f"others use {busy:.0f} % of the CPU" if busy > MAX_BUSY_PERCENT and value < bar else ""
    return Row(name, value, bar, note, skipped)


def measure_busy_percent() -> float:
    """Return the CPU usage of others: this process sleeps meanwhile."""
    return float(psutil.cpu_percent(interval=1.0))


def measure_synthetic(kind: str, arguments: argparse.Namespace) -> list[Row]:
    """Measure a synthetic model with MTP heads and with the n-gram drafter, on each kind of work."""
    size, quantization = kind.split(":")
    rows = []
    for work, acceptance in (("editing", 100), ("chat", 75), ("random", 75)):
        file = get_hybrid_path(size, quantization, acceptance)
        settings = {"context": 1024, "sequences": 1, "threads": arguments.threads}
        for drafter in ("mtp", "ngram"):
            engine = EngineSettings(drafters=(drafter,))
            draft = "mtp" if drafter == "mtp" else None
            with afterglow.load(file, engine=engine, draft=draft, **settings) as model:
                comparison = Comparison(model)
                run_synthetic(comparison, work, arguments.quick)
                min_speedup = get_min_speedup(size, work, drafter)
                name = f"{kind}, {work}, {drafter}"
                rows.append(judge(name, comparison, min_speedup=min_speedup, quick=arguments.quick))
    return rows


def get_min_speedup(size: str, work: str, drafter: str) -> float | None:
    """Return the required speedup, None if it only has to be no slower.

    On a GPU, verifying drafts is cheap for models of 7 B and more.
    """
    if any(device.kind != "cpu" for device in list_devices()):
        return MIN_GPU_SPEEDUPS.get((work, drafter)) if size == "8b" else None
    return MIN_SPEEDUP if work == "editing" and size != SMALLEST_SIZE else None


def run_synthetic(comparison: Comparison, work: str, quick: bool) -> None:
    tokens = 64 if quick else 128
    for number in range(3 if quick else 5):
        if work == "random":
            prompts = build_random_prompt(2 * number, 250), build_random_prompt(2 * number + 1, 250)
            comparison.add(number, *prompts, max_tokens=tokens, temperature=6.0, seed=number, ignore_eos=True)
        else:
            text = models.CYCLE.decode() * 6
            first, second = (text[start : start + 60] for start in (2 * number, 2 * number + 1))
            comparison.add(number, first, second, max_tokens=tokens, temperature=0)


def measure_trained(path: Path) -> list[Row]:
    settings = EngineSettings(speculation=3, drafters=("mtp",))
    with afterglow.load(path, engine=settings, draft="mtp", context=512, sequences=1, threads=1) as model:
        usages = [
            model.complete(prompt, max_tokens=80, temperature=0).usage
            for prompt in ("Once upon a time", "The little fox", "One day, Anna")
        ]
    decodes = sum(usage.generated_tokens - usage.accepted_tokens for usage in usages)
    tokens = sum(usage.generated_tokens for usage in usages)
    drafted, accepted = sum(usage.draft_tokens for usage in usages), sum(usage.accepted_tokens for usage in usages)
    note = f"draft tokens {drafted}, accepted {accepted}"
    return [Row("trained, tokens per decode", tokens / decodes, MIN_TOKENS_PER_DECODE, note)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter answers, a smaller model, wider bars")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trained", type=Path, help="GGUF file of a model with trained MTP heads")
    parser.add_argument(
        "--large",
        nargs="*",
        help=f"synthetic models, SIZE:TYPE (default {DEFAULT_MODEL}, {SMALLEST_SIZE}:q4_0 if quick)",
    )
    parser.add_argument("--no-small", action="store_true", help="skip SmolLM2")
    arguments = parser.parse_args()
    os.environ["AFTERGLOW_DISK_CACHE"] = "off"  # so that every prompt is new
    rows: list[Row] = []
    if not arguments.no_small:
        with tempfile.TemporaryDirectory(prefix="afterglow-speculation-") as directory:
            draft = Path(directory) / "pruned.gguf"
            prune_model(registry.resolve("smollm2", fetch=True), draft, layers=PRUNED_LAYERS)
            rows = measure_smollm2(arguments, draft)
    default = [f"{SMALLEST_SIZE}:q4_0" if arguments.quick else DEFAULT_MODEL]
    for kind in default if arguments.large is None else arguments.large:
        rows += measure_synthetic(kind, arguments)
    if arguments.trained:
        rows += measure_trained(arguments.trained)
    for row in rows:
        verdict = f"skipped: {row.skipped}" if row.skipped else "ok" if row.passed else "TOO LOW"
        print(f"{row.name:32} {row.value:6.2f}  bar {row.bar}  {verdict}  ({row.note})")
    print(json.dumps({row.name: {"value": round(row.value, 3), "bar": row.bar, "passed": row.passed} for row in rows}))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
