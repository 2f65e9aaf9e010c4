"""What the engine costs beside the native library: how much slower than a bare loop is it, and where does time go?

The bare loop is llama_decode and an argmax on the same context: nobody can be faster. Many short pairs alternate, for a
shared machine's speed drifts by more than is looked for within seconds; medians are compared, one thread. CPU time is
judged, wall time is shown beside it. Of Python's own time the quietest round counts, at the beginning, in the middle or
at the end: whatever else runs only adds to it.

    python benchmarks/engine.py [--quick] [--model smollm2]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from afterglow import registry
from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.prefix_cache import PrefixCache
from afterglow.engine.types.entries import EntryInterner, common_prefix_length
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.testing import FakeBackend, models

GREEDY = Sampling(temperature=0)


@dataclass
class Row:
    name: str
    value: float
    unit: str
    bar: str
    passed: bool
    spread: str = ""


def timed(work: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def bare(context: LlamaContext, prompts: list[list[int]], tokens: int) -> None:
    """llama_decode and argmax, for all sequences in one batch, with nothing around it."""
    batch, positions = context.batch, [len(prompt) for prompt in prompts]
    batch.clear()
    for sequence, prompt in enumerate(prompts):
        batch.add(prompt, position=0, sequence=sequence, outputs=1)
    context.decode()
    last = [int(context.get_logits(row - 1).argmax()) for row in np.cumsum(positions)]
    for _ in range(tokens - 1):
        batch.clear()
        for sequence, token in enumerate(last):
            batch.add_row(token, position=positions[sequence], sequence=sequence, output=True)
            positions[sequence] += 1
        context.decode()
        last = [int(context.get_logits(row).argmax()) for row in range(len(prompts))]
    for sequence in range(len(prompts)):
        context.memory.remove(sequence)


def through_engine(engine: Engine, prompts: list[list[int]], tokens: int) -> None:
    for number, prompt in enumerate(prompts):
        engine.submit(Request(id=str(number), entries=prompt, sampling=GREEDY, max_tokens=tokens, ignore_eos=True))
    while engine.is_busy:
        engine.step()
    for slot in engine.prefix_cache.slots:
        engine.prefix_cache.discard(slot)


def ratio(model: LlamaModel, sequences: int, pairs: int, tokens: int, bar: float) -> Row:
    """Bare time over engine time: 1 is as fast as can be. Without guesses, which would hide what the engine costs."""
    settings = ContextSettings(cells=512 * sequences, sequences=sequences, batch=128, outputs=16, threads=1)
    rng = np.random.default_rng(0)
    prompts = [[int(t) for t in rng.integers(100, model.vocabulary.size - 100, 12)] for _ in range(sequences)]
    with LlamaContext(model, settings) as context:
        engine = Engine(LlamaBackend(context), EngineSettings(max_token_gap=10, speculation="off"))
        bare(context, prompts, 4)
        through_engine(engine, prompts, 4)
        ratios, walls = [], []
        for index in range(pairs):
            works = [lambda: bare(context, prompts, tokens), lambda: through_engine(engine, prompts, tokens)]
            order = (0, 1) if index % 2 else (1, 0)
            times = {which: timed(works[which]) for which in order}
            ratios.append(times[0][1] / times[1][1])
            walls.append(times[0][0] / times[1][0])
    value = statistics.median(ratios)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}, wall {statistics.median(walls):.3f}"
    return Row(f"{sequences} sequence(s): bare / engine", value, "x", f"≥ {bar}", value >= bar, spread)


@contextlib.contextmanager
def native_time() -> Iterator[list[float]]:
    """Seconds that native calls take, added to the one number of the list."""
    symbols, spent = get_library().symbols, [0.0]
    originals = {name: getattr(symbols, name) for name in ("llama_decode", "llama_get_logits")}

    def watched(function):  # type: ignore[no-untyped-def]
        def call(*arguments):  # type: ignore[no-untyped-def]
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[0] += time.perf_counter() - started

        return call

    for name, function in originals.items():
        setattr(symbols, name, watched(function))
    try:
        yield spent
    finally:
        for name, function in originals.items():
            setattr(symbols, name, function)


def python_times(rounds: int) -> list[list[float]]:
    """Microseconds of a step with eight generating sequences on a tiny model, less the native calls in it; by round.

    In rounds of short answers: behind a long native call Python finds its caches cold, which is not its own cost.
    """
    samples: list[list[float]] = []
    with LlamaModel.load(models.get_path("attention"), trust=True) as model:
        settings = ContextSettings(cells=8 * 512, sequences=8, batch=64, outputs=16, threads=1)
        with LlamaContext(model, settings) as context, native_time() as native:
            engine = Engine(LlamaBackend(context), EngineSettings(max_token_gap=10))
            for number in range(8 * rounds):
                prompt = list(range(30 + number, 50 + number))
                request = Request(id=str(number), entries=prompt, sampling=GREEDY, max_tokens=330, ignore_eos=True)
                engine.submit(request)
                if number % 8 == 7:
                    samples.append(steps(engine, native))
            engine.close()
    return samples


def python_per_step(samples: list[list[float]]) -> Row:
    medians = sorted(map(statistics.median, samples))
    p10, p90 = np.percentile(np.concatenate(samples), (10, 90))
    spread = f"rounds to {medians[-1]:.0f}, p10 {p10:.0f}, p90 {p90:.0f}"
    return Row("Python time per step, 8 sequences", medians[0], "µs", "≤ 120", medians[0] <= 120, spread)


def steps(engine: Engine, native: list[float]) -> list[float]:
    """Microseconds of Python in each step until the requests have ended, but for the first ones."""
    samples = []
    while engine.is_busy:
        native[0] = 0.0
        started = time.perf_counter()
        engine.step()
        samples.append((time.perf_counter() - started - native[0]) * 1e6)
    return samples[30:-1]


def planning(conversations: int, repeat: int) -> Row:
    """A plan over a memory full of conversations that share a system prompt."""
    rng = np.random.default_rng(1)
    backend = FakeBackend("attention", sequences=conversations, cells_per_sequence=8192)
    memory = PrefixCache(backend, EntryInterner(), EngineSettings())
    system = rng.integers(1, 50_000, 1000)
    for slot in memory.slots:
        slot.entry_buffer.extend(np.concatenate([system, rng.integers(1, 50_000, 3000)]))
        backend._kv_caches[slot.seq_id].position = 4000
        slot.position = 4000
        memory._idle_tree.insert(slot.entries, slot)
    times = []
    for index in range(repeat):
        prompt = np.concatenate([memory.slots[index % conversations].entries[:3500], rng.integers(1, 50_000, 200)])
        started = time.perf_counter()
        memory.plan(prompt)
        times.append((time.perf_counter() - started) * 1e3)
    value = statistics.median(times)
    return Row(
        f"plan over {conversations} conversations of 4,000", value, "ms", "≤ 2", value <= 2, f"max {max(times):.2f}"
    )


def matching(repeat: int) -> Row:
    one = np.random.default_rng(2).integers(0, 100_000, 32_768)
    other = one.copy()
    other[-1] += 1
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        assert common_prefix_length(one, other) == 32_767
        times.append((time.perf_counter() - started) * 1e3)
    value = statistics.median(times)
    return Row("match of 32,768 entries", value, "ms", "≤ 1", value <= 1, f"max {max(times):.2f}")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="less work, the same checks, under 90 s")
    arguments.add_argument("--model", default="smollm2")
    chosen = arguments.parse_args()
    pairs, tokens = (11, 16) if chosen.quick else (35, 24)
    rounds = 1 if chosen.quick else 3
    rows, python = [planning(1000, 50), matching(50)], python_times(rounds)
    with LlamaModel.load(registry.resolve(chosen.model, fetch=True)) as model:
        rows.append(ratio(model, 1, pairs, tokens, 0.97))
        python += python_times(rounds)
        rows.append(ratio(model, 8, pairs, tokens // 2, 0.95))
    rows.append(python_per_step(python + python_times(rounds)))
    for row in rows:
        mark = "ok" if row.passed else "MISSED"
        print(f"{row.name:45} {row.value:9.3f} {row.unit:3} {row.bar:8} {mark:7} {row.spread}")
    print(json.dumps({"benchmark": "engine", "build": get_library().build, "rows": [vars(row) for row in rows]}))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
