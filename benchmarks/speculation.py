"""Does guessing ahead pay, and does it stay out of the way where it does not?

With speculation as it is by default and without, prompts of a kind are answered in turn; medians of the ratios are
compared. Every prompt is new. There is a row for each drafter and each kind of work: editing (most of what comes is a
copy), chat, and random text.

    python benchmarks/speculation.py [--quick] [--threads 2] [--trained MODEL.gguf] [--large 245m:q4_0 ...]

SmolLM2 has the lookup, and itself with a layer less as a draft model; on two CPU cores it is compute-bound, so that
guessing must not lose there. Constructed models have heads and the lookup: there editing is a cycle that guesses are
always right about, chat one with heads that are right in three of four, and random text is drawn at a high temperature.
Where others use the cores, processor time is judged instead of wall time, and what is too low then is skipped with the
reason. The engine's own account of guessing is shown beside it. `--trained` adds a small model with real heads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import constructed
import numpy as np
import psutil
from measures import QUICK
from pruned import prune

import afterglow
from afterglow import registry
from afterglow.engine.engine import Engine
from afterglow.engine.speculation.speculator import choose_drafters
from afterglow.engine.types.request import Usage
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.library.devices import list_devices
from afterglow.testing import models as tiny

LEAST = 0.97
WON = 1.25  # with guesses that are always right, on idle cores
WON_ON_GPU = {("editing", "lookup"): 1.8, ("chat", "mtp"): 1.6}  # the heads are right in three of four there
PER_STEP = 3.3  # tokens for each decode of the trained model, at three guesses
LARGE, SMALLEST = "245m:q4_0", "60m"  # of the smallest nothing is promised but that it does not lose
WORKS = ("editing", "chat", "random")
LAYERS = 29  # of 30: a draft model that is right now and then
BUSY = 25.0  # per cent of the processor that others may use before wall time says nothing


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
    """A model that may guess in every second answer.

    Of two equal models one is faster by up to 5 %, by where its memory happens to lie; so it is one.
    """

    model: afterglow.Model
    ratios: list[float] = field(default_factory=list)  # of wall time for a token
    cpu_ratios: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def answer(self, number: int, prompt: str | list[int], other: str | list[int], **options: object) -> None:
        """Answer without guesses, and with; `other` is what is asked then: as new, and of the same kind."""
        taken = {}
        for guesses, question in [(False, prompt), (True, other)][:: 1 if number % 2 else -1]:
            let_guess(self.model, guesses)
            taken[guesses] = measured(self.model, question, options)
        (plain, wall, cpu), (guessing, own_wall, own_cpu) = taken[False], taken[True]
        if min(plain.generated_tokens, guessing.generated_tokens) > 8:
            self.ratios.append(wall / plain.generated_tokens / (own_wall / guessing.generated_tokens))
            self.cpu_ratios.append(cpu / plain.generated_tokens / (own_cpu / guessing.generated_tokens))
        self.drafted += guessing.draft_tokens
        self.accepted += guessing.accepted_tokens
        self.seconds += guessing.decode_seconds

    def account(self) -> str:
        """What came of it; what was won, as the engine reckons."""
        won = self.model._get_host().call(lambda engine: engine.speculator.loss_budget.saved_seconds)
        return f"drafted {self.drafted}, accepted {self.accepted}, won {won:+.2f} s of {self.seconds:.1f} s"


def let_guess(model: afterglow.Model, guesses: bool) -> None:
    """Let nobody guess from here on, or those again who could."""

    def switch(engine: Engine) -> None:
        drafting = engine.speculator
        drafting._drafters = choose_drafters(drafting._owned_drafters, engine.settings) if guesses else []

    model._get_host().call(switch)


def measured(model: afterglow.Model, prompt: str | list[int], options: dict[str, Any]) -> tuple[Usage, float, float]:
    """What an answer took from its first token on: seconds, and seconds of the processor."""
    began: list[tuple[float, float]] = []

    def note(_: object) -> None:
        if not began:
            began.append((time.perf_counter(), time.process_time()))

    usage = model.complete(prompt, on_token=note, **options).usage
    wall, cpu = time.perf_counter(), time.process_time()
    return usage, wall - began[0][0], cpu - began[0][1]


def editing(number: int) -> str:
    """A file, and its beginning again: most of what follows is a copy."""
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


def chat(number: int) -> str:
    topics = ["a river", "the moon", "old books", "a storm", "bread", "a long journey", "music", "winter"]
    return f"Here is a short story about {topics[number % 8]}, number {number}.\n\nOnce upon a time"


def noise(number: int, size: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(100, size - 100, 60)]


def small_model(arguments: argparse.Namespace, draft: Path) -> list[Row]:
    """SmolLM2 with each drafter that it can have, on each kind of work.

    Each kind of work begins anew: what guessing won at one may be lost at the next, and a row would be of both.
    """
    rows = []
    settings = {"context": 2048, "sequences": 1, "threads": arguments.threads, "fetch": True}
    for drafter in ("lookup", "draft"):
        options = {"engine": EngineSettings(drafters=(drafter,)), "draft": draft if drafter == "draft" else None}
        for work in WORKS:
            with afterglow.load("smollm2", **options, **settings) as model:
                compared = Comparison(model)
                answer_small(compared, work, arguments.quick)
                rows.append(judged(f"SmolLM2, {work}, {drafter}", compared, quick=arguments.quick))
    return rows


def answer_small(compared: Comparison, work: str, quick: bool) -> None:
    # Where the most that can be shown is that nothing is lost, many short answers: the machine's speed drifts by more
    # than a loss would be, within seconds.
    rounds, tokens = (2, 48) if quick else (10, 80) if work == "editing" else (20, 40)
    make = {"editing": editing, "chat": chat, "random": lambda n: noise(n, compared.model.info.vocabulary_size)}[work]
    for number in range(rounds):
        drawn = {"temperature": 1.0, "seed": number} if work == "random" else {"temperature": 0}
        compared.answer(number, make(2 * number), make(2 * number + 1), max_tokens=tokens, **drawn)


def judged(name: str, compared: Comparison, *, quick: bool, wins: float | None = None) -> Row:
    """By wall time where the cores are ours, else by the processor's time; what has to win needs idle cores."""
    wall, cpu, busy = statistics.median(compared.ratios), statistics.median(compared.cpu_ratios), others()
    note = f"wall {wall:.2f}x, processor {cpu:.2f}x, {busy:.0f} % used by others, {compared.account()}"
    least = LEAST / QUICK if quick else LEAST
    value, bar = (wall, wins) if wins else (cpu if busy > BUSY else wall, least)
    skipped = f"{busy:.0f} % of the processor is others'" if busy > BUSY and value < bar else ""
    return Row(name, value, bar, note, skipped)


