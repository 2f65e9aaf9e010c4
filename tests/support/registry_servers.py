"""Real wheels and a real HTTP server for the registry tests."""

from __future__ import annotations

import hashlib
import json
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
class Hold:
    """A byte of a file at which the server stops once, sets `reached` and waits for `release`."""

    offset: int
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@dataclass
class ServedResponses:
    """Responses of a server by path without the query: headers and body, or a failure.

    For a path in `held`, the server sends half of the body, sets `halfway` and waits for `release`. For a path in
    `broken`, it stops after half of the body. `holds` has further stops. `requests` has the path and the first byte of
    each GET, `sent_ranges` the number of bytes of each answer to a request for the first bytes.
    """

    files: dict[str, tuple[dict[str, str], bytes]] = field(default_factory=dict)
    failures: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    holds: dict[str, Hold] = field(default_factory=dict)
    halfway: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    address: str = ""
    requests: list[tuple[str, int]] = field(default_factory=list)
    sent_ranges: list[int] = field(default_factory=list)


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
        path = self.path.partition("?")[0]
        if path in responses.files:
            headers, body = responses.files[path]
            self.send_head(200, headers, len(body))
        else:
            self.send_head(*responses.failures.get(path, (404, {})), 0)

    def do_GET(self) -> None:
        responses = self.server.responses
        path = self.path.partition("?")[0]
        headers, body = responses.files.get(path, ({}, b""))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = 0, len(body)
        if body and wanted:
            start, end = int(wanted[1]), min(int(wanted[2] or len(body)) + 1, len(body))
            if start >= len(body):
                return self.send_head(416, headers, 0)
            content_range = f"bytes {start}-{end - 1}/{len(body)}"
            self.send_head(206, {**headers, "Content-Range": content_range}, end - start)
            if start == 0:
                responses.sent_ranges.append(end)
        else:
            self.do_HEAD()
        responses.requests.append((path, start))
        self.send_body(path, body, start, end)

    def send_body(self, path: str, body: bytes, start: int, end: int) -> None:
        responses = self.server.responses
        half = len(body) // 2
        if path in responses.broken:
            self.wfile.write(body[start:half])
            return
        if path in responses.held and start < half:
            self.wfile.write(body[start:half])
            start = half
            responses.halfway.set()
            responses.release.wait(30)
        hold = responses.holds.get(path)
        if hold is not None and start <= hold.offset:
            del responses.holds[path]
            self.wfile.write(body[start : hold.offset])
            start = hold.offset
            hold.reached.set()
            hold.release.wait(60)
        self.wfile.write(body[start:end])

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
    responses: ServedResponses,
    repository: str,
    file: str,
    data: bytes,
    reported_sha256: str | None = None,
    reported_size: int | None = None,
    listed_size: int | None = None,
) -> None:
    """Publish a file on the hub, which reports `reported_sha256` and `reported_size`, or the real ones.

    The list of the repository's files has `listed_size` instead.
    """
    digest, size = reported_sha256 or sha256(data), len(data) if reported_size is None else reported_size
    headers = {"X-Repo-Commit": COMMIT, "ETag": '"pointer"', "X-Linked-Size": str(size)}
    headers["X-Linked-Etag"] = f'"{digest}"'
    for revision in ("main", COMMIT):
        responses.files[f"/{repository}/resolve/{revision}/{file}"] = (headers, data)
    listing = f"/api/models/{repository}/revision/main"
    known = json.loads(responses.files[listing][1])["siblings"] if listing in responses.files else []
    size = size if listed_size is None else listed_size
    sibling = {"rfilename": file, "size": size, "lfs": {"sha256": digest, "size": size, "pointerSize": 134}}
    info = {"id": repository, "sha": COMMIT, "siblings": [*known, sibling], "tags": ["gguf"]}
    responses.files[listing] = ({"Content-Type": "application/json"}, json.dumps(info).encode())


def get_download_path(repository: str, file: str) -> str:
    """Return the path from which a file is downloaded."""
    return f"/{repository}/resolve/{COMMIT}/{file}"
