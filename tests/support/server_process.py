"""A real server process on loopback, and what tests ask of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil

COMMAND = [sys.executable, "-m", "afterglow.cli.main", "serve"]
ADDRESS = re.compile(r"at (http://\S+)")
PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "description": "Pick a letter.",
        "parameters": {
            "type": "object",
            "properties": {"letter": {"enum": ["a", "b"]}},
            "required": ["letter"],
            "additionalProperties": False,
        },
    },
}

CYCLE = "abcdefghijklmnopqrstuvwxyz ."


class ServerProcess:
    """`afterglow serve` as a person runs it, on a free port."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments, "--port", "0", "--threads", "1"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "NO_COLOR": "1", "TERM": "dumb", **environment},
        )
        self.said = ""
        self.url = self._address()
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _address(self) -> str:
        assert self.process.stderr is not None
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if select.select([self.process.stderr], [], [], 1)[0]:
                data = os.read(self.process.stderr.fileno(), 65_536).decode()
                self.said += data
                if found := ADDRESS.search(self.said):
                    return found[1]
                if not data:
                    break
        raise AssertionError(f"the server did not start: {self.said}")

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, text: str = "hello", **fields: Any) -> dict[str, Any]:
        """The answer to one message, greedy unless told otherwise."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        answer = self.post("/v1/chat/completions", {**body, **fields})
        return {"status": answer.status_code, **answer.json()}

    def complete(self, prompt: Any = "abc", **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        answer = self.post("/v1/completions", {**body, **fields})
        return {"status": answer.status_code, **answer.json()}

    def respond(self, input: Any = "hello", **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "input": input, "max_output_tokens": 8, "temperature": 0}
        answer = self.post("/v1/responses", {**body, **fields})
        return {"http_status": answer.status_code, **answer.json()}

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The data of a stream's events, without the last `[DONE]`."""
        lines = self.post(path, {**body, "stream": True}).text.splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(one) for one in data if one != "[DONE]"]

    def engines(self) -> list[psutil.Process]:
        """The processes of its engines."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "afterglow.engine.host.child_main" in " ".join(child.cmdline())]

    def busy(self, model: str = "tiny") -> bool:
        """Whether the engine has anything to do, or any sequence in use."""
        held = self.http.get("/cache").json()["models"][model]
        return bool(held["busy"] or any(one["busy"] for one in held["sequences"]))

    def counters(self, model: str = "tiny") -> dict[str, int]:
        counters: dict[str, int] = self.http.get("/cache").json()["models"][model]["counters"]
        return counters

    def metric(self, line: str) -> float:
        """The number behind a line of the metrics; 0 where there is none."""
        page = self.http.get("/metrics").text
        return next((float(one.rsplit(" ", 1)[1]) for one in page.splitlines() if one.startswith(line)), 0.0)

    def end(self, number: int = signal.SIGTERM, patience: float = 30) -> int:
        """Tell it to end; its exit code. Nothing of it is left."""
        family = family_of(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its engines go with it
            raise
        self.http.close()
        assert self.process.stderr is not None
        self.process.stderr.close()
        assert not psutil.wait_procs(family, timeout=3)[1], "an orphan is left"
        return code


def family_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[ServerProcess]:
    """A server for one test; nothing of it is left afterwards."""
    server = ServerProcess(*arguments, **environment)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGTERM)


def within(seconds: float, condition: Any) -> bool:
    """Whether a condition becomes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def text_of(answer: dict[str, Any]) -> str:
    """What the first choice of an answer says."""
    choice = answer["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text
