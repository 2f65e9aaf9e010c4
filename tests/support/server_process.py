"""A real `afterglow serve` process on loopback, with helpers for requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import psutil

if TYPE_CHECKING:
    import openai

COMMAND = [sys.executable, "-m", "afterglow.cli.main", "serve"]
URL_PATTERN = re.compile(r"at (http://\S+)")
PICK_TOOL: dict[str, Any] = {
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
    """`afterglow serve` on a free port."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments, "--port", "0", "--threads", "1"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "NO_COLOR": "1", "TERM": "dumb", **environment},
        )
        self.stderr_text = ""
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()
        self.url = self._wait_for_url()
        self.http = httpx.Client(base_url=self.url, timeout=240)

    def _read_stderr(self) -> None:
        """Collect the log. An unread pipe would fill up."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr_text += line.decode()

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and (self._reader.is_alive() or self.process.poll() is None):
            if match := URL_PATTERN.search(self.stderr_text):
                return match[1]
            time.sleep(0.02)
        self.process.kill()
        raise AssertionError(f"the server did not start: {self.stderr_text}")

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log and return its match."""
        assert wait_until(240, lambda: re.search(pattern, self.stderr_text)), f"{pattern} not in {self.stderr_text}"
        match = re.search(pattern, self.stderr_text)
        assert match is not None
        return match

    def client(self, **options: Any) -> openai.OpenAI:
        import openai  # not at the top: it takes a second, and `make unit` does not need it

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240, **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, text: str = "hello", **fields: Any) -> dict[str, Any]:
        """Return the chat completion of one user message, greedy by default, with its HTTP status."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        response = self.post("/v1/chat/completions", {**body, **fields})
        return {"status": response.status_code, **response.json()}

    def complete(self, prompt: Any = "abc", **fields: Any) -> dict[str, Any]:
        """Return the completion of a prompt, greedy by default, with its HTTP status."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        response = self.post("/v1/completions", {**body, **fields})
        return {"status": response.status_code, **response.json()}

    def respond(self, input: Any = "hello", **fields: Any) -> dict[str, Any]:
        """Return a response of /v1/responses, greedy by default, with its HTTP status."""
        body = {"model": "tiny", "input": input, "max_output_tokens": 8, "temperature": 0}
        response = self.post("/v1/responses", {**body, **fields})
        return {"http_status": response.status_code, **response.json()}

    def collect_events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the data of all events of a stream except the final `[DONE]`."""
        lines = self.post(path, {**body, "stream": True}).text.splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(event) for event in events if event != "[DONE]"]

    def list_engines(self) -> list[psutil.Process]:
        """Return the engine processes of the server."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "afterglow.engine.host.child_main" in " ".join(child.cmdline())]

    def is_busy(self, model: str = "tiny") -> bool:
        """Whether the engine has work or a sequence in use."""
        contents = self.http.get("/cache").json()["models"][model]
        return bool(contents["busy"] or any(sequence["busy"] for sequence in contents["sequences"]))

    def get_counters(self, model: str = "tiny") -> dict[str, int]:
        counters: dict[str, int] = self.http.get("/cache").json()["models"][model]["counters"]
        return counters

    def get_metric(self, name: str) -> float:
        """Return the value of the metric line that starts with `name`, or 0 if there is none."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)), 0.0)

    def stop(self, signal_number: int = signal.SIGTERM, timeout: float = 120) -> int:
        """Send a signal, wait for the exit and return the exit code. Fails if a child process survives."""
        descendants = list_descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its engines exit with it
            raise
        self.http.close()
        assert not psutil.wait_procs(descendants, timeout=60)[1], "an orphan process is left"
        self._reader.join(60)  # the descendants have the pipe as well
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


def list_descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def run_server(*arguments: str, **environment: str) -> Iterator[ServerProcess]:
    """Run a server for one test and stop it afterwards."""
    server = ServerProcess(*arguments, **environment)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGTERM)


def wait_until(seconds: float, condition: Callable[[], Any]) -> bool:
    """Whether a condition becomes true within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def get_text(completion: dict[str, Any]) -> str:
    """Return the text of the first choice."""
    choice = completion["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text
