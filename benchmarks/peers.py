"""Servers under comparison, each in its own process: start, stop, requests, and the counts they report.

All get the same model, threads, slots and context per slot. All other settings are their defaults.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psutil

REASONING_TOKENS = 12  # of each answer with reasoning
ADDRESS = re.compile(r"(?:at|listening on) (http://\S+)\s")


@dataclass(frozen=True, kw_only=True)
class ServerSize:
    """Model and size of a server."""

    model: Path
    threads: int
    slots: int
    context: int  # tokens per slot
    eog_tokens: frozenset[int] = frozenset()  # end-of-generation tokens of the model
    projector: Path | None = None
    template: Path | None = None  # replaces the chat template of the model
    gpu_layers: int | None = None  # of afterglow; None: its default


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a streamed answer. The last one has the token counts of the prompt."""

    received_at: float
    text: str
    prompt_tokens: int = 0
    computed_tokens: int = 0  # prompt tokens that were not cached
    generated_tokens: int = 0
    delta: dict[str, Any] = field(default_factory=dict)  # of the message


class Peer:
    """A server process and plain HTTP connections to it. A subclass defines the command and the API differences."""

    name: ClassVar[str]

    def __init__(self, size: ServerSize, directory: Path) -> None:
        self.size, self.directory = size, directory
        self.host, self.port = "", 0
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory / "log"

    # --- defined by subclasses

    def build_command(self) -> list[str]:
        """Return the command of the server, which prints `at http://…` when it is ready."""
        raise NotImplementedError

    def build_environment(self) -> dict[str, str]:
        return {}

    def build_ignore_eos(self) -> dict[str, Any]:
        """Return the request fields that make an answer continue to `max_tokens`."""
        raise NotImplementedError

    def build_reasoning_budget(self) -> dict[str, Any]:
        """Return the request fields that end reasoning after `REASONING_TOKENS`."""
        raise NotImplementedError

    def read_counts(self, chunk: dict[str, Any]) -> tuple[int, int] | None:
        """Return the prompt tokens and the computed prompt tokens, None if the chunk has no counts."""
        raise NotImplementedError

    def get_cache_bytes(self) -> int:
        """Return the bytes of cached state in RAM beside the slots."""
        raise NotImplementedError

    # --- process

    def start(self) -> None:
        """Start the server and wait until it is ready."""
        environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", **self.build_environment()}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.build_command(), stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        deadline = time.monotonic() + 120
        while (match := ADDRESS.search(self.log.read_text(errors="replace"))) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} did not start: {self.log.read_text(errors='replace')[-800:]}")
            time.sleep(0.02)
        address = urllib.parse.urlsplit(match[1])
        self.host, self.port = address.hostname or "", address.port or 80

    def stop(self) -> None:
        """Stop the server with SIGTERM, and kill it if that takes longer than 30 seconds."""
        if self.process is None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.communicate()
        self.process = None

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the server and its child processes."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in (parent, *parent.children(recursive=True)))

    # --- requests

    def prepare(self, slot: int, tokens: list[int]) -> dict[str, Any]:
        """Prepare for a request whose prompt begins with `tokens`, all that an ideal cache has. Return its fields."""
        return {}

    def get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("GET", path)
            return dict(json.loads(connection.getresponse().read()))
        finally:
            connection.close()

    def post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> http.client.HTTPConnection:
        """Send a request with streaming, by default a chat request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=900)
        request = {
            "model": "model",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            **body,
        }
        connection.request("POST", path, json.dumps(request), {"Content-Type": "application/json"})
        return connection

    def chat(self, body: dict[str, Any]) -> Iterator[Chunk]:
        """Send a chat request and yield the chunks of the answer as they arrive."""
        connection = self.post(body)
        try:
            response = connection.getresponse()
            if response.status != 200:
                raise SystemExit(f"{self.name}: HTTP status {response.status}: {response.read().decode()[:500]}")
            for line in response:
                if line.startswith(b"data: {"):
                    yield self._parse_chunk(json.loads(line[6:]), time.perf_counter())
        finally:
            connection.close()

    def _parse_chunk(self, chunk: dict[str, Any], received_at: float) -> Chunk:
        if "error" in chunk:
            raise SystemExit(f"{self.name}: error in the stream: {chunk['error']}")
        choices = chunk.get("choices") or [{}]
        delta = choices[0].get("delta", {})
        prompt_tokens, computed_tokens = self.read_counts(chunk) or (0, 0)
        return Chunk(
            received_at=received_at,
            text=delta.get("content") or "",
            prompt_tokens=prompt_tokens,
            computed_tokens=computed_tokens,
            generated_tokens=(chunk.get("usage") or {}).get("completion_tokens", 0),
            delta=delta,
        )


class Afterglow(Peer):
    """`afterglow serve` with its own empty settings file and cache directory."""

    name = "afterglow"

    def build_command(self) -> list[str]:
        size = self.size
        sizes = ["--threads", size.threads, "--context", size.context, "--sequences", size.slots]
        serve = [sys.executable, "-m", "afterglow.cli.main", "serve", f"model={size.model}", "--port", "0"]
        projector = ["--projector", size.projector] if size.projector else []
        template = ["--chat-template", size.template] if size.template else []
        layers = [] if size.gpu_layers is None else ["--gpu-layers", size.gpu_layers]
        return [*serve, *map(str, [*sizes, *projector, *template, *layers])]

    def build_environment(self) -> dict[str, str]:
        settings = self.directory / "settings.toml"  # so that the user's settings do not apply
        settings.touch()
        cache = str(self.directory / "cache")
        return {"AFTERGLOW_SETTINGS": str(settings), "AFTERGLOW_CACHE": cache, "AFTERGLOW_DISK_CACHE": "on"}

    def build_ignore_eos(self) -> dict[str, Any]:
        return {"logit_bias": {str(token): -100 for token in self.size.eog_tokens}}

    def build_reasoning_budget(self) -> dict[str, Any]:
        return {"reasoning_budget": REASONING_TOKENS}

    def read_counts(self, chunk: dict[str, Any]) -> tuple[int, int] | None:
        if not (usage := chunk.get("usage")):
            return None
        return usage["prompt_tokens"], usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]

    def get_cache_bytes(self) -> int:
        return int(self.get("/cache")["models"]["model"]["tiers"]["ram"]["nbytes"])


class RenderingAfterglow(Afterglow):
    """`afterglow serve` without replay: the history is rendered and tokenized again."""

    name = "afterglow, no replay"

    def build_reasoning_budget(self) -> dict[str, Any]:
        return {"reasoning_budget": REASONING_TOKENS, "replay": False}


class LlamaServer(Peer):
    """llama-server of the same llama.cpp build, from the wheel whose library afterglow loads."""

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
if sys.argv[9]:
    settings.cache_ram_mib = int(sys.argv[9])
if sys.argv[7]:
    settings.mmproj.path = sys.argv[7]
if sys.argv[8]:
    settings.chat_template = open(sys.argv[8]).read()
server = xllamacpp.Server(settings)
os.write(1, f"\\nat {server.listening_address} \\n".encode())  # one write, because the log writes, too
sys.stdin.read()
"""
    SIMILARITY = 0.1  # minimum similarity of prompts that share a slot; llama-server's default
    VERBOSITY = 0  # a log would slow it down
    CACHE_MIB = ""  # of prompts in RAM; llama-server's default
    CACHE_STATE = re.compile(r"cache state: \d+ prompts, ([\d.]+) MiB")

    def build_command(self) -> list[str]:
        size = self.size
        numbers = [str(n) for n in (size.threads, size.context, size.slots, self.VERBOSITY, self.SIMILARITY)]
        files = [str(file or "") for file in (size.projector, size.template)]
        return [sys.executable, "-c", self.PROGRAM, str(size.model), *numbers, *files, self.CACHE_MIB]

    def build_ignore_eos(self) -> dict[str, Any]:
        return {"ignore_eos": True}

    def build_reasoning_budget(self) -> dict[str, Any]:
        return {"thinking_budget_tokens": REASONING_TOKENS}

    def read_counts(self, chunk: dict[str, Any]) -> tuple[int, int] | None:
        if not (timings := chunk.get("timings")):
            return None
        return timings["cache_n"] + timings["prompt_n"], timings["prompt_n"]

    def get_cache_bytes(self) -> int:
        """Return the last size in the log. llama-server logs it whenever it stores a prompt."""
        sizes = self.CACHE_STATE.findall(self.log.read_text(errors="replace"))
        return int(float(sizes[-1]) * 1024**2) if sizes else 0


