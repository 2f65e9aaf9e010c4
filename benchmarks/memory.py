"""Time to first token of the next turn of a long conversation from each cache tier.

Measured cold, from the device, from the RAM tier, and from the disk tier in a new process once its engine is ready; on
a real attention model and on a hybrid one of a size at which prefill is slow. Then 32 conversations alternate on 4
sequences, and their computed tokens are compared with those of an ideal cache. Last, a soak test bounds the memory of
the process. llama-server of the same build is printed beside it.

One thread: if other processes use the machine, llama.cpp's threads wait for each other at every node of the graph. That
costs a short decode ten times its own time, and a long one nothing.

    python benchmarks/memory.py [--quick] [--soak SECONDS]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import xllamacpp
from report import Row, print_report

import afterglow
from afterglow import registry
from afterglow.api.model import Model
from afterglow.engine.inspect.cache import TierUsage, get_tier_usage
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.library.loader import get_library
from afterglow.testing.models.decoder import write_random_model
from afterglow.testing.models.hybrid import Qwen35

HYBRID = Qwen35(
    embedding_length=512, layers=8, full_attention_interval=4, heads=8, kv_heads=2, head_size=64,
    feed_forward_length=1536, state_size=64, state_key_heads=4, state_heads=8,
)  # fmt: skip
SOAK_MODEL = Qwen35(
    embedding_length=256, heads=4, head_size=64, feed_forward_length=512, state_size=64, state_heads=8
)  # small, for many requests per second
NEXT_TURN_TOKENS = 12
MAX_RAM_SHARE, MAX_DISK_SHARE = 0.03, 0.05  # of a cold start
MAX_EXCESS = 0.05  # computed tokens beyond those of an ideal cache
SOAK_CACHE_BYTES = 24 * 1024**2  # small enough that a short soak fills it


def random_tokens(length: int, seed: int) -> list[int]:
    """Return random tokens that every model has."""
    return [int(token) for token in np.random.default_rng(seed).integers(10, 250, length)]


def load_model(path: Path, directory: Path, context: int) -> Model:
    settings = EngineSettings(disk_cache_directory=directory, disk_cache_label=str(path), ram_cache_bytes=1024**3)
    return afterglow.load(path, context=context, sequences=1, threads=1, engine=settings)


def measure_first_token(model: Model, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token, and the number of cached prompt tokens."""
    started = time.perf_counter()
    completion = model.complete(prompt, max_tokens=1, ignore_eos=True)
    return time.perf_counter() - started, completion.usage.cached_tokens


def get_tiers(model: Model) -> dict[str, TierUsage]:
    return model._get_host().call(get_tier_usage)


def run_child(*arguments: object, timeout: float = 300) -> dict[str, float]:
    """Run this file in a new process and return the JSON object of its last line."""
    command = [sys.executable, __file__, *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout)
    return dict(json.loads(process.stdout.splitlines()[-1]))


def measure_disk_in_child(path: Path, directory: Path, length: int) -> None:
    """Measure the next turn in this new process, and print it."""
    with load_model(path, directory, length + 512) as model:
        measure_first_token(model, random_tokens(40, os.getpid()))  # warm-up
        prompt = random_tokens(length, 1) + random_tokens(NEXT_TURN_TOKENS, 1000 + os.getpid())
        seconds, cached = measure_first_token(model, prompt)
        hits = get_tiers(model)["disk"].counters.hits
    print(json.dumps({"seconds": seconds, "cached": cached, "hits": hits}))


def measure_next_turn(name: str, path: Path, length: int, root: Path) -> list[Row]:
    """Measure the next turn of one conversation from each tier."""
    conversation = random_tokens(length, 1)
    directory = root / name
    with load_model(path, directory, length + 512) as model:
        measure_first_token(model, random_tokens(40, 3))  # warm-up
        cold, _ = measure_first_token(model, conversation)
        device, device_cached = measure_first_token(model, conversation + random_tokens(NEXT_TURN_TOKENS, 2))
        measure_first_token(model, random_tokens(100, 4))  # takes the only sequence
        ram, ram_cached = min(measure_from_ram(model, conversation, seed) for seed in (5, 6, 7))
        assert get_tiers(model)["ram"].counters.hits >= 3
        time.sleep(0.5)  # until the engine has stored the conversation
    child = ("--child", path, "--directory", directory, "--length", length)
    disk = min((run_child(*child) for _ in range(2)), key=lambda result: result["seconds"])
    assert disk["hits"] == 1, disk
    return [
        Row(f"{name}: cold", cold, "s", 1.0, note=f"{length:,} tokens"),
        Row(f"{name}: from device", device, "s", device / cold, note=f"{device_cached:,} cached"),
        Row(f"{name}: from RAM", ram, "s", ram / cold, MAX_RAM_SHARE, f"{ram_cached:,} cached"),
        Row(f"{name}: from disk, new process", disk["seconds"], "s", disk["seconds"] / cold, MAX_DISK_SHARE,
            f"{disk['cached']:,} cached"),
    ]  # fmt: skip


