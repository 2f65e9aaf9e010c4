"""The way of a token: from the engine to an HTTP client, and the CPU time of the server process per token.

The engine process records when it passes on each token, and the client when it reads the chunk, on the same clock. The
measured way includes the reading of the client, which is Python. It ends with one line of JSON and has no bar: the
speed of llama-server, which has no such clock, is compared in `server.py`.

    python benchmarks/token_path.py [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import psutil
from peers import Afterglow, ServerSize, start_peers

from afterglow import registry
from afterglow.cli.main import main as run_command_line
from afterglow.engine.host import child_main, child_process
from afterglow.engine.types.request import EngineEvent, Finished, Token
from afterglow.llama.model import LlamaModel

TIMES_VARIABLE = "TOKEN_PATH_TIMES"  # file for the times of the engine process
MODULE_CODE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import token_path; token_path."


class RecordingAfterglow(Afterglow):
    """afterglow without speculation, whose engine process records the time of each token."""

    def build_command(self) -> list[str]:
        executable, *command = super().build_command()
        return [executable, "-c", f"{MODULE_CODE}serve()", *command[2:], "--speculation", "off"]

    def build_environment(self) -> dict[str, str]:
        return {**super().build_environment(), TIMES_VARIABLE: str(self.times)}

    @property
    def times(self) -> Path:
        return self.directory / "times.json"


def serve() -> None:
    """Run the command line with an engine process that records times."""
    child_process.ENTRY_CODE = f"{MODULE_CODE}run_child()"
    run_command_line()


def run_child() -> None:
    """Run the engine process. It writes the times of a request when it ends."""
    times: list[float] = []
    deliver = child_main.ChildHost._deliver

    def record_and_deliver(host: child_main.ChildHost, events: list[EngineEvent]) -> None:
        now = time.perf_counter()
        times.extend(now for event in events if isinstance(event, Token))
        if any(isinstance(event, Finished) for event in events):
            Path(os.environ[TIMES_VARIABLE]).write_text(json.dumps(times))
            times.clear()
        deliver(host, events)

    child_main.ChildHost._deliver = record_and_deliver  # type: ignore[method-assign]
    child_main.main()


def measure(peer: RecordingAfterglow, number: int, tokens: int) -> tuple[list[float], float]:
    """Return the microseconds of each token of one answer, and those of CPU time per token in the server process."""
    assert peer.process is not None
    process = psutil.Process(peer.process.pid)
    before = process.cpu_times()
    body = {
        "messages": [{"role": "user", "content": f"Tell me about {number}."}],
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": 1,
        **peer.build_ignore_eos(),
    }
    received = [chunk.received_at for chunk in peer.chat(body) if chunk.text]
    after = process.cpu_times()
    cpu_seconds = after.user + after.system - before.user - before.system
    sent = json.loads(peer.times.read_text())
    if len(sent) != len(received):  # a token with a part of a character has no chunk
        return [], 1e6 * cpu_seconds / tokens
    return [1e6 * (end - start) for start, end in zip(sent, received, strict=True)], 1e6 * cpu_seconds / tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter answers")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    answers, tokens = (3, 60) if arguments.quick else (9, 200)
    path = registry.resolve("smollm2", fetch=True)
    with LlamaModel.load(path, trust=True) as model:
        eog_tokens = model.vocabulary.eog_tokens
    size = ServerSize(model=path, threads=arguments.threads, slots=1, context=1024, eog_tokens=eog_tokens)
    with start_peers(size, (RecordingAfterglow,)) as [peer]:
        assert isinstance(peer, RecordingAfterglow)
        measure(peer, 0, 16)
        results = [measure(peer, number, tokens) for number in range(1, answers + 1)]
    ways = sorted(way for way_list, _ in results for way in way_list)
    row = {
        "threads": arguments.threads,
        "tokens": len(ways),
        "p10": ways[len(ways) // 10],
        "median": ways[len(ways) // 2],
        "p90": ways[9 * len(ways) // 10],
        "server_cpu": statistics.median(cpu for _, cpu in results),
    }
    percentiles = ", ".join(f"{name} {row[name]:.0f}" for name in ("p10", "median", "p90"))
    print(f"engine to client, {len(ways)} tokens: {percentiles} µs")
    print(f"CPU time of the server process per token: {row['server_cpu']:.0f} µs")
    print(json.dumps({"benchmark": "token_path", **row}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
