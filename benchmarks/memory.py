"""Memory that survives: how long until the first token of a long conversation's next turn, from wherever it is kept?

Cold, in memory, from RAM, and from disk in a new process, measured from the moment the engine is ready; on a model that
people run and on a hybrid one of a size where prefill hurts. Then 32 conversations that take turns on 4 sequences, and
how many tokens more than an ideal cache they compute. llama-server of the same build is shown beside it.

One thread: where others use the machine too, llama.cpp's threads wait for each other at every step of the graph, which
costs a short decode ten times its own time and a long one nothing.

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
from shares import Row, report

import afterglow
from afterglow import registry
from afterglow.api.model import Model
from afterglow.engine.inspect.cache import TierUsage, get_tier_usage
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.library.loader import get_library
from afterglow.testing.models.decoder import write_random_model
from afterglow.testing.models.hybrid import Qwen35

HYBRID = Qwen35(
    embedding_length=512, layers=8, full_attention_interval=4, heads=8, kv_heads=2, head_size=64, feed_forward_length=1536, state_size=64, state_key_heads=4,
    state_heads=8,
)  # fmt: skip
SMALL = Qwen35(
    embedding_length=256, heads=4, head_size=64, feed_forward_length=512, state_size=64, state_heads=8
)  # to be asked often
NEXT = 12  # tokens of the next turn
RAM, DISK = 0.03, 0.05  # of cold
MORE = 0.05  # tokens more than an ideal cache computes
SOAK_BYTES = 24 * 1024**2  # so little that a short one is full, too


def words(length: int, seed: int) -> list[int]:
    """Tokens that mean nothing; every model has them."""
    return [int(token) for token in np.random.default_rng(seed).integers(10, 250, length)]


def opened(path: Path, directory: Path, context: int) -> Model:
    settings = EngineSettings(disk_cache_directory=directory, disk_cache_label=str(path), ram_cache_bytes=1024**3)
    return afterglow.load(path, context=context, sequences=1, threads=1, engine=settings)


def first_token(model: Model, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the first token, and how many tokens of the prompt were not computed."""
    started = time.perf_counter()
    answer = model.complete(prompt, max_tokens=1, ignore_ends=True)
    return time.perf_counter() - started, answer.usage.cached_tokens


def tiers_of(model: Model) -> dict[str, TierUsage]:
    return model._get_host().call(get_tier_usage)


