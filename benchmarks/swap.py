"""Alternating turns of three models with room for one: afterglow swaps them, llama-server is restarted for each swap.

Each model has one growing conversation. A turn is timed from the moment at which the client wants it to the end of its
answer, swap included; the two servers take turns. llama-server of this build has no mode that serves several models, so
it is stopped and started with the other model. Then one model is loaded and unloaded again and again, and the memory of
the server process is compared. Exits with 1 if a bar is missed: computed tokens, resident memory, leak or time.

    python benchmarks/swap.py [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from peers import Afterglow, LlamaServer, Peer, ServerSize
from report import Row, print_report
from synthetic_inputs import random_text

from afterglow import registry
from afterglow.api.load import plan_load
from afterglow.api.options import LoadOptions, check_options
from afterglow.engine.types.settings import EngineSettings

MAX_RATIO = 0.3
MAX_RESIDENT = 1.05  # of the budget, server and engine together
MAX_GROWTH = 1.02  # of the server process, over all load and unload cycles
WARM_UP_CYCLES = 3
SAMPLE_SECONDS = 0.05
BUDGET_FACTOR = 1.2  # of the memory of one model
NAMES = ("first", "second", "third")
ANSWER_TOKENS = 16
CONTEXT, SLOTS = 4096, 1
RAM_CACHE_BYTES = 256 * 1024**2


class SwappingAfterglow(Afterglow):
    """`afterglow serve` with several models and a budget for one of them."""

    def __init__(self, size: ServerSize, directory: Path, models: dict[str, Path], budget: int) -> None:
        super().__init__(size, directory)
        self._models, self._budget = models, budget

    def build_command(self) -> list[str]:
        command = [part for part in super().build_command() if not part.startswith("model=")]
        models = [f"{name}={path}" for name, path in self._models.items()]
        return [*command, *models, "--memory-bytes", str(self._budget), "--ram-cache-bytes", str(RAM_CACHE_BYTES)]


class MemorySampler(threading.Thread):
    """Samples the resident memory of a server in the background. `peak` is the largest sum so far."""

    def __init__(self, server: Peer) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._server = server
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            with contextlib.suppress(psutil.NoSuchProcess):  # an engine that has just ended
                self.peak = max(self.peak, self._server.resident_bytes)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def measure_growth(server: SwappingAfterglow, cycles: int) -> float:
    """Load, use and unload a model again and again; return the memory of the server process relative to the first."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    before = 0
    for cycle in range(WARM_UP_CYCLES + cycles):
        if cycle == WARM_UP_CYCLES:
            before = process.memory_info().rss
        list(server.chat({"model": NAMES[0], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}))
        post(server, "/models/unload", {"model": NAMES[0]})
    return process.memory_info().rss / before


def post(server: Peer, path: str, body: dict[str, Any]) -> None:
    """Send a request and check its status."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        assert response.status == 200, text
    finally:
        connection.close()


class Conversation:
    """A conversation that grows by one question and one answer per turn."""

    def __init__(self, name: str, words: int) -> None:
        self.name = name
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": random_text(f"{name} system", words)}]
        self._turn = 0
        self._known_tokens = 0

    def take_turn(self, ask: Callable[[dict[str, Any]], Any], words: int) -> tuple[int, int]:
        """Ask the next question; return the computed prompt tokens and those that are new."""
        self._turn += 1
        question = random_text(f"{self.name} {self._turn}", words)
        self._messages.append({"role": "user", "content": question})
        chunks = list(ask({"model": self.name, "messages": self._messages, "max_tokens": ANSWER_TOKENS}))
        text = "".join(chunk.text for chunk in chunks)
        prompt = max(chunk.prompt_tokens for chunk in chunks)
        computed = max(chunk.computed_tokens for chunk in chunks)
        new = prompt - self._known_tokens
        self._known_tokens = prompt + max(chunk.generated_tokens for chunk in chunks)
        self._messages.append({"role": "assistant", "content": text})
        return computed, new


def measure(turns: int, words: int, question_words: int, cycles: int, threads: int) -> list[Row]:
    source = registry.pull("smollm2")
    with tempfile.TemporaryDirectory(prefix="afterglow-swap-") as folder:
        root = Path(folder)
        models = {name: Path(shutil.copy(source, root / f"{name}.gguf")) for name in NAMES}
        size = ServerSize(model=source, threads=threads, slots=SLOTS, context=CONTEXT)
        (root / "ours").mkdir()
        (root / "theirs").mkdir()
        budget = int(BUDGET_FACTOR * estimate_bytes(source))
        ours = SwappingAfterglow(size, root / "ours", models, budget)
        theirs: LlamaServer | None = None
        conversations = [{name: Conversation(name, words) for name in NAMES} for _ in range(2)]
        our_seconds, their_seconds, excess = [], [], 0
        ours.start()
        sampler = MemorySampler(ours)
        sampler.start()
        try:
            for turn in range(turns):
                name = NAMES[turn % len(NAMES)]
                started = time.perf_counter()
                computed, new = conversations[0][name].take_turn(ours.chat, question_words)
                our_seconds.append(time.perf_counter() - started)
                excess = max(excess, computed - new)
                started = time.perf_counter()
                if theirs is not None:
                    theirs.stop()
                theirs = LlamaServer(
                    ServerSize(model=models[name], threads=threads, slots=SLOTS, context=CONTEXT), root / "theirs"
                )
                theirs.start()
                conversations[1][name].take_turn(theirs.chat, question_words)
                their_seconds.append(time.perf_counter() - started)
                print(f"turn {turn:2} {name:6} {our_seconds[-1]:6.2f} s  llama-server {their_seconds[-1]:6.2f} s")
            growth = measure_growth(ours, cycles)
        finally:
            sampler.stop()
            ours.stop()
            if theirs is not None:
                theirs.stop()
    later = slice(len(NAMES), None)  # the first turn of a model is cold on both
    ratio = sum(our_seconds[later]) / sum(their_seconds[later])
    return [
        Row(f"{turns} turns after a swap, median", statistics.median(our_seconds[later]), "s"),
        Row("llama-server, restarted, median", statistics.median(their_seconds[later]), "s"),
        # With short conversations, both spend most of the time in starting a process.
        Row(
            "all turns but the first of each model",
            sum(our_seconds[later]),
            "s",
            share=ratio,
            bar=MAX_RATIO,
            full=True,
        ),
        Row("computed beyond the new tokens, maximum", excess, "", bar=1),
        Row(
            "resident memory, server and engine, maximum",
            sampler.peak / 1024**2,
            "MiB",
            share=sampler.peak / budget,
            bar=MAX_RESIDENT,
            note=f"of the budget of {budget / 1024**2:,.0f} MiB",
        ),
        Row(f"server process after {cycles} loads and unloads", growth, "", bar=MAX_GROWTH),
    ]


def estimate_bytes(model: Path) -> int:
    """Return the RAM of one model as the server counts it."""
    options = check_options(LoadOptions, {"context": CONTEXT, "sequences": SLOTS, "ram_cache_bytes": RAM_CACHE_BYTES})
    return plan_load(model, options, EngineSettings()).ram_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns and shorter conversations")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    sizes = (9, 300, 30, 5) if arguments.quick else (30, 1000, 60, 50)
    return print_report("swap", measure(*sizes, threads=arguments.threads), quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
