"""The server against llama-server of the same llama.cpp build: same model, same threads, alternating, over HTTP.

Tokens per second of one stream and of eight at once, the time to the first token of the eighth turn of a growing
conversation, and how long a cancelled 3,000-token prompt keeps the engine busy.

    python benchmarks/server.py [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

from afterglow import registry
from afterglow.llama.library import library

CONTEXT, SLOTS = 4096, 8
# llama-server inside the wheel, in a process of its own, as ours is.
PEER = """
import sys, time, xllamacpp
path, threads, context, slots = sys.argv[1], *map(int, sys.argv[2:])
settings = xllamacpp.CommonParams()
settings.model.path, settings.use_jinja, settings.verbosity = path, True, 0
settings.fit_params, settings.warmup, settings.cont_batching = False, True, True
settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = context * slots, slots, threads
settings.cpuparams_batch.n_threads, settings.port = threads, 0
server = xllamacpp.Server(settings)
print("at", server.listening_address, flush=True)
sys.stdin.read()
"""


@dataclass
class Row:
    """One comparison. `ratio` is ours to theirs; `bar` is what it must reach, or for times stay under."""

    name: str
    ours: float
    theirs: float
    unit: str
    bar: float | None
    larger_is_better: bool = True
    spread: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs if self.theirs else float("inf")

    @property
    def passed(self) -> bool:
        if self.bar is None:
            return True
        return self.ratio >= self.bar if self.larger_is_better else self.ratio <= self.bar


class Server:
    """A server process and plain connections to it."""

    def __init__(self, command: list[str], stream: str) -> None:
        environment = {**os.environ, "AFTERGLOW_DISK": "off", "NO_COLOR": "1", "TERM": "dumb"}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: subprocess.PIPE}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True, **pipes)
        for line in getattr(self.process, stream):
            if found := re.search(r"at (http://\S+)", line):
                address = urllib.parse.urlsplit(found[1])
                break
        else:
            raise SystemExit(f"{command[:3]} did not start")
        threading.Thread(target=getattr(self.process, stream).read, daemon=True).start()
        self.host, self.port = address.hostname, address.port

    def stream(self, body: dict) -> Iterator[tuple[float, dict]]:
        """The chunks of a streamed chat answer, each with the time at which it came."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=600)
        text = json.dumps({"model": "smollm2", "stream": True, "temperature": 0, **body})
        connection.request("POST", "/v1/chat/completions", text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        try:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield time.perf_counter(), json.loads(line[6:])
        finally:
            connection.close()

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        self.process.wait()


def messages(text: str) -> list[dict]:
    return [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": text}]


def tokens_per_second(server: Server, length: int, tag: str, count: int = 1) -> float:
    """Tokens of `count` streams over the time of all: of one from its first token, of several from their asking."""
    times: list[list[float]] = [[] for _ in range(count)]

    def ask(index: int) -> None:
        question = f"{tag} {index}: write a long story about a river, a mill and a child, with many details."
        for when, chunk in server.stream({"messages": messages(question), "max_tokens": length, "seed": index}):
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                times[index].append(when)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(count)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = times[0][0] if count == 1 else started
    return (sum(len(one) for one in times) - count) / (max(one[-1] for one in times) - first)


def eighth_turn(server: Server, tag: str) -> float:
    """Seconds to the first token of the eighth question of a conversation that grows."""
    talk = messages(f"{tag}: let us talk about rivers. " + "The river is long and wide. " * 20)
    for turn in range(8):
        started = time.perf_counter()
        first, said = None, ""
        for when, chunk in server.stream({"messages": talk, "max_tokens": 16}):
            if chunk["choices"] and (text := chunk["choices"][0]["delta"].get("content")):
                first = first or when
                said += text
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Question {turn}: and then?"}]
    assert first is not None
    return first - started


def freed_after_cancel(server: Server, tag: str, length: int) -> float:
    """Seconds from hanging up in the middle of a long prompt to the first token of somebody else's short question."""
    body = {"messages": messages(f"{tag} " + "The river is long and wide. " * (length // 7)), "max_tokens": 4}
    text = json.dumps({"model": "smollm2", "stream": True, **body}).encode()
    with socket.create_connection((server.host, server.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + text)
        time.sleep(1.0)  # by now it is being computed
    started = time.perf_counter()
    for when, chunk in server.stream({"messages": messages(f"{tag}: hello"), "max_tokens": 2}):
        if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
            return when - started
    raise SystemExit("no answer after a cancelled one")


def compared(
    name: str, unit: str, bar: float | None, measure, ours: Server, theirs: Server, pairs: int, better: bool = True
) -> Row:
    """Medians of alternating pairs; the first pair warms up and is not counted."""
    values: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        order = (0, 1) if pair % 2 else (1, 0)
        for which in order:
            value = measure((ours, theirs)[which], f"{name} {pair}")
            if pair:
                values[which].append(value)
    ratios = sorted(one / other for one, other in zip(*values, strict=True))
    row = Row(name, statistics.median(values[0]), statistics.median(values[1]), unit, bar, better)
    row.spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return row


def measured(quick: bool, threads: int) -> list[Row]:
    path = str(registry.pull("smollm2"))
    shape = ["--threads", str(threads), "--context", str(CONTEXT), "--sequences", str(SLOTS)]
    serve = [sys.executable, "-m", "afterglow.cli.main", "serve", f"smollm2={path}", "--port", "0", *shape]
    with tempfile.NamedTemporaryFile(suffix=".toml") as settings:  # nobody's own settings
        os.environ["AFTERGLOW_SETTINGS"] = settings.name
        ours = Server(serve, "stderr")
        theirs = Server([sys.executable, "-c", PEER, path, *map(str, (threads, CONTEXT, SLOTS))], "stdout")
        try:
            pairs, length = (3, 48) if quick else (7, 128)
            return [
                compared(
                    "one stream", "tok/s", 0.97, lambda s, t: tokens_per_second(s, length, t), ours, theirs, pairs
                ),
                compared(
                    "eight streams", "tok/s", 0.97, lambda s, t: tokens_per_second(s, length, t, 8), ours, theirs, pairs
                ),
                compared("eighth turn", "s", 1.05, eighth_turn, ours, theirs, pairs if not quick else 2, False),
                freed(ours, theirs, 1000 if quick else 3000, 1 if quick else 3),
            ]
        finally:
            ours.close()
            theirs.close()


def freed(ours: Server, theirs: Server, length: int, times: int) -> Row:
    """Ours must free the engine within a second; theirs is shown beside it."""
    mine = [freed_after_cancel(ours, f"cancel {n}", length) for n in range(times)]
    peer = freed_after_cancel(theirs, "cancel", length)
    row = Row("free after a cancelled prompt", max(mine), peer, "s", None)
    row.spread = f"{min(mine):.2f} to {max(mine):.2f} s, at most 1 s"
    if max(mine) > 1.0:
        row.bar, row.larger_is_better = 0.0, False
    return row


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="fewer pairs and shorter answers, the same bars")
    arguments.add_argument("--threads", type=int, default=2)
    chosen = arguments.parse_args()
    rows = measured(chosen.quick, chosen.threads)
    print(f"{'':32} {'afterglow':>10} {'llama-server':>13} {'':6} {'ratio':>6} {'bar':>6}")
    for row in rows:
        bar = "" if row.bar is None else f"{row.bar:.2f}"
        mark = "" if row.passed else "MISSED"
        print(
            f"{row.name:32} {row.ours:10.2f} {row.theirs:13.2f} {row.unit:6} {row.ratio:6.2f} {bar:>6} "
            f"({row.spread}) {mark}"
        )
    print(json.dumps({"benchmark": "server", "build": library().build, "rows": [vars(row) for row in rows]}))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
