"""afterglow on a GPU: the engine against llama.cpp's batched bench, and the server against llama-server.

    AFTERGLOW_LIBLLAMA=DIRECTORY python benchmarks/gpu.py --bench PATH/llama-batched-bench --server PATH/llama-server

All are of the same build and use the same synthetic models, alternating. With `--bench`: decoding of 1, 8, 32 and 64
sequences after prompts of 512 tokens, and the prefill of the prompts. The bench neither reads logits nor samples; the
engine does both. The vocabulary is as large as those of current models, because sampling takes longer then; sampling
with the default settings is measured beside greedy decoding and has a limit of its own. With `--server`: the rows of
`gpu_server.py`. Exits with 1 if a ratio misses its limit.
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

import gpu_server
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
SEQUENCE_COUNTS = (1, 8, 32, 64)
BATCH_ROWS = 16_384  # of the engine and of the bench
MIN_PROMPT_RATIO = 0.97
# Of greedy and of drawn answers, by the size of the model: sampling takes a larger share of the steps of a small one.
MIN_ANSWER_RATIOS = {"1b": (0.93, 0.8), "8b": (0.97, 0.9)}
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
    size, file = kind.partition(":")[0], get_model_path(kind)
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
                         "passed": ratio >= get_min_ratio(what, size)})  # fmt: skip
    return rows


def get_min_ratio(what: str, size: str) -> float:
    """Return the least speed of the engine as a share of the bench's."""
    if what == "prompt":
        return MIN_PROMPT_RATIO
    return MIN_ANSWER_RATIOS.get(size, (0.0, 0.0))[what == "drawn"]


def get_model_path(kind: str) -> Path:
    """Return the file of a model such as `8b:f16:128256`: size, type, and size of the vocabulary."""
    size, quantization, *vocabulary_size = kind.split(":")
    return get_attention_path(size, quantization, *map(int, vocabulary_size))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, help="llama-batched-bench of the same build")
    parser.add_argument("--server", type=Path, help="llama-server of the same build")
    parser.add_argument("--models", nargs="*", default=["1b:f16:128256", "8b:f16:128256"])
    parser.add_argument("--pairs", type=int, default=3, help="alternating runs of each side")
    parser.add_argument("--counts", type=int, nargs="*", default=list(gpu_server.STREAM_COUNTS), help="streams")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one pair, the smallest model")
    parser.add_argument("--write-models", action="store_true", help="write the model files and exit")
    arguments = parser.parse_args()
    kinds, pairs = (arguments.models[:1], 1) if arguments.quick else (arguments.models, arguments.pairs)
    if arguments.write_models:
        print([str(get_model_path(kind)) for kind in kinds])
        return 0
    if not (arguments.bench or arguments.server) or all(device.kind == "cpu" for device in list_devices()):
        reason = "needs a GPU and --bench PATH/llama-batched-bench or --server PATH/llama-server"
        print(json.dumps({"benchmark": "gpu", "skipped": reason}))
        return 0
    rows = [row for kind in kinds if arguments.bench for row in compare(kind, arguments.bench, pairs)]
    if rows:
        print(f"{'model':14} {'':8} {'sequences':>9} {'afterglow':>10} {'bench':>10} {'ratio':>6}  spread")
    for row in rows:
        print(
            f"{row['model']:14} {row['what']:8} {row['width']:9} {row['afterglow']:10.1f} {row['bench']:10.1f} "
            f"{row['ratio']:6.3f}  {row['spread']} {'' if row['passed'] else 'MISSED'}"
        )
    for kind in kinds if arguments.server else ():
        rows += gpu_server.compare(kind, get_model_path(kind), arguments)
    print(json.dumps({"benchmark": "gpu", "build": get_library().build, "rows": rows}))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