def others() -> float:
    """Per cent of the processor that is used while we wait."""
    return float(psutil.cpu_percent(interval=1.0))


def large_model(kind: str, arguments: argparse.Namespace) -> list[Row]:
    """A constructed model with heads and with the lookup, on each kind of work."""
    size, quantization = kind.split(":")
    rows = []
    for work, acceptance in (("editing", 100), ("chat", 75), ("random", 75)):
        file = constructed.path(size, quantization, acceptance)
        settings = {"context": 1024, "sequences": 1, "threads": arguments.threads}
        for drafter in ("mtp", "lookup"):
            engine = EngineSettings(drafters=(drafter,))
            with afterglow.load(file, engine=engine, draft="mtp", **settings) as model:
                compared = Comparison(model)
                answer_large(compared, work, arguments.quick)
                wins = bar_of(size, work, drafter)
                rows.append(judged(f"{kind}, {work}, {drafter}", compared, wins=wins, quick=arguments.quick))
    return rows


def bar_of(size: str, work: str, drafter: str) -> float | None:
    """How much faster it has to be; None: not slower. On a GPU, verifying guesses is cheap from 7 B on."""
    if any(device.kind != "cpu" for device in list_devices()):
        return WON_ON_GPU.get((work, drafter)) if size == "8b" else None
    return WON if work == "editing" and size != SMALLEST else None


def answer_large(compared: Comparison, work: str, quick: bool) -> None:
    tokens = 64 if quick else 128
    for number in range(3 if quick else 5):
        if work == "random":
            drawn = {"temperature": 6.0, "seed": number, "ignore_ends": True}
            compared.answer(number, noise(2 * number, 250), noise(2 * number + 1, 250), max_tokens=tokens, **drawn)
        else:
            first, second = ((tiny.CYCLE.decode() * 6)[place : place + 60] for place in (2 * number, 2 * number + 1))
            compared.answer(number, first, second, max_tokens=tokens, temperature=0)


def trained_model(path: Path, arguments: argparse.Namespace) -> list[Row]:
    options = EngineSettings(speculation=3, drafters=("mtp",))
    with afterglow.load(path, engine=options, draft="mtp", context=512, sequences=1, threads=1) as model:
        usages = [
            model.complete(prompt, max_tokens=80, temperature=0).usage
            for prompt in ("Once upon a time", "The little fox", "One day, Anna")
        ]
    steps = sum(usage.generated_tokens - usage.accepted_tokens for usage in usages)
    tokens = sum(usage.generated_tokens for usage in usages)
    accepted, drafted = sum(usage.accepted_tokens for usage in usages), sum(usage.draft_tokens for usage in usages)
    return [Row("trained, tokens per decode", tokens / steps, PER_STEP, f"drafted {drafted}, accepted {accepted}")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trained", type=Path)
    parser.add_argument("--large", nargs="*", help=f"SIZE:TYPE ({LARGE}, or {SMALLEST}:q4_0 where it has to be quick)")
    parser.add_argument("--no-small", action="store_true")
    arguments = parser.parse_args()
    os.environ["AFTERGLOW_DISK_CACHE"] = "off"  # every prompt is new
    rows: list[Row] = []
    if not arguments.no_small:
        with tempfile.TemporaryDirectory(prefix="afterglow-speculation-") as folder:
            draft = Path(folder) / "pruned.gguf"
            prune(registry.resolve("smollm2", fetch=True), draft, layers=LAYERS)
            rows = small_model(arguments, draft)
    usual = [f"{SMALLEST}:q4_0" if arguments.quick else LARGE]
    for kind in usual if arguments.large is None else arguments.large:
        rows += large_model(kind, arguments)
    if arguments.trained:
        rows += trained_model(arguments.trained, arguments)
    for row in rows:
        verdict = f"skipped: {row.skipped}" if row.skipped else "ok" if row.passed else "TOO LOW"
        print(f"{row.name:32} {row.value:6.2f}  bar {row.bar}  {verdict}  ({row.note})")
    print(json.dumps({row.name: {"value": round(row.value, 3), "bar": row.bar, "passed": row.passed} for row in rows}))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
