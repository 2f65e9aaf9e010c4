"""afterglow over HTTP on a GPU against llama-server of the same build: the rows of `gpu.py` that need servers.

Streams: 1, 8, 32 and 64 answers at once, greedy and drawn, with the gaps between tokens. Agents: 8 agents with one
system prompt of 4,000 tokens, 4 turns each. Third: 64 conversations, of which a random third continues. Restart: the
first token of a prompt of 32,000 tokens after a restart, against computing it. llama-server runs with `-fa on`, and
with each of `--backend-sampling` and `-kvu` in addition. Speculative decoding is off: the answers of synthetic models
repeat.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from measures import quantile
from peers import Afterglow, LlamaServer, Peer, ServerSize

STREAM_COUNTS = (1, 8, 32, 64)
SLOTS = 64
STREAM_TOKENS, PROMPT_TOKENS = 192, 48
SLOT_TOKENS = 5_120  # context of a slot: the system prompt of the agents and their turns
AGENTS, TURNS, SYSTEM_TOKENS = 8, 4, 4_000
RESTART_TOKENS = 32_000
BYTE_TOKENS = (9, 265)  # tokens of single bytes in the synthetic vocabulary
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "drawn": {"temperature": 0.8, "top_k": 40}}
GREEDY = SAMPLINGS["greedy"]
# Measure, limit of the ratio to the best llama-server, whether larger is better.
LIMITS = (
    ("tokens_per_second", 1.0, True),
    ("gap_p95", 1.0, False),
    ("gap_p99", 1.0, False),
    ("first_turn", 0.5, False),
    ("total", 1.0, False),
)
MAX_STORE_PAUSES = 12
MAX_RESTART_RATIO = 0.7  # of the time to compute the prompt


class GpuAfterglow(Afterglow):
    """`afterglow serve` without speculative decoding."""

    def build_command(self) -> list[str]:
        return [*super().build_command(), "--speculation", "off"]

    def build_ignore_eos(self) -> dict[str, Any]:
        return {"ignore_eos": True}


class LlamaServerProgram(LlamaServer):
    """llama-server as a program, with all layers on the GPU."""

    program: ClassVar[Path]
    flags: ClassVar[tuple[str, ...]] = ()

    def build_command(self) -> list[str]:
        size = self.size
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = {
            "-m": size.model, "-ngl": 99, "-np": size.slots, "-c": size.slots * size.context, "-t": size.threads,
            "-fa": "on", "--port": port, "-b": 2048, "-ub": 512,
        }  # fmt: skip
        return [str(self.program), *(str(part) for pair in options.items() for part in pair), *self.flags]


def build_llama_server(program: Path, *flags: str) -> type[Peer]:
    """Return llama-server with these flags in addition."""
    name = " ".join(["llama-server", *flags])
    return type("Flagged", (LlamaServerProgram,), {"name": name, "program": program, "flags": flags})


@contextlib.contextmanager
def start_server(kind: type[Peer], size: ServerSize, root: Path) -> Iterator[Peer]:
    directory = root / kind.name.replace(" ", "")
    directory.mkdir(exist_ok=True)
    peer = kind(size, directory)
    peer.start()
    try:
        yield peer
    finally:
        peer.stop()


def run_threads(function: Callable[[Any], object], arguments: Sequence[Any]) -> float:
    """Call a function with each argument at once; return the seconds until the last call has ended."""
    threads = [threading.Thread(target=function, args=(argument,)) for argument in arguments]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def stream_completion(peer: Peer, prompt: Sequence[int], length: int, **options: Any) -> list[float]:
    """Complete a prompt of tokens; return the times at which chunks with text arrived."""
    body = {"prompt": list(prompt), "max_tokens": length, "ignore_eos": True, **options}
    connection = peer.post(body, "/v1/completions")
    try:
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{peer.name}: HTTP status {response.status}: {response.read().decode()[:500]}")
        lines = [(time.perf_counter(), line) for line in response if line.startswith(b"data: {")]
    finally:
        connection.close()
    chunks = [(at, json.loads(line[6:])) for at, line in lines]
    return [at for at, chunk in chunks if chunk.get("choices") and chunk["choices"][0].get("text")]


def measure_streams(peer: Peer, count: int, sampling: dict[str, Any], seed: int) -> dict[str, float]:
    """Return tokens per second, from the requests to the last token, and the gaps between tokens."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(*BYTE_TOKENS, (count, PROMPT_TOKENS)).tolist()
    times: list[list[float]] = [[] for _ in prompts]

    def run(index: int) -> None:
        times[index] += stream_completion(peer, prompts[index], STREAM_TOKENS, seed=seed + index, **sampling)

    seconds = run_threads(run, range(count))
    gaps = [later - at for stream in times for at, later in itertools.pairwise(stream)]
    return {
        "tokens_per_second": count * STREAM_TOKENS / seconds,
        "gap_p50": quantile(gaps, 0.5),
        "gap_p95": quantile(gaps, 0.95),
        "gap_p99": quantile(gaps, 0.99),
    }


