"""The engine on a GPU beside llama.cpp's own batched bench: same build, same constructed model, alternating.

    AFTERGLOW_LIBLLAMA=DIRECTORY python benchmarks/gpu.py --bench PATH/llama-batched-bench [--models 8b:f16 ...]

Decodes of 1, 8 and 32 sequences after prompts of 512 tokens, and the prompts themselves. The bench reads no logits and
chooses no token; the engine does both. `8b:f16:128256` is a model with as many tokens as those of today have, whose
logits take longer to choose from; what it takes to draw with the usual settings is shown beside it.
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

import constructed
import numpy as np

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

PROMPT, ANSWER = 512, 128
WIDTHS = (1, 8, 32)
BATCH = 16_384  # rows of one decode, of both
BAR = 0.97
GREEDY, USUAL = Sampling(temperature=0), Sampling(seed=1)


@dataclass(frozen=True)
class Speed:
    """Tokens per second: of prompts, and of answers while all are being written; `drawn` at a temperature."""

    prompt: float
    answer: float
    drawn: float


def engine_speeds(file: Path, seed: int) -> dict[int, Speed]:
    cells = max(WIDTHS) * (PROMPT + ANSWER)
    settings = ContextSettings(cells=cells, sequences=max(WIDTHS), batch=BATCH, ubatch=512, outputs=64)
    with (
        LlamaModel.load(file, ModelSettings(gpu_layers=-1), trust=True) as model,
        LlamaContext(model, settings) as context,
    ):
        engine = Engine(LlamaBackend(context), EngineSettings(speculation="off", max_token_gap=60, ram_cache_bytes=0))
        size = model.vocabulary.size
        answers(engine, 1, seed, size)  # the first decodes of a process also prepare it
        speeds = {}
        for width in WIDTHS:
            prompt = prompts(engine, width, seed + width, size)
            answer = answers(engine, width, seed + 100 + width, size)
            speeds[width] = Speed(prompt, answer, answers(engine, width, seed + 200 + width, size, USUAL))
        engine.close()
    return speeds


def submit(engine: Engine, width: int, seed: int, vocabulary: int, length: int, sampling: Sampling = GREEDY) -> None:
    numbers = np.random.default_rng(seed)
    for index in range(width):
        entries = numbers.integers(1, vocabulary, PROMPT).tolist()
        engine.submit(
            Request(
                id=f"{seed}-{index}", entries=entries, max_tokens=length, ignore_eos=True, use_prefix_cache=False,
                sampling=sampling,
            )
        )  # fmt: skip


def prompts(engine: Engine, width: int, seed: int, vocabulary: int) -> float:
    """Tokens per second of prompts with one token behind each, so that nothing else is computed."""
    submit(engine, width, seed, vocabulary, 1)
    started = time.perf_counter()
    while engine.is_busy:
        engine.step()
    return width * PROMPT / (time.perf_counter() - started)


def answers(engine: Engine, width: int, seed: int, vocabulary: int, sampling: Sampling = GREEDY) -> float:
    """Tokens per second while all are being written."""
    submit(engine, width, seed, vocabulary, ANSWER, sampling)
    begun: set[str] = set()
    all_begun = ended = 0.0
    written = 0
    while engine.is_busy:
        events = engine.step()
        now = time.perf_counter()
        tokens = [event for event in events if isinstance(event, Token)]
        if all_begun and not ended:
            written += len(tokens)
        begun |= {event.request_id for event in tokens}
        if len(begun) == width and not all_begun:
            all_begun = now
        if not ended and any(isinstance(event, Finished) for event in events):
            ended = now
    return written / (ended - all_begun)


def bench_speeds(bench: Path, file: Path) -> dict[int, Speed]:
    widths = ",".join(map(str, (1, *WIDTHS)))  # the first also prepares the process; the later one of a width counts
    command = [
        str(bench), "-m", str(file), "-ngl", "99", "-npp", str(PROMPT), "-ntg", str(ANSWER), "-npl", widths,
        "-c", str(max(WIDTHS) * (PROMPT + ANSWER)), "-b", str(BATCH), "-ub", "512", "--output-format", "jsonl",
    ]  # fmt: skip
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {row["pl"]: Speed(row["speed_pp"], row["speed_tg"], row["speed_tg"]) for row in rows}


def compare(kind: str, bench: Path, pairs: int) -> list[dict[str, object]]:
    size, quantization, *words = kind.split(":")
    file = constructed.attention_path(size, quantization, *map(int, words))
    ours: list[dict[int, Speed]] = []
    theirs: list[dict[int, Speed]] = []
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            if side:
                theirs.append(bench_speeds(bench, file))
            else:
                ours.append(engine_speeds(file, 1000 * pair))
    rows = []
    for width in WIDTHS:
        for what in ("answer", "drawn", "prompt"):
            mine = statistics.median(getattr(one[width], what) for one in ours)
            peer = statistics.median(getattr(one[width], what) for one in theirs)
            ratios = sorted(
                getattr(one[width], what) / getattr(other[width], what) for one, other in zip(ours, theirs, strict=True)
            )
            spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
            rows.append({"model": kind, "width": width, "what": what, "afterglow": mine, "bench": peer,
                         "ratio": mine / peer, "spread": spread,
                         "passed": what == "drawn" or mine / peer >= BAR})  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, help="llama-batched-bench of the same build")
    parser.add_argument("--models", nargs="*", default=["1b:f16", "8b:f16", "8b:f16:128256"])
    parser.add_argument("--quick", action="store_true", help="one pair, the smallest model")
    arguments = parser.parse_args()
    if arguments.bench is None or all(device.kind == "cpu" for device in list_devices()):
        reason = "it needs a GPU and --bench PATH/llama-batched-bench"
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
