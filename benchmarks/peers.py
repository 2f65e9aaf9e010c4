"""Servers that are compared, each in a process of its own: how one is started, asked, and asked what it did.

They are given the same model, threads, conversations at once and tokens for each. Everything else is as they come.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

ADDRESS = re.compile(r"at (http://\S+)\s")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a server is."""

    model: Path
    threads: int
    slots: int
    context: int  # tokens of one conversation
    ends: frozenset[int] = frozenset()  # the model's tokens that would end an answer
    projector: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a streamed answer. The last one has counts."""

    when: float
    text: str
    prompt: int = 0  # tokens
    computed: int = 0  # tokens of the prompt that were not there yet


class Peer:
    """A server process and plain connections to it. A subclass says how it is started and what it answers."""

    name: ClassVar[str]

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape, self.folder = shape, folder
        self.host, self.port = "", 0
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "log"

    # --- what a subclass says

    def command(self) -> list[str]:
        """What starts it; it writes `at http://…` when it is ready."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def endless(self) -> dict[str, Any]:
        """What makes an answer go on to its last token."""
        raise NotImplementedError

    def counts(self, chunk: dict[str, Any]) -> tuple[int, int] | None:
        """Tokens of the prompt, and those that were computed, where a chunk says so."""
        raise NotImplementedError

    def cache_bytes(self) -> int:
        """Bytes of what it keeps in RAM beside its conversations."""
        raise NotImplementedError

    # --- its life

    def start(self) -> None:
        """Start it; returns when it is ready."""
        environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", **self.environment()}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        deadline = time.monotonic() + 120
        while (found := ADDRESS.search(self.log.read_text(errors="replace"))) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} did not start: {self.log.read_text(errors='replace')[-800:]}")
            time.sleep(0.02)
        address = urllib.parse.urlsplit(found[1])
        self.host, self.port = address.hostname or "", address.port or 80

    def stop(self) -> None:
        """End it as a person would."""
        if self.process is None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.communicate()
        self.process = None

    @property
    def resident(self) -> int:
        """Bytes of memory that its processes have."""
        assert self.process is not None
        first = psutil.Process(self.process.pid)
        return sum(one.memory_info().rss for one in (first, *first.children(recursive=True)))

    # --- what it is asked

    def get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("GET", path)
            return dict(json.loads(connection.getresponse().read()))
        finally:
            connection.close()

    def post(self, body: dict[str, Any]) -> http.client.HTTPConnection:
        """Send a request for a streamed answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=900)
        asked = {"model": "model", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, **body}
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
        return connection

    def chat(self, body: dict[str, Any]) -> Iterator[Chunk]:
        """The pieces of an answer as they come."""
        connection = self.post(body)
        try:
            answer = connection.getresponse()
            if answer.status != 200:
                raise SystemExit(f"{self.name} answered {answer.status}: {answer.read().decode()[:500]}")
            for line in answer:
                if line.startswith(b"data: {"):
                    yield self._chunk(json.loads(line[6:]), time.perf_counter())
        finally:
            connection.close()

    def _chunk(self, chunk: dict[str, Any], when: float) -> Chunk:
        if "error" in chunk:
            raise SystemExit(f"{self.name} ended an answer: {chunk['error']}")
        choices = chunk.get("choices") or [{}]
        text = choices[0].get("delta", {}).get("content") or ""
        prompt, computed = self.counts(chunk) or (0, 0)
        return Chunk(when=when, text=text, prompt=prompt, computed=computed)


class Afterglow(Peer):
    """`afterglow serve`, with a folder of its own for what it keeps on disk."""

    name = "afterglow"

    def command(self) -> list[str]:
        shape = self.shape
        sizes = ["--threads", shape.threads, "--context", shape.context, "--sequences", shape.slots]
        serve = [sys.executable, "-m", "afterglow.cli.main", "serve", f"model={shape.model}", "--port", "0"]
        seeing = ["--projector", shape.projector] if shape.projector else []
        return [*serve, *map(str, [*sizes, *seeing])]

    def environment(self) -> dict[str, str]:
        settings = self.folder / "settings.toml"  # nobody's own settings
        settings.touch()
        cache = str(self.folder / "cache")
        return {"AFTERGLOW_SETTINGS": str(settings), "AFTERGLOW_CACHE": cache, "AFTERGLOW_DISK_CACHE": "on"}

    def endless(self) -> dict[str, Any]:
        return {"logit_bias": {str(token): -100 for token in self.shape.ends}}

    def counts(self, chunk: dict[str, Any]) -> tuple[int, int] | None:
        if not (usage := chunk.get("usage")):
            return None
        return usage["prompt_tokens"], usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]

    def held(self) -> dict[str, Any]:
        """What the engine holds and did."""
        return dict(self.get("/cache")["models"]["model"])

    def cache_bytes(self) -> int:
        return int(self.held()["tiers"]["ram"]["nbytes"])


class LlamaServer(Peer):
    """llama-server of the same llama.cpp build: it is inside the wheel that afterglow opens."""

    name = "llama-server"
    PROGRAM = """