class KeepingLlamaServer(LlamaServer):
    """llama-server that never reuses the slot of a similar prompt, so that it caches every conversation.

    By default, it drops the rest of a conversation after a long system prompt when another conversation with that
    prompt arrives, and its RAM cache stays empty.
    """

    name = "llama-server, keeping"
    SIMILARITY = 0.0
    VERBOSITY = 4  # the log has the size of the cache


class IdealLlamaServer(LlamaServer):
    """llama-server with the hits of an ideal cache: it computes the needed tokens of each request and no others.

    Before each request, its slot computes what an ideal cache has of the prompt. That is not measured.
    """

    name = "llama-server, ideal"
    CACHE_MIB = "0"  # its hits do not depend on the history

    def prepare(self, slot: int, tokens: list[int]) -> dict[str, Any]:
        if tokens:
            body = {"prompt": tokens, "n_predict": 0, "id_slot": slot, "stream": False}
            connection = self.post(body, "/completion")
            response = connection.getresponse()
            text = response.read()
            connection.close()
            if response.status != 200:
                raise SystemExit(f"{self.name}: HTTP status {response.status}: {text.decode()[:500]}")
        return {"id_slot": slot}


PEERS: tuple[type[Peer], ...] = (Afterglow, LlamaServer)


def list_absent_peers() -> dict[str, str]:
    """Return common servers that are not compared, with the reason."""
    reasons = {}
    if importlib.util.find_spec("llama_cpp") is None:
        reasons["llama-cpp-python"] = "not installed: it has to be compiled"
    else:
        reasons["llama-cpp-python"] = "installed, but its server runs one request at a time; not compared"
    if shutil.which("ollama") is None:
        reasons["Ollama"] = "not installed: no package registry has it"
    else:
        reasons["Ollama"] = "installed, but has its own llama.cpp; not compared"
    return reasons


@contextlib.contextmanager
def start_peers(size: ServerSize, kinds: tuple[type[Peer], ...] = PEERS) -> Iterator[list[Peer]]:
    """Run one server of each kind, all at the same time. Use only one of them at a time."""
    with tempfile.TemporaryDirectory(prefix="afterglow-peers-") as root:
        peers: list[Peer] = []
        try:
            for kind in kinds:
                directory = Path(root) / kind.name
                directory.mkdir()
                peers.append(kind(size, directory))
                peers[-1].start()
            yield peers
        finally:
            for peer in peers:
                peer.stop()
