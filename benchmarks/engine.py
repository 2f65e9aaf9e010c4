"""Cost of the engine over the native library: speed relative to a bare loop, and Python time per step.

The bare loop is llama_decode and an argmax on the same context, which is the upper limit. Many short pairs alternate,
because the speed of a shared machine drifts within seconds by more than the effect to measure; medians are compared,
with one thread. CPU time is judged; wall time is printed beside it. Python time per step is the minimum over rounds at
the beginning, in the middle and at the end, because other processes can only add to it.

    python benchmarks/engine.py [--quick] [--model smollm2]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from report import QUICK_TOLERANCE

from afterglow import registry
from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.inspect import tree
from afterglow.engine.kvcache.blocks import Block
from afterglow.engine.kvcache.prefix_cache import PrefixCache
from afterglow.engine.types.backend import DecodeSpan
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


def measure_seconds(function: Callable[[], None]) -> tuple[float, float]:
    """Return the wall time and the CPU time of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def generate_bare(context: LlamaContext, prompts: list[list[int]], tokens: int) -> None:
    """Generate with llama_decode and argmax only, all sequences in one batch."""
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


def generate_with_engine(engine: Engine, prompts: list[list[int]], tokens: int) -> None:
    for number, prompt in enumerate(prompts):
        engine.submit(Request(id=str(number), entries=prompt, sampling=GREEDY, max_tokens=tokens, ignore_eos=True))
    while engine.is_busy:
        engine.step()
    for slot in engine.prefix_cache.slots:
        engine.prefix_cache.discard(slot)


def measure_ratio(model: LlamaModel, sequences: int, pairs: int, tokens: int, bar: float) -> Row:
    """Measure bare time over engine time, at most 1. Speculation is off, because it would hide the engine's cost."""
    settings = ContextSettings(cells=512 * sequences, sequences=sequences, batch=128, outputs=16, threads=1)
    rng = np.random.default_rng(0)
    size = model.vocabulary.size
    prompts = [[int(token) for token in rng.integers(100, size - 100, 12)] for _ in range(sequences)]
    with LlamaContext(model, settings) as context:
        engine = Engine(LlamaBackend(context), EngineSettings(max_token_gap=10, speculation="off"))
        generate_bare(context, prompts, 4)
        generate_with_engine(engine, prompts, 4)
        functions = {
            "bare": lambda: generate_bare(context, prompts, tokens),
            "engine": lambda: generate_with_engine(engine, prompts, tokens),
        }
        wall_ratios, cpu_ratios = [], []
        for pair in range(pairs):
            order = ("bare", "engine") if pair % 2 else ("engine", "bare")
            seconds = {name: measure_seconds(functions[name]) for name in order}
            wall_ratios.append(seconds["bare"][0] / seconds["engine"][0])
            cpu_ratios.append(seconds["bare"][1] / seconds["engine"][1])
    value = statistics.median(cpu_ratios)
    spread = f"{min(cpu_ratios):.3f} to {max(cpu_ratios):.3f}, wall {statistics.median(wall_ratios):.3f}"
    return Row(f"{sequences} sequence(s): bare / engine", value, "x", f"≥ {bar}", value >= bar, spread)


@contextlib.contextmanager
def count_native_time() -> Iterator[list[float]]:
    """Yield a list of one number to which the seconds of native calls are added."""
    symbols, seconds = get_library().symbols, [0.0]
    originals = {name: getattr(symbols, name) for name in ("llama_decode", "llama_get_logits")}

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                seconds[0] += time.perf_counter() - started

        return call

    for name, function in originals.items():
        setattr(symbols, name, wrap(function))
    try:
        yield seconds
    finally:
        for name, function in originals.items():
            setattr(symbols, name, function)