def build_words(tokens: int, seed: int) -> str:
    """Return a text of about `tokens` tokens: most letters are one token."""
    letters = random.Random(seed)
    return "".join(letters.choice("bcdfghjklmpqsvxyz ") for _ in range(tokens))


def measure_agents(peer: Peer, seed: int) -> dict[str, float]:
    """Return the seconds of the first turn of all agents, of all turns, and the computed prompt tokens."""
    system = build_words(SYSTEM_TOKENS, seed)
    first_turns, computed = [0.0] * AGENTS, [0] * AGENTS

    def run(index: int) -> None:
        messages = [{"role": "system", "content": system}]
        for turn in range(TURNS):
            messages.append({"role": "user", "content": build_words(60, seed * 1000 + index * 10 + turn)})
            chunks = list(peer.chat({"messages": messages, "max_tokens": 48, **GREEDY, **peer.build_ignore_eos()}))
            messages.append({"role": "assistant", "content": "".join(chunk.text for chunk in chunks)})
            computed[index] += sum(chunk.computed_tokens for chunk in chunks)
            if turn == 0:
                first_turns[index] = time.perf_counter()

    started = time.perf_counter()
    total = run_threads(run, range(AGENTS))
    return {"first_turn": max(first_turns) - started, "total": total, "computed": sum(computed)}