import os, sys, xllamacpp
path, (threads, context, slots, verbosity), similarity = sys.argv[1], map(int, sys.argv[2:6]), float(sys.argv[6])
settings = xllamacpp.CommonParams()
settings.model.path, settings.use_jinja, settings.verbosity = path, True, verbosity
settings.fit_params, settings.warmup, settings.cont_batching = False, True, True
settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = context * slots, slots, threads
settings.cpuparams_batch.n_threads, settings.port = threads, 0
settings.slot_prompt_similarity = similarity
if len(sys.argv) > 7:
    settings.mmproj.path = sys.argv[7]
server = xllamacpp.Server(settings)
os.write(1, f"\\nat {server.listening_address} \\n".encode())  # at once: the log writes, too
sys.stdin.read()
"""
    SIMILARITY = 0.1  # of prompts that it answers in the same place; its own default
    VERBOSITY = 0  # writing a log would slow it down
    STATE = re.compile(r"cache state: \d+ prompts, ([\d.]+) MiB")

    def command(self) -> list[str]:
        shape = self.shape
        sizes = [str(size) for size in (shape.threads, shape.context, shape.slots, self.VERBOSITY, self.SIMILARITY)]
        seeing = [str(shape.projector)] if shape.projector else []
        return [sys.executable, "-c", self.PROGRAM, str(shape.model), *sizes, *seeing]

    def endless(self) -> dict[str, Any]:
        return {"ignore_eos": True}

    def counts(self, chunk: dict[str, Any]) -> tuple[int, int] | None:
        if not (timings := chunk.get("timings")):
            return None
        return timings["cache_n"] + timings["prompt_n"], timings["prompt_n"]

    def cache_bytes(self) -> int:
        """It says so in its log, whenever it stored something."""
        said = self.STATE.findall(self.log.read_text(errors="replace"))
        return int(float(said[-1]) * 1024**2) if said else 0


class KeepingLlamaServer(LlamaServer):
    """llama-server told never to answer in the place of a similar prompt, so that it keeps every conversation.

    As it comes, it drops what a conversation said behind a long system prompt when another one with that prompt
    arrives, and its cache in RAM stays empty.
    """

    name = "llama-server, keeping"
    SIMILARITY = 0.0
    VERBOSITY = 4  # its log says what it keeps


PEERS: tuple[type[Peer], ...] = (Afterglow, LlamaServer)


def absent() -> dict[str, str]:
    """Servers that people also use and that are not compared here, with the reason."""
    reasons = {}
    if importlib.util.find_spec("llama_cpp") is None:
        reasons["llama-cpp-python"] = "not installed: it has to be compiled"
    else:
        reasons["llama-cpp-python"] = "installed, but its server answers one request at a time; not compared"
    if shutil.which("ollama") is None:
        reasons["Ollama"] = "not installed: no package registry has it"
    else:
        reasons["Ollama"] = "installed, but brings a llama.cpp of its own; not compared"
    return reasons


@contextlib.contextmanager
def started(shape: Shape, kinds: tuple[type[Peer], ...] = PEERS) -> Iterator[list[Peer]]:
    """One server of each kind, side by side; only one of them is asked at a time."""
    with tempfile.TemporaryDirectory(prefix="afterglow-peers-") as folder:
        peers: list[Peer] = []
        try:
            for kind in kinds:
                own = Path(folder) / kind.name
                own.mkdir()
                peers.append(kind(shape, own))
                peers[-1].start()
            yield peers
        finally:
            for peer in peers:
                peer.stop()