def measure_python_time(rounds: int) -> list[list[float]]:
    """Return, for each round, the microseconds of steps with eight decoding sequences, without native calls.

    The model is tiny and answers are short: after a long native call, the CPU caches are cold for Python, which is not
    its own cost.
    """
    samples: list[list[float]] = []
    with LlamaModel.load(models.get_path("attention"), trust=True) as model:
        settings = ContextSettings(cells=8 * 512, sequences=8, batch=64, outputs=16, threads=1)
        with LlamaContext(model, settings) as context, count_native_time() as native:
            engine = Engine(LlamaBackend(context), EngineSettings(max_token_gap=10))
            for number in range(8 * rounds):
                prompt = list(range(30 + number, 50 + number))
                request = Request(id=str(number), entries=prompt, sampling=GREEDY, max_tokens=330, ignore_eos=True)
                engine.submit(request)
                if number % 8 == 7:
                    samples.append(measure_steps(engine, native))
            engine.close()
    return samples


def summarize_python_time(samples: list[list[float]], max_microseconds: float) -> Row:
    medians = sorted(map(statistics.median, samples))
    p10, p90 = np.percentile(np.concatenate(samples), (10, 90))
    spread = f"slowest round {medians[-1]:.0f}, p10 {p10:.0f}, p90 {p90:.0f}"
    passed = medians[0] <= max_microseconds
    return Row("Python time per step, 8 sequences", medians[0], "µs", f"≤ {max_microseconds:g}", passed, spread)


def measure_steps(engine: Engine, native: list[float]) -> list[float]:
    """Run the engine until it is idle. Return the microseconds of Python in each step, without the first ones."""
    samples = []
    while engine.is_busy:
        native[0] = 0.0
        started = time.perf_counter()
        engine.step()
        samples.append((time.perf_counter() - started - native[0]) * 1e6)
    return samples[30:-1]


def measure_planning(conversations: int, repeat: int) -> Row:
    """Measure planning over a full prefix cache of conversations that share a system prompt."""
    rng = np.random.default_rng(1)
    backend = FakeBackend("attention", sequences=conversations, cells_per_sequence=8192)
    prefix_cache = PrefixCache(backend, EntryInterner(), EngineSettings())
    system = rng.integers(1, 50_000, 1000)
    for slot in prefix_cache.slots:
        slot.entry_buffer.extend(np.concatenate([system, rng.integers(1, 50_000, 3000)]))
        backend._kv_caches[slot.seq_id].position = 4000
        slot.position = 4000
        prefix_cache._idle_tree.insert(slot.entries, slot)
    times = []
    for index in range(repeat):
        slot = prefix_cache.slots[index % conversations]
        prompt = np.concatenate([slot.entries[:3500], rng.integers(1, 50_000, 200)])
        started = time.perf_counter()
        prefix_cache.plan(prompt)
        times.append((time.perf_counter() - started) * 1e3)
    value = statistics.median(times)
    name = f"plan over {conversations} conversations of 4,000"
    return Row(name, value, "ms", "≤ 2", value <= 2, f"max {max(times):.2f}")


def measure_matching(repeat: int) -> Row:
    """Measure the comparison of two long prompts that differ in the last entry."""
    first = np.random.default_rng(2).integers(0, 100_000, 32_768)
    second = first.copy()
    second[-1] += 1
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        assert common_prefix_length(first, second) == 32_767
        times.append((time.perf_counter() - started) * 1e3)
    value = statistics.median(times)
    return Row("match of 32,768 entries", value, "ms", "≤ 1", value <= 1, f"max {max(times):.2f}")


class NativeBackend(FakeBackend):
    """Its decodes take time without the interpreter lock, as those of llama.cpp do."""

    seconds = 0.0

    def decode(self, spans: Sequence[DecodeSpan]) -> None:
        super().decode(spans)
        time.sleep(self.seconds)


