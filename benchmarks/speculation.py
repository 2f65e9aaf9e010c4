"""Does guessing ahead pay, and does it stay out of the way where it does not?

Two engines on one model, one with speculation as it is by default and one without, answer the same prompts in turn;
medians of the ratios are compared. Every prompt is new to both. Where others use the cores, processor time is judged
instead of wall time; what the engine's own account of guessing says is shown beside it.

    python benchmarks/speculation.py [--quick] [--threads 2] [--trained MODEL.gguf] [--large 245m:q4_0 ...]

On two CPU cores SmolLM2 is compute-bound: there it must not lose. `--large` adds constructed models, `--trained` a
small one with real MTP heads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import constructed
import numpy as np
import psutil

import afterglow
from afterglow import tiny
from afterglow.engine.request import Usage
from afterglow.engine.settings import EngineSettings

LEAST = 0.97
WON = 1.25  # with guesses that are always right, on idle cores
PER_STEP = 3.3  # tokens for each decode of the trained model, at three guesses
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
class Pair:
    """The same model twice."""

    plain: afterglow.Model
    guessing: afterglow.Model
    ratios: list[float] = field(default_factory=list)  # of wall time for a token
    cpu_ratios: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def answer(self, number: int, prompt: str | list[int], **options: object) -> None:
        models = [self.plain, self.guessing][:: 1 if number % 2 else -1]
        taken = {model: measured(model, prompt, options) for model in models}
        (plain, wall, cpu), (guessing, own_wall, own_cpu) = taken[self.plain], taken[self.guessing]
        if min(plain.generated, guessing.generated) > 8:
            self.ratios.append(wall / plain.generated / (own_wall / guessing.generated))
            self.cpu_ratios.append(cpu / plain.generated / (own_cpu / guessing.generated))
        self.drafted += guessing.drafted
        self.accepted += guessing.accepted
        self.seconds += guessing.decode_time

    def account(self, won: float) -> str:
        return f"drafted {self.drafted}, accepted {self.accepted}, won {won:+.2f} s of {self.seconds:.1f} s"

    def won(self) -> float:
        return self.guessing._running().call(lambda engine: engine.drafting.account.won)


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


def small_model(arguments: argparse.Namespace) -> list[Row]:
    rounds, tokens = (3, 64) if arguments.quick else (10, 160)
    settings = {"context": 2048, "sequences": 1, "threads": arguments.threads, "fetch": True}
    rows = []
    with (
        afterglow.load("smollm2", engine=EngineSettings(speculation="off"), **settings) as plain,
        afterglow.load("smollm2", **settings) as guessing,
    ):
        for name in ("editing", "chat", "random"):
            pair = Pair(plain, guessing)
            before = pair.won()
            for number in range(rounds):
                if name == "random":
                    prompt: str | list[int] = noise(number, plain.info.vocabulary)
                    pair.answer(number, prompt, max_tokens=tokens, temperature=1.0, seed=number)
                else:
                    prompt = editing(number) if name == "editing" else chat(number)
                    pair.answer(number, prompt, max_tokens=tokens, temperature=0)
            rows.append(judged(f"SmolLM2, {name}, lookup", pair, pair.won() - before))
    return rows


def judged(name: str, pair: Pair, won: float) -> Row:
    """By wall time where the cores are ours, else by the processor's time."""
    wall, cpu, busy = statistics.median(pair.ratios), statistics.median(pair.cpu_ratios), others()
    note = f"wall {wall:.2f}x, processor {cpu:.2f}x, {busy:.0f} % used by others, {pair.account(won)}"
    return Row(name, cpu if busy > BUSY else wall, LEAST, note)


def others() -> float:
    """Per cent of the processor that is used while we wait."""
    return float(psutil.cpu_percent(interval=1.0))


def large_model(kind: str, arguments: argparse.Namespace) -> list[Row]:
    size, quantization = kind.split(":")
    tokens = 64 if arguments.quick else 256
    settings = {"context": 1024, "sequences": 1, "threads": arguments.threads}
    rows = []
    for acceptance, drafter in ((100, "mtp"), (100, "lookup"), (75, "mtp")):
        file = constructed.path(size, quantization, acceptance)
        options = EngineSettings(drafters=(drafter,))
        with (
            afterglow.load(file, engine=EngineSettings(speculation="off"), **settings) as plain,
            afterglow.load(file, engine=options, draft="mtp", **settings) as guessing,
        ):
            pair = Pair(plain, guessing)
            for number in range(3 if arguments.quick else 7):
                prompt = (tiny.CYCLE.decode() * 4)[number : 60 + number]
                pair.answer(number, prompt, max_tokens=tokens, temperature=0)
            busy, ratio = others(), statistics.median(pair.ratios)
            bar = WON if acceptance == 100 else LEAST
            skipped = f"{busy:.0f} % of the processor is others'" if busy > BUSY and ratio < bar else ""
            rows.append(Row(f"{kind}, {drafter} {acceptance} %", ratio, bar, pair.account(pair.won()), skipped))
    return rows


def trained_model(path: Path, arguments: argparse.Namespace) -> list[Row]:
    options = EngineSettings(speculation=3, drafters=("mtp",))
    with afterglow.load(path, engine=options, draft="mtp", context=512, sequences=1, threads=1) as model:
        usages = [
            model.complete(prompt, max_tokens=80, temperature=0).usage
            for prompt in ("Once upon a time", "The little fox", "One day, Anna")
        ]
    steps = sum(usage.generated - usage.accepted for usage in usages)
    tokens = sum(usage.generated for usage in usages)
    accepted, drafted = sum(usage.accepted for usage in usages), sum(usage.drafted for usage in usages)
    return [Row("trained, tokens per decode", tokens / steps, PER_STEP, f"drafted {drafted}, accepted {accepted}")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trained", type=Path)
    parser.add_argument("--large", nargs="*", default=[])
    parser.add_argument("--no-small", action="store_true")
    arguments = parser.parse_args()
    rows = [] if arguments.no_small else small_model(arguments)
    for kind in arguments.large:
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
