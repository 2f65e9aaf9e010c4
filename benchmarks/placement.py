"""Answers in any of 64 sequences against the same number in adjacent ones, and agents that fork one prompt.

    python benchmarks/placement.py [--model 60m:q4_0] [--sequences 64] [--counts 8 16 32] [--answer-tokens 48]

llama.cpp computes each run of neighbouring sequences separately. Conversations continue where their KV cache is, so
the busy sequences have holes between them; the engine makes them adjacent first. `apart` is the same without that.
Each count is measured packed and spread, three times, alternating, and then apart; medians. Exits with 1 if `spread` is
below 0.95 of `packed`. The last rows time the first turn of 8 agents with one system prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from benchmark_models import get_attention_path

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.types.request import Finished, Request
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.devices import list_devices
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings

HISTORY_TOKENS, ROUNDS = 120, 3
MIN_RATIO = 0.95
AGENTS = 8


def run(engine: Engine, requests: list[Request]) -> tuple[float, float]:
    """Run requests at once; return generated tokens per second and the seconds until the last first token."""
    for request in requests:
        engine.submit(request)
    started, tokens, first = time.perf_counter(), 0, {}
    while engine.is_busy:
        for event in engine.step():
            if isinstance(event, Finished):
                tokens += event.usage.generated_tokens
            elif type(event).__name__ == "Token":
                first.setdefault(event.request_id, time.perf_counter() - started)
    return tokens / (time.perf_counter() - started), max(first.values())


def make_request(name: str, entries: list[int], sequence: int | None, length: int) -> Request:
    sampling = Sampling(temperature=0)
    return Request(
        id=name, entries=entries, max_tokens=length, ignore_eos=True, sequence=sequence, sampling=sampling
    )  # fmt: skip


def reset(engine: Engine, histories: list[list[int]]) -> None:
    """Let each sequence hold its history and nothing else, so that no run computes what another one dropped."""
    engine.prefix_cache.pack, pack = (lambda *_: 0), engine.prefix_cache.pack  # type: ignore[method-assign]
    for slot, history in zip(engine.prefix_cache.slots, histories, strict=True):
        if list(slot.entries[:HISTORY_TOKENS]) != history:
            run(engine, [make_request(f"fill{slot.number}-{time.monotonic()}", history, slot.number, 1)])
        slot.truncate(HISTORY_TOKENS)
        assert list(slot.entries) == history
    engine.prefix_cache.pack = pack  # type: ignore[method-assign]


def measure_counts(engine: Engine, counts: list[int], length: int, vocabulary_size: int) -> list[dict[str, object]]:
    """Return a row for each count of busy sequences. Answers have `length` tokens."""
    sequences = engine.backend.capabilities.sequences
    rng = np.random.default_rng(1)
    histories = [rng.integers(1, vocabulary_size, HISTORY_TOKENS).tolist() for _ in range(sequences)]
    reset(engine, histories)
    pack, choose = engine.prefix_cache.pack, random.Random(2)
    rows = []
    for count in counts:
        speeds: dict[str, list[float]] = {"packed": [], "spread": [], "apart": []}
        for round_number in range(ROUNDS):
            spread = choose.sample(range(sequences), count)
            by_place = sorted(range(sequences), key=lambda n: engine.prefix_cache.slots[n].seq_id)
            runs = {"packed": by_place[:count], "spread": spread}
            if round_number == ROUNDS - 1:  # last: a GPU releases the held logits in such decodes
                runs["apart"] = choose.sample(range(sequences), count)
            for name, chosen in runs.items():
                engine.prefix_cache.pack = pack if name != "apart" else lambda *_: 0  # type: ignore[method-assign]
                requests = [
                    make_request(f"{name}{count}-{round_number}-{n}", [*histories[n], 2, 3], n, length) for n in chosen
                ]
                speeds[name].append(run(engine, requests)[0])
                reset(engine, histories)
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        ratio = medians["spread"] / medians["packed"]
        rows.append({"busy": count, **medians, "ratio": ratio, "apart_ratio": medians["apart"] / medians["packed"],
                     "moved": engine.counters.moved_sequences, "passed": ratio >= MIN_RATIO})  # fmt: skip
    engine.prefix_cache.pack = pack  # type: ignore[method-assign]
    return rows


def measure_agents(engine: Engine, system_tokens: int, vocabulary_size: int) -> dict[str, object]:
    """Return the seconds of the first turn of agents with one system prompt, cold and with a warm system prompt."""
    rng = np.random.default_rng(3)
    seconds = {}
    for name in ("cold", "warm"):
        if name == "cold":
            system = rng.integers(1, vocabulary_size, system_tokens).tolist()
        requests = [
            make_request(f"{name}{n}", [*system, *rng.integers(1, vocabulary_size, 30).tolist()], None, 2)
            for n in range(AGENTS)
        ]
        before = engine.counters.prompt_entries
        seconds[name] = run(engine, requests)[1]
        seconds[f"{name}_computed"] = engine.counters.prompt_entries - before
    return {"agents": AGENTS, "system_tokens": system_tokens, **seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="60m:q4_0", help="size:quantization[:vocabulary], or a GGUF file")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--counts", type=int, nargs="*", default=[8, 16, 32])
    parser.add_argument("--answer-tokens", type=int, default=48, help="over which the moves must pay")
    parser.add_argument("--system-tokens", type=int, default=400)
    arguments = parser.parse_args()
    file = Path(arguments.model)
    if not file.exists():
        size, quantization, *vocabulary = arguments.model.split(":")
        file = get_attention_path(size, quantization, *map(int, vocabulary))
    has_gpu = any("gpu" in device.kind for device in list_devices())
    length = max(HISTORY_TOKENS + arguments.answer_tokens + 8, arguments.system_tokens + 64)
    settings = ContextSettings(
        cells=arguments.sequences * length, sequences=arguments.sequences, batch=2048, ubatch=512, outputs=128
    )
    with (
        LlamaModel.load(file, ModelSettings(gpu_layers=-1 if has_gpu else 0), trust=True) as model,
        LlamaContext(model, settings) as context,
    ):
        engine = Engine(LlamaBackend(context), EngineSettings(speculation="off", ram_cache_bytes=0))
        size_of_vocabulary = model.vocabulary.size
        rows = measure_counts(engine, arguments.counts, arguments.answer_tokens, size_of_vocabulary)
        agents = measure_agents(engine, arguments.system_tokens, size_of_vocabulary)
        engine.close()
    print(f"{'busy':>5} {'packed':>9} {'spread':>9} {'apart':>9} tok/s   spread, apart of packed")
    for row in rows:
        print(
            f"{row['busy']:5} {row['packed']:9.1f} {row['spread']:9.1f} {row['apart']:9.1f}         "
            f"{row['ratio']:.3f}, {row['apart_ratio']:.3f} {'' if row['passed'] else 'MISSED'}"
        )
    print(f"first turn of {AGENTS} agents, {arguments.system_tokens} common tokens: {agents}")
    print(json.dumps({"benchmark": "placement", "model": arguments.model, "rows": rows, "agents": agents}))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