def measure_from_ram(model: Model, conversation: list[int], seed: int) -> tuple[float, int]:
    """Measure the next turn of a conversation in the RAM tier, then let another prompt take the sequence again."""
    result = measure_first_token(model, conversation + random_tokens(NEXT_TURN_TOKENS, seed))
    measure_first_token(model, random_tokens(100, 10 + seed))
    return result


def measure_interleaved(name: str, path: Path, root: Path, *, start: int, rounds: int) -> Row:
    """Count the tokens that 32 conversations alternating on 4 sequences compute beyond those of an ideal cache."""
    engine = EngineSettings(disk_cache_directory=root / "interleaved", ram_cache_bytes=1024**3)
    computed = ideal = 0
    with afterglow.load(path, context=start + rounds * 64, sequences=4, threads=1, engine=engine) as model:
        measure_first_token(model, random_tokens(40, 3))  # warm-up
        conversations = [random_tokens(start, 100 + number) for number in range(32)]
        computed_lengths = [0] * len(conversations)
        for round in range(rounds):
            for number, conversation in enumerate(conversations):
                completion = model.complete(conversation, max_tokens=4, ignore_eos=True)
                computed += completion.usage.prompt_tokens - completion.usage.cached_tokens
                ideal += len(conversation) - computed_lengths[number]
                computed_lengths[number] = len(conversation) + len(completion.tokens) - 1
                conversation += [*completion.tokens, *random_tokens(32, 1000 * round + number)]
    note = f"{computed:,} computed, {ideal:,} ideal"
    return Row(f"{name}: 32 conversations on 4 sequences", computed / ideal - 1, "more", None, MAX_EXCESS, note)


def measure_llama_server(name: str, path: Path, length: int) -> list[Row]:
    """Measure the same with llama-server, from its slot and from its RAM cache. It has no disk cache."""
    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.warmup, settings.fit_params, settings.verbosity = True, False, 1
    settings.n_ctx, settings.n_parallel = length + 512, 1
    settings.cpuparams.n_threads = 1
    server = xllamacpp.Server(settings)

    def measure(prompt: list[int]) -> float:
        body = json.dumps({"prompt": prompt, "n_predict": 1, "cache_prompt": True, "ignore_eos": True}).encode()
        url = f"{server.listening_address}/completion"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        started = time.perf_counter()
        with urllib.request.urlopen(request) as response:
            response.read()
        return time.perf_counter() - started

    conversation = random_tokens(length, 1)
    measure(random_tokens(40, 3))
    cold, device = measure(conversation), measure(conversation + random_tokens(NEXT_TURN_TOKENS, 2))
    measure(random_tokens(100, 4))
    ram = measure(conversation + random_tokens(NEXT_TURN_TOKENS, 5))
    times = {"cold": cold, "from device": device, "from RAM": ram}
    rows = [Row(f"{name}: llama-server, {source}", seconds, "s", seconds / cold) for source, seconds in times.items()]
    rows[-1].note = "no disk cache: the next start is cold"
    return rows


