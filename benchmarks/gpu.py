"""The engine on a GPU against llama.cpp's own batched bench: same build, same synthetic model, alternating.

    AFTERGLOW_LIBLLAMA=DIRECTORY python benchmarks/gpu.py --bench PATH/llama-batched-bench [--models 8b:f16 ...]

Measures decoding of 1, 8 and 32 sequences after prompts of 512 tokens, and the prefill of the prompts. The bench
neither reads logits nor samples; the engine does both. `8b:f16:128256` is a model with a vocabulary of the size of
current models, from which sampling takes longer; sampling with the default settings is measured beside greedy decoding
and has a limit of its own. Exits with 1 if a ratio is below its limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmark_models import get_attention_path

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.types.request import Finished, Request, Token
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.devices import list_devices
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings

PROMPT_TOKENS, ANSWER_TOKENS = 512, 128
SEQUENCE_COUNTS = (1, 8, 32)
BATCH_ROWS = 16_384  # of the engine and of the bench
MIN_RATIO = 0.97  # of prompts and of greedy decoding
MIN_DRAWN_RATIOS = {1: 0.9, 8: 0.85, 32: 0.65}  # by sequences, whose tokens are drawn one after the other on the CPU
GREEDY, DEFAULT_SAMPLING = Sampling(temperature=0), Sampling(seed=1)


@dataclass(frozen=True)
class Speed:
    """Tokens per second: of prompts, and of answers while all sequences decode; `drawn` with default sampling."""

    prompt: float
    answer: float
    drawn: float


def measure_engine(file: Path, seed: int) -> dict[int, Speed]:
    sequences = max(SEQUENCE_COUNTS)
    cells = sequences * (PROMPT_TOKENS + ANSWER_TOKENS)
    settings = ContextSettings(cells=cells, sequences=sequences, batch=BATCH_ROWS, ubatch=512, outputs=64)
    with (
        LlamaModel.load(file, ModelSettings(gpu_layers=-1), trust=True) as model,
        LlamaContext(model, settings) as context,
    ):
        engine = Engine(LlamaBackend(context), EngineSettings(speculation="off", max_token_gap=60, ram_cache_bytes=0))
        size = model.vocabulary.size
        measure_answers(engine, 1, seed, size)  # warm-up
        speeds = {}
        for count in SEQUENCE_COUNTS:
            prompt = measure_prompts(engine, count, seed + count, size)
            answer = measure_answers(engine, count, seed + 100 + count, size)
            drawn = measure_answers(engine, count, seed + 200 + count, size, DEFAULT_SAMPLING)
            speeds[count] = Speed(prompt, answer, drawn)
        engine.close()
    return speeds


def submit(
    engine: Engine, count: int, seed: int, vocabulary_size: int, length: int, sampling: Sampling = GREEDY
) -> None:
    rng = np.random.default_rng(seed)
    for index in range(count):
        entries = rng.integers(1, vocabulary_size, PROMPT_TOKENS).tolist()
        engine.submit(
            Request(
                id=f"{seed}-{index}", entries=entries, max_tokens=length, ignore_eos=True, use_prefix_cache=False,
                sampling=sampling,
            )
        )  # fmt: skip


def measure_prompts(engine: Engine, count: int, seed: int, vocabulary_size: int) -> float:
    """Return the tokens per second of prefill. Answers have one token, so that nothing else is computed."""
    submit(engine, count, seed, vocabulary_size, 1)
    started = time.perf_counter()
    while engine.is_busy:
        engine.step()
    return count * PROMPT_TOKENS / (time.perf_counter() - started)


def measure_answers(engine: Engine, count: int, seed: int, vocabulary_size: int, sampling: Sampling = GREEDY) -> float:
    """Return the tokens per second while all sequences decode."""
    submit(engine, count, seed, vocabulary_size, ANSWER_TOKENS, sampling)
    started: set[str] = set()
    all_started = first_ended = 0.0
    generated = 0
    while engine.is_busy:
        events = engine.step()
        now = time.perf_counter()
        tokens = [event for event in events if isinstance(event, Token)]
        if all_started and not first_ended:
            generated += len(tokens)
        started |= {event.request_id for event in tokens}
        if len(started) == count and not all_started:
            all_started = now
        if not first_ended and any(isinstance(event, Finished) for event in events):
            first_ended = now
    return generated / (first_ended - all_started)


def measure_bench(bench: Path, file: Path) -> dict[int, Speed]:
    counts = ",".join(map(str, (1, *SEQUENCE_COUNTS)))  # the first is a warm-up: the later row of a count wins
    cells = max(SEQUENCE_COUNTS) * (PROMPT_TOKENS + ANSWER_TOKENS)
    command = [
        str(bench), "-m", str(file), "-ngl", "99", "-npp", str(PROMPT_TOKENS), "-ntg", str(ANSWER_TOKENS),
        "-npl", counts, "-c", str(cells), "-b", str(BATCH_ROWS), "-ub", "512", "--output-format", "jsonl",
    ]  # fmt: skip
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {row["pl"]: Speed(row["speed_pp"], row["speed_tg"], row["speed_tg"]) for row in rows}


def compare(kind: str, bench: Path, pairs: int) -> list[dict[str, object]]:
    size, quantization, *vocabulary_size = kind.split(":")
    file = get_attention_path(size, quantization, *map(int, vocabulary_size))
    engine_runs: list[dict[int, Speed]] = []
    bench_runs: list[dict[int, Speed]] = []
    for pair in range(pairs):
        for side in ("engine", "bench") if pair % 2 else ("bench", "engine"):
            if side == "bench":
                bench_runs.append(measure_bench(bench, file))
            else:
                engine_runs.append(measure_engine(file, 1000 * pair))
    rows = []
    for count in SEQUENCE_COUNTS:
        for what in ("answer", "drawn", "prompt"):
            engine_speeds = [getattr(run[count], what) for run in engine_runs]
            bench_speeds = [getattr(run[count], what) for run in bench_runs]
            ratios = sorted(engine / peer for engine, peer in zip(engine_speeds, bench_speeds, strict=True))
            engine_speed, bench_speed = statistics.median(engine_speeds), statistics.median(bench_speeds)
            ratio = engine_speed / bench_speed
            rows.append({"model": kind, "width": count, "what": what, "afterglow": engine_speed, "bench": bench_speed,
                         "ratio": ratio, "spread": f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
                         "passed": ratio >= get_min_ratio(what, count)})  # fmt: skip
    return rows


def get_min_ratio(what: str, sequences: int) -> float:
    """Return the least speed of the engine as a share of the bench's."""
    return MIN_DRAWN_RATIOS[sequences] if what == "drawn" else MIN_RATIO


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, help="llama-batched-bench of the same build")
    parser.add_argument("--models", nargs="*", default=["1b:f16", "8b:f16", "8b:f16:128256"])
    parser.add_argument("--quick", action="store_true", help="one pair, the smallest model")
    arguments = parser.parse_args()
    if arguments.bench is None or all(device.kind == "cpu" for device in list_devices()):
        reason = "needs a GPU and --bench PATH/llama-batched-bench"
        print(json.dumps({"benchmark": "gpu", "skipped": reason}))
        return 0
    rows = []
    for kind in arguments.models[:1] if arguments.quick else arguments.models:
        rows += compare(kind, arguments.bench, 1 if arguments.quick else 7)
    print(f"{'model':14} {'':8} {'sequences':>9} {'afterglow':>10} {'bench':>10} {'ratio':>6}  spread")
    for row in rows:
        print(
            f"{row['model']:14} {row['what']:8} {row['width']:9} {row['afterglow']:10.1f} {row['bench']:10.1f} "
            f"{row['ratio']:6.3f}  {row['spread']} {'' if row['passed'] else 'MISSED'}"
        )
    print(json.dumps({"benchmark": "gpu", "build": get_library().build, "rows": rows}))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