def restarted(path: Path, directory: Path, length: int) -> dict[str, float]:
    """The next turn in a new process."""
    command = [sys.executable, __file__, "--child", str(path), "--directory", str(directory), "--length", str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def child(path: Path, directory: Path, length: int) -> None:
    with opened(path, directory, length + 512) as model:
        first_token(model, words(40, os.getpid()))  # what every process pays once
        seconds, cached = first_token(model, words(length, 1) + words(NEXT, 1000 + os.getpid()))
        hits = tiers_of(model)["disk"].counters.hits
    print(json.dumps({"seconds": seconds, "cached": cached, "hits": hits}))


def turns(name: str, path: Path, length: int, root: Path) -> list[Row]:
    """The next turn of one conversation from wherever it is kept."""
    conversation, following = words(length, 1), words(length, 1) + words(NEXT, 2)
    directory = root / name
    with opened(path, directory, length + 512) as model:
        first_token(model, words(40, 3))
        cold, _ = first_token(model, conversation)
        warm, warm_cached = first_token(model, following)
        first_token(model, words(100, 4))  # takes the only sequence
        stored, ram_cached = min(one_from_ram(model, conversation, seed) for seed in (5, 6, 7))
        assert tiers_of(model)["ram"].counters.hits >= 3
        time.sleep(0.5)
    disk = min((restarted(path, directory, length) for _ in range(2)), key=lambda one: one["seconds"])
    assert disk["hits"] == 1, disk
    return [
        Row(f"{name}: cold", cold, "s", 1.0, note=f"{length:,} tokens"),
        Row(f"{name}: in memory", warm, "s", warm / cold, note=f"{warm_cached:,} cached"),
        Row(f"{name}: from RAM", stored, "s", stored / cold, RAM, f"{ram_cached:,} cached"),
        Row(f"{name}: from disk, new process", disk["seconds"], "s", disk["seconds"] / cold, DISK,
            f"{disk['cached']:,} cached"),
    ]  # fmt: skip


def one_from_ram(model: Model, conversation: list[int], seed: int) -> tuple[float, int]:
    """The next turn of a conversation that has to come out of RAM; another one takes its place again."""
    found = first_token(model, conversation + words(NEXT, seed))
    first_token(model, words(100, 10 + seed))
    return found


def interleaved(name: str, path: Path, root: Path, *, start: int, rounds: int) -> Row:
    """32 conversations take turns on 4 sequences; how many more tokens are computed than once each."""
    engine = EngineSettings(disk_cache_directory=root / "interleaved", ram_cache_bytes=1024**3)
    computed = ideal = 0
    with afterglow.load(path, context=start + rounds * 64, sequences=4, threads=1, engine=engine) as model:
        first_token(model, words(40, 3))
        said = [words(start, 100 + number) for number in range(32)]
        known = [0] * len(said)
        for round in range(rounds):
            for number, conversation in enumerate(said):
                answer = model.complete(conversation, max_tokens=4, ignore_ends=True)
                computed += answer.usage.prompt_tokens - answer.usage.cached_tokens
                ideal += len(conversation) - known[number]
                known[number] = len(conversation) + len(answer.tokens) - 1
                conversation += [*answer.tokens, *words(32, 1000 * round + number)]
    note = f"{computed:,} computed, {ideal:,} ideal"
    return Row(f"{name}: 32 conversations on 4 sequences", computed / ideal - 1, "more", None, MORE, note)


def llama_server(name: str, path: Path, length: int) -> list[Row]:
    """The same with llama-server: memory and RAM. It keeps nothing for the next start."""
    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.warmup, settings.fit_params, settings.verbosity = True, False, 1
    settings.n_ctx, settings.n_parallel = length + 512, 1
    settings.cpuparams.n_threads = 1
    serving = xllamacpp.Server(settings)

    def ask(prompt: list[int]) -> float:
        body = json.dumps({"prompt": prompt, "n_predict": 1, "cache_prompt": True, "ignore_eos": True}).encode()
        url = f"{serving.listening_address}/completion"
        started = time.perf_counter()
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
            answer.read()
        return time.perf_counter() - started

    ask(words(40, 3))
    cold, warm = ask(words(length, 1)), ask(words(length, 1) + words(NEXT, 2))
    ask(words(100, 4))
    stored = ask(words(length, 1) + words(NEXT, 5))
    shown = {"cold": cold, "in memory": warm, "from RAM": stored}
    rows = [Row(f"{name}: llama-server, {what}", value, "s", value / cold) for what, value in shown.items()]
    rows[-1].note = "it keeps nothing for the next start, which is cold"
    return rows


def soak(path: Path, root: Path, seconds: float) -> Row:
    """Conversations come and go, far more than fit; the process stays within what it may take.

    That is what another process takes that keeps nothing outside of memory, with every buffer in use, `ram_bytes` on
    top, and the one copy of a sequence that is being taken out. The libraries, the weights and the context, which lie
    within it, are shown.
    """
    bare, found = soaked(path, root / "bare", 4.0, keeping=0), soaked(path, root / "soak", seconds, keeping=SOAK_BYTES)
    sizes = {"libraries": found["libraries"], "weights": found["weights"], "context": found["context"]}
    sizes |= {"bare": bare["most"], "budget": SOAK_BYTES, "copy": found["copy"]}
    allowed = bare["most"] + SOAK_BYTES + found["copy"]
    sizes |= {"allowed": allowed, "most in the first half": found["half"], "most": found["most"]}
    note = f"{found['asked']:,} requests, {found['evictions']:,} evictions in RAM; MiB: "
    note += ", ".join(f"{name} {size / 1024**2:.0f}" for name, size in sizes.items())
    return Row(f"soak of {seconds:.0f} s: process of what it may", found["most"] / allowed, "x", None, 1.05, note)


def soaked(path: Path, directory: Path, seconds: float, *, keeping: int) -> dict[str, int]:
    """What a new process took that was asked for so long."""
    command = [sys.executable, __file__, "--child", str(path), "--directory", str(directory)]
    command += ["--soaking", str(seconds), "--keeping", str(keeping)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 300)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def soaking(path: Path, directory: Path, seconds: float, keeping: int) -> None:
    """The child of `soaked`."""
    process, random = psutil.Process(), np.random.default_rng(1)
    get_library()
    libraries = process.memory_info().rss
    place = directory if keeping else None
    engine = EngineSettings(disk_cache_directory=place, disk_cache_bytes=SOAK_BYTES, ram_cache_bytes=keeping)
    with afterglow.load(path, context=1024, sequences=4, threads=1, engine=engine) as model:
        context = model._lifecycle.context
        footprint = context.model.estimate_footprint(context.settings)
        half = most = asked = 0
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds or asked < (60 if keeping else 12):
            length = int(random.integers(50, 900))
            model.complete(words(length, int(random.integers(200))), max_tokens=2, ignore_ends=True)
            most, asked = max(most, peak(process)), asked + 1
            half = most if passed < seconds / 2 else half
        usages = tiers_of(model)
        assert all(usage.nbytes <= keeping for usage in usages.values())
    copy = (footprint.kv_cache_bytes + footprint.recurrent_bytes) // context.settings.sequences
    told = {"libraries": libraries, "weights": footprint.weight_bytes, "context": footprint.context_bytes, "copy": copy}
    told |= {"half": half, "most": most, "asked": asked, "evictions": usages["ram"].counters.evictions}
    print(json.dumps(told))


def peak(process: psutil.Process) -> int:
    """The most that this process ever took, copies that were gone before anybody looked included; where the system
    does not say, what it takes now."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    told = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return told[0] if told else int(process.memory_info().rss)


def measured(quick: bool, soaking: float) -> list[Row]:
    smollm2 = registry.resolve("smollm2", fetch=True)
    with tempfile.TemporaryDirectory(prefix="afterglow-memory-") as folder:
        root = Path(folder)
        hybrid = root / "hybrid.gguf"
        write_random_model(hybrid, HYBRID, seed=5)
        length = 2000 if quick else 4000
        rows = turns("hybrid", hybrid, length, root)
        rows += llama_server("hybrid", hybrid, length)
        rows += turns("smollm2", smollm2, length, root)
        if not quick:
            rows += llama_server("smollm2", smollm2, length)
            rows.append(interleaved("smollm2", smollm2, root, start=256, rounds=3))
        rows.append(interleaved("hybrid", hybrid, root, start=128 if quick else 256, rounds=3))
        small = root / "small.gguf"
        write_random_model(small, SMALL, seed=5)
        rows.append(soak(small, root, soaking))
    return rows


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="half the length, less work, the same bars, about 90 s")
    arguments.add_argument("--soak", type=float, help="seconds of coming and going (40, or 8)")
    arguments.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--length", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--soaking", type=float, help=argparse.SUPPRESS)
    arguments.add_argument("--keeping", type=int, help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.child is not None:
        if chosen.soaking:
            soaking(chosen.child, chosen.directory, chosen.soaking, chosen.keeping)
        else:
            child(chosen.child, chosen.directory, chosen.length)
        return 0
    os.environ["AFTERGLOW_DISK_CACHE"] = "off"  # but where it is asked for
    rows = measured(chosen.quick, chosen.soak or (8.0 if chosen.quick else 40.0))
    return report("memory", rows)


if __name__ == "__main__":
    sys.exit(main())