def measure_soak(path: Path, root: Path, seconds: float) -> Row:
    """Measure the peak memory of a process that serves far more conversations than fit, relative to its limit.

    The limit is the peak of another process without RAM and disk tier and with every buffer in use, plus
    `ram_cache_bytes`, plus one copy of a sequence, which exists while it is being stored. The libraries, the weights
    and the context are part of the first term and printed beside it.
    """

    def soak(name: str, duration: float, cache_bytes: int) -> dict[str, float]:
        child = ("--child", path, "--directory", root / name)
        return run_child(*child, "--soak-seconds", duration, "--cache-bytes", cache_bytes, timeout=duration + 300)

    bare, full = soak("bare", 4.0, 0), soak("soak", seconds, SOAK_CACHE_BYTES)
    limit = bare["peak"] + SOAK_CACHE_BYTES + full["copy"]
    sizes = {"libraries": full["libraries"], "weights": full["weights"], "context": full["context"]}
    sizes |= {"bare": bare["peak"], "budget": SOAK_CACHE_BYTES, "copy": full["copy"]}
    sizes |= {"limit": limit, "peak of the first half": full["half_peak"], "peak": full["peak"]}
    note = f"{full['requests']:,} requests, {full['evictions']:,} evictions in RAM; MiB: "
    note += ", ".join(f"{name} {size / 1024**2:.0f}" for name, size in sizes.items())
    return Row(f"soak of {seconds:.0f} s: peak memory / limit", full["peak"] / limit, "x", None, 1.05, note)


def soak_in_child(path: Path, directory: Path, seconds: float, cache_bytes: int) -> None:
    """Run the soak in this new process, and print its measurements."""
    process, rng = psutil.Process(), np.random.default_rng(1)
    get_library()
    libraries = process.memory_info().rss
    engine = EngineSettings(
        disk_cache_directory=directory if cache_bytes else None,
        disk_cache_bytes=SOAK_CACHE_BYTES,
        ram_cache_bytes=cache_bytes,
    )
    with afterglow.load(path, context=1024, sequences=4, threads=1, engine=engine) as model:
        context = model._lifecycle.context
        footprint = context.model.estimate_footprint(context.settings)
        half_peak = peak = requests = 0
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < seconds or requests < (60 if cache_bytes else 12):
            length = int(rng.integers(50, 900))
            model.complete(random_tokens(length, int(rng.integers(200))), max_tokens=2, ignore_eos=True)
            peak, requests = max(peak, get_peak_bytes(process)), requests + 1
            half_peak = peak if elapsed < seconds / 2 else half_peak
        tiers = get_tiers(model)
        assert all(tier.nbytes <= cache_bytes for tier in tiers.values())
    copy = (footprint.kv_cache_bytes + footprint.recurrent_bytes) // context.settings.sequences
    sizes = {"libraries": libraries, "weights": footprint.weight_bytes, "context": footprint.context_bytes}
    result = {**sizes, "copy": copy, "half_peak": half_peak, "peak": peak, "requests": requests}
    print(json.dumps({**result, "evictions": tiers["ram"].counters.evictions}))


def get_peak_bytes(process: psutil.Process) -> int:
    """Return the peak memory of this process, including copies that are freed already.

    If the system does not provide it, return the current memory.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else int(process.memory_info().rss)


def measure_all(quick: bool, soak_seconds: float) -> list[Row]:
    smollm2 = registry.resolve("smollm2", fetch=True)
    with tempfile.TemporaryDirectory(prefix="afterglow-memory-") as directory:
        root = Path(directory)
        hybrid = root / "hybrid.gguf"
        write_random_model(hybrid, HYBRID, seed=5)
        length = 2000 if quick else 4000
        rows = measure_next_turn("hybrid", hybrid, length, root)
        rows += measure_llama_server("hybrid", hybrid, length)
        rows += measure_next_turn("smollm2", smollm2, length, root)
        if not quick:
            rows += measure_llama_server("smollm2", smollm2, length)
            rows.append(measure_interleaved("smollm2", smollm2, root, start=256, rounds=3))
        rows.append(measure_interleaved("hybrid", hybrid, root, start=128 if quick else 256, rounds=3))
        soak_model = root / "small.gguf"
        write_random_model(soak_model, SOAK_MODEL, seed=5)
        rows.append(measure_soak(soak_model, root, soak_seconds))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half the length, less work, the same bars, about 90 s")
    parser.add_argument("--soak", type=float, help="seconds of the soak test (default 40, 8 with --quick)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--soak-seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--cache-bytes", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        if arguments.soak_seconds:
            soak_in_child(arguments.child, arguments.directory, arguments.soak_seconds, arguments.cache_bytes)
        else:
            measure_disk_in_child(arguments.child, arguments.directory, arguments.length)
        return 0
    os.environ["AFTERGLOW_DISK_CACHE"] = "off"  # only engines with a disk cache directory use the disk tier
    soak_seconds = arguments.soak or (8.0 if arguments.quick else 40.0)
    return print_report("memory", measure_all(arguments.quick, soak_seconds))


if __name__ == "__main__":
    sys.exit(main())