def build_stored_conversations(count: int) -> Engine:
    """Return an engine with conversations of 4,000 entries in the RAM tier, 15 of them also on the device."""
    rng = np.random.default_rng(3)
    engine = Engine(NativeBackend("attention", sequences=16, cells_per_sequence=8192), EngineSettings())
    prefix_cache, store = engine.prefix_cache, engine.prefix_cache.store
    system, rows = rng.integers(1, 50_000, 1000), np.zeros(0, dtype=np.uint8)
    for number in range(count):
        entries = np.concatenate([system, rng.integers(1, 50_000, 3000)])
        parent = store.hasher.get_root_key("")
        for start in range(0, len(entries), store.hasher.block_size):
            chunk = entries[start : start + store.hasher.block_size]
            key = store.hasher.hash_block(parent, chunk)
            if store.tree.get(key) is None:
                block = Block(
                    key=key, parent=parent, start=start, entries=chunk.copy(), cells=len(chunk), nbytes=4096, rows=rows
                )
                store.tree.add(block)
                store.ram.put(block)
            parent = key
        if 0 < number < len(prefix_cache.slots):
            slot = prefix_cache.slots[number]
            slot.entry_buffer.extend(entries)
            prefix_cache._idle_tree.insert(slot.entries, slot)
    return engine


def measure_tree(conversations: int, looks: int, decode_seconds: float) -> Row:
    """Measure what a look at the prefix tree costs the thread of a busy engine: asking, and its longer steps.

    As many steps without a look follow those of each look. The thread that builds the tree is not counted.
    """
    engine = build_stored_conversations(conversations)
    engine.submit(Request(id="busy", entries=[1, 2, 3], max_tokens=100_000, sampling=GREEDY, ignore_eos=True))
    engine.step()
    assert isinstance(engine.backend, NativeBackend)
    engine.backend.seconds = decode_seconds
    costs, delays, walks = [], [], []

    def measure(function: Callable[[], None]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.thread_time()
        function()
        return time.perf_counter() - wall, time.thread_time() - cpu

    def look() -> None:
        future = tree.get_tree(engine)
        assert future is not None
        futures.append(future)

    for _ in range(looks):
        futures: list[Future[tree.PackedTree]] = []
        times = [measure(look)]
        while not futures[0].done():
            times.append(measure(lambda: engine.step()))
        quiet = [measure(lambda: engine.step()) for _ in times[1:]]
        assert futures[0].result().total_nodes > conversations
        costs.append(sum(cpu for _, cpu in times) - sum(cpu for _, cpu in quiet))
        delays.append(statistics.median(wall for wall, _ in times[1:]) - statistics.median(wall for wall, _ in quiet))
        walks.append(sum(wall for wall, _ in times))
    value = statistics.median(costs) * 1e3
    spread = (
        f"{min(costs) * 1e3:.2f} to {max(costs) * 1e3:.2f}; wall {statistics.median(delays) * 1e6:.0f} µs per step; "
        f"tree after {statistics.median(walks):.2f} s, {len(engine.prefix_cache.store.tree):,} blocks"
    )
    name = f"look at {conversations}, decodes of {decode_seconds * 1e3:.0f} ms"
    return Row(name, value, "ms", "≤ 2", value <= 2, spread)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less work, the same checks, under 90 s")
    parser.add_argument("--model", default="smollm2")
    arguments = parser.parse_args()
    pairs, tokens = (11, 16) if arguments.quick else (35, 24)
    rounds = 1 if arguments.quick else 3
    tolerance = QUICK_TOLERANCE if arguments.quick else 1.0
    ratios = (0.9, 0.9) if arguments.quick else (0.97, 0.95)  # the median of eleven short pairs is noisy
    rows = [measure_planning(1000, 50), measure_matching(50), measure_tree(1000, 9, 0.02), measure_tree(1000, 9, 0.005)]
    python_times = measure_python_time(rounds)
    with LlamaModel.load(registry.resolve(arguments.model, fetch=True)) as model:
        rows.append(measure_ratio(model, 1, pairs, tokens, ratios[0]))
        python_times += measure_python_time(rounds)
        rows.append(measure_ratio(model, 8, pairs, tokens // 2, ratios[1]))
    rows.append(summarize_python_time(python_times + measure_python_time(rounds), 120 * tolerance))
    for row in rows:
        verdict = "ok" if row.passed else "MISSED"
        print(f"{row.name:45} {row.value:9.3f} {row.unit:3} {row.bar:8} {verdict:7} {row.spread}")
    print(json.dumps({"benchmark": "engine", "build": get_library().build, "rows": [vars(row) for row in rows]}))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