def measure_third(peer: Peer, seed: int) -> dict[str, float]:
    """Return the tokens per second of a random third of 64 conversations that continue at once."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(*BYTE_TOKENS, (SLOTS, PROMPT_TOKENS)).tolist()
    run_threads(lambda prompt: stream_completion(peer, prompt, 2, **GREEDY), prompts)
    continued = [[*prompt, 9, 10] for prompt in random.Random(seed).sample(prompts, SLOTS // 3)]
    seconds = run_threads(lambda prompt: stream_completion(peer, prompt, STREAM_TOKENS, **GREEDY), continued)
    return {"tokens_per_second": len(continued) * STREAM_TOKENS / seconds}


def measure_first_token(peer: Peer, prompt: Sequence[int]) -> float:
    started = time.perf_counter()
    times = stream_completion(peer, prompt, 1, **GREEDY)
    return (times[0] if times else time.perf_counter()) - started


def wait_until_stored(folder: Path, pause: float = 3.0) -> int:
    """Wait until an idle server has written its prefix cache; return the bytes. Users rarely stop it at once."""
    sizes = [0]
    for _ in range(MAX_STORE_PAUSES):
        time.sleep(pause)
        sizes.append(sum(file.stat().st_size for file in folder.rglob("*.cells")))
        if sizes[-1] == sizes[-2] > 0:
            break
    return sizes[-1]


def measure_restart(model: Path, program: Path, threads: int, root: Path) -> dict[str, float]:
    """Return the seconds to the first token of a long prompt: computed, and after a restart."""
    size = ServerSize(model=model, threads=threads, slots=1, context=RESTART_TOKENS + 768)
    warm_up, prompt = np.random.default_rng(7).integers(*BYTE_TOKENS, (2, RESTART_TOKENS)).tolist()
    seconds: dict[str, float] = {}
    with start_server(GpuAfterglow, size, root) as peer:
        measure_first_token(peer, warm_up[:4000])
        seconds["computed"] = measure_first_token(peer, prompt)
        answered_at = time.perf_counter()
        seconds["stored_bytes"] = wait_until_stored(root / GpuAfterglow.name / "cache")
        stopped_at = time.perf_counter()
    seconds |= {"store": stopped_at - answered_at, "stop": time.perf_counter() - stopped_at}
    restarts = []
    for _ in range(2):
        with start_server(GpuAfterglow, size, root) as peer:
            measure_first_token(peer, warm_up[4000:8000])
            restarts.append(measure_first_token(peer, prompt))
    seconds["restart"] = min(restarts)
    with start_server(build_llama_server(program), size, root) as peer:
        measure_first_token(peer, warm_up[:4000])
        seconds["llama-server"] = measure_first_token(peer, prompt)
    return seconds


def measure_peers(
    model: Path, program: Path, threads: int, pairs: int, counts: Sequence[int]
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure the rows that need 64 slots, alternating. Return medians by row and server."""
    size = ServerSize(model=model, threads=threads, slots=SLOTS, context=SLOT_TOKENS)
    kinds = [GpuAfterglow, *(build_llama_server(program, *flags) for flags in ((), ("--backend-sampling",), ("-kvu",)))]
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="afterglow-gpu-") as root:
        for pair in range(pairs):
            for kind in kinds if pair % 2 == 0 else kinds[::-1]:
                with start_server(kind, size, Path(root)) as peer:
                    measure_streams(peer, 8, GREEDY, 1)  # warm-up
                    measures: dict[str, dict[str, float]] = {}
                    if "-kvu" not in peer.name:
                        for count, (name, sampling) in itertools.product(counts, SAMPLINGS.items()):
                            measures[f"{count} streams, {name}"] = measure_streams(
                                peer, count, sampling, 9 * pair + count
                            )
                    measures["agents"] = measure_agents(peer, 10 + pair)
                    measures["a third of 64"] = measure_third(peer, 20 + pair)
                for what, values in measures.items():
                    runs.setdefault(what, {}).setdefault(peer.name, []).append(values)
    return {
        what: {name: take_medians(values) for name, values in by_peer.items()} for what, by_peer in runs.items()
    }  # fmt: skip


def take_medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def compare(kind: str, model: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one model: figures of every server, and the ratio to the best llama-server."""
    rows: list[dict[str, Any]] = []
    medians = measure_peers(model, arguments.server, arguments.threads, arguments.pairs, arguments.counts)
    print(f"{kind} over HTTP; ratio to the best llama-server")
    for what, by_peer in medians.items():
        for name, values in by_peer.items():
            print(f"  {what:22} {name:34} " + " ".join(f"{key} {value:.4g}" for key, value in values.items()))
        ours, theirs = by_peer.pop(GpuAfterglow.name), list(by_peer.values())
        for measure, limit, larger_is_better in LIMITS:
            if measure in ours and (measure != "total" or what == "agents"):
                best = (max if larger_is_better else min)(values[measure] for values in theirs)
                ratio = ours[measure] / best
                passed = ratio >= limit if larger_is_better else ratio <= limit
                rows.append({"model": kind, "what": f"{what}: {measure}", "ratio": ratio, "passed": passed,
                             "afterglow": ours[measure], "best": best})  # fmt: skip
                print(f"  {what:22} {measure:34} {ratio:.3f} {'' if passed else 'MISSED'}")
    with tempfile.TemporaryDirectory(prefix="afterglow-gpu-") as root:
        seconds = measure_restart(model, arguments.server, arguments.threads, Path(root))
    ratio = seconds["restart"] / seconds["computed"]
    rate = seconds["stored_bytes"] / 1e9 / seconds["restart"]
    rows.append({"model": kind, "what": "restart", **seconds, "ratio": ratio, "passed": ratio <= MAX_RESTART_RATIO})
    print(f"  restart: {ratio:.3f} of computing {RESTART_TOKENS} tokens, {rate:.2f} GB/s, {seconds}", flush=True)
    return rows
