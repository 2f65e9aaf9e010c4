"""An object store on loopback that speaks the part of S3 that the shared store uses, with faults on request."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

BUCKET = "bucket"


class ObjectStore(ThreadingHTTPServer):
    """Objects of one bucket in memory. `is_refused` tells which requests are answered with 503."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()  # by method and outcome, e.g. "GET 503"
        self.lock = threading.Lock()
        self.latency_seconds = 0.0
        self.is_refused: Callable[[str], bool] = lambda method: False
        self.change_body: Callable[[bytes], bytes] = lambda body: body  # of the objects that are read

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a client finds this store."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves in the middle of a response is no error of the store."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: ObjectStore
    headers_of_objects: ClassVar[dict[str, str]] = {
        "ETag": '"1"',
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "Accept-Ranges": "bytes",
    }

    def respond(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.server.requests[f"{self.command} {status}"] += 1
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(self.server.latency_seconds)
        with self.server.lock:
            is_refused = self.server.is_refused(self.command)
        if is_refused:
            return self.respond(503, b"<Error><Code>SlowDown</Code></Error>")
        url = urlsplit(self.path)
        name, query = unquote(url.path.removeprefix(f"/{BUCKET}").strip("/")), parse_qs(url.query, True)
        if self.command == "PUT":
            self.server.objects[name] = content
            return self.respond(200, ETag='"1"')
        if self.command == "DELETE":
            self.server.objects.pop(name, None)
            return self.respond(204)
        if self.command == "POST" and "delete" in query:
            return self.delete_objects(content)
        if not name:
            return self.list_objects(query.get("prefix", [""])[0])
        self.read_object(name)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = handle_request

    def read_object(self, name: str) -> None:
        data = self.server.objects.get(name)
        if data is None:
            return self.respond(404, b"<Error><Code>NoSuchKey</Code></Error>")
        if self.command == "HEAD":
            return self.respond(200, **{**self.headers_of_objects, "Content-Length": str(len(data))})
        body, total = self.server.change_body(data), len(data)
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or total), total - 1) + 1
            content_range = {"Content-Range": f"bytes {start}-{end - 1}/{total}"}
            return self.respond(206, body[start:end], **self.headers_of_objects, **content_range)
        self.respond(200, body, **self.headers_of_objects)

    def delete_objects(self, content: bytes) -> None:
        names = [
            element.text or "" for element in ElementTree.fromstring(content).iter() if element.tag.endswith("Key")
        ]
        for name in names:
            self.server.objects.pop(name, None)
        deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self.respond(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def list_objects(self, prefix: str) -> None:
        found = {name: data for name, data in sorted(self.server.objects.items()) if name.startswith(prefix)}
        contents = "".join(
            f"<Contents><Key>{name}</Key><Size>{len(data)}</Size><ETag>1</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, data in found.items()
        )
        listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        self.respond(200, listing.encode())

    def log_message(self, format: str, *arguments: object) -> None: ...


@contextlib.contextmanager
def run_object_store() -> Iterator[ObjectStore]:
    """Run a store until the end of the block."""
    with ObjectStore() as store:
        thread = threading.Thread(target=store.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield store
        finally:
            store.shutdown()
            thread.join()
