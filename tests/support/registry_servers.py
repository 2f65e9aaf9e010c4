"""Real wheels and a real HTTP server for the tests of the registry."""

from __future__ import annotations

import hashlib
import random
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


def content(size: int) -> bytes:
    """Bytes that look like a model and do not compress."""
    return b"GGUF" + random.Random(size).randbytes(size - 4)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def build_wheel(folder: Path, data: bytes, member: str = MEMBER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    information = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, data)
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return folder / WHEEL


def source_of(data: bytes) -> WheelFile:
    return WheelFile(package="tiny-model", version="1.0", member=MEMBER, sha256=sha256(data), size=len(data))


@dataclass
class Served:
    """What a server answers: path to headers and body, or to a failure.

    Of a held body half is sent, `halfway` is set, and the rest waits for `release`; a broken one stops halfway.
    """

    files: dict[str, tuple[dict[str, str], bytes]] = field(default_factory=dict)
    failures: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    halfway: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    address: str = ""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, served: Served) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.served = served

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that was killed breaks its pipe


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        served = self.server.served
        if self.path in served.files:
            headers, body = served.files[self.path]
            self.start(200, headers, len(body))
        else:
            self.start(*served.failures.get(self.path, (404, {})), 0)

    def do_GET(self) -> None:
        self.do_HEAD()
        served = self.server.served
        _, body = served.files.get(self.path, ({}, b""))
        half = len(body) // 2
        self.wfile.write(body[:half])
        if self.path in served.broken:
            return
        if self.path in served.held:
            self.wfile.flush()
            served.halfway.set()
            served.release.wait(30)
        self.wfile.write(body[half:])

    def start(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def serving() -> Iterator[Served]:
    """A server on this machine whose answers the test writes down."""
    served = Served()
    with Server(served) as server:
        served.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield served
        finally:
            served.release.set()
            server.shutdown()
            thread.join()


def publish(served: Served, repository: str, file: str, data: bytes, told: str | None = None) -> None:
    """Put a file on the hub; `told` is the sha256 it claims."""
    headers = {"X-Repo-Commit": COMMIT, "ETag": '"pointer"', "X-Linked-Size": str(len(data))}
    headers["X-Linked-Etag"] = f'"{told or sha256(data)}"'
    for revision in ("main", COMMIT):
        served.files[f"/{repository}/resolve/{revision}/{file}"] = (headers, data)
