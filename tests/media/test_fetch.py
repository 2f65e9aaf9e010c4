"""What a host may do to whoever asks it: lead astray, drip, flood, lie. A real server on loopback does it all."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from typing import ClassVar

import pytest

from afterglow.errors import InvalidMedia, MediaRefused
from afterglow.media.fetch import Network, fetch_url
from afterglow.media.load import MediaPolicy

PUBLIC = "93.184.216.34"
NAMES = {
    "good.example": [PUBLIC],
    "other.example": ["93.184.216.35"],
    "unlisted.example": ["93.184.216.36"],
    "inside.example": ["10.0.0.1"],
}
POLICY = MediaPolicy(
    allowed_hosts=("good.example", "other.example", "inside.example", "127.0.0.1", "169.254.169.254"),
    max_bytes=100_000,
    fetch_timeout_seconds=5,
)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        Handler.seen.append((self.headers["Host"], self.path))
        with contextlib.suppress(OSError):
            getattr(self, "on_" + self.path.strip("/").partition("?")[0].partition("/")[0])()
        self.close_connection = True

    def answer(self, body: bytes = b"", status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def on_good(self) -> None:
        self.answer(b"picture", Content_Type="text/html")

    def on_to(self) -> None:
        self.answer(status=302, Location=self.path.partition("?")[2])

    def on_loop(self) -> None:
        self.answer(status=301, Location="/loop")

    def on_missing(self) -> None:
        self.answer(b"no", status=404)

    def on_large(self) -> None:
        self.answer(Content_Length="100001")
        time.sleep(3)

    def on_flood(self) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(bytes(65536))

    def on_chunks(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            self.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")

    def on_packed(self) -> None:
        self.answer(b"\x1f\x8b", Content_Encoding="gzip")

    def on_drip(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.drip(b"x")

    def on_headers(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        self.drip(b"X-More: 1\r\n")

    def on_line(self) -> None:
        self.drip(b"H")

    def on_silence(self) -> None:
        time.sleep(3)

    def on_nonsense(self) -> None:
        self.wfile.write(b"\0\1\2 SSH-2.0\r\n\r\n")

    def on_short(self) -> None:
        self.answer(b"half", Content_Length="8")

    def drip(self, piece: bytes) -> None:
        for _ in range(60):
            self.wfile.write(piece)
            self.wfile.flush()
            time.sleep(0.05)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def network(port):
    """Names of our own, and a connection to any public number that ends at the server on loopback."""
    reached: list[tuple[str, int]] = []

    def connect(number: str, asked: int, seconds: float) -> socket.socket:
        reached.append((number, asked))
        return socket.create_connection(("127.0.0.1", port), timeout=seconds)

    network = Network(resolve=lambda host, _: NAMES.get(host, [host]), connect=connect)
    object.__setattr__(network, "reached", reached)
    Handler.seen.clear()
    return network


def test_what_is_there_arrives_from_the_pinned_number_with_the_name_in_the_header(network):
    assert fetch_url("http://good.example/good?x=1", POLICY, network) == b"picture"
    assert network.reached == [(PUBLIC, 80)]
    assert Handler.seen == [("good.example", "/good?x=1")]


def test_a_name_is_resolved_once_so_that_it_cannot_change_in_between(network):
    answers = [[PUBLIC], ["127.0.0.1"]]
    turning = Network(resolve=lambda *_: answers.pop(0), connect=network.connect)
    assert fetch_url("http://good.example/good", POLICY, turning) == b"picture"
    assert network.reached == [(PUBLIC, 80)]
    assert len(answers) == 1


def test_a_redirect_to_another_allowed_host_is_followed(network):
    assert fetch_url("http://good.example/to?http://other.example/good", POLICY, network) == b"picture"
    assert [number for number, _ in network.reached] == [PUBLIC, "93.184.216.35"]
    assert fetch_url("http://good.example/to?/good", POLICY, network) == b"picture"


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1/good",
        "http://169.254.169.254/latest/meta-data/",
        "//127.0.0.1/good",
        "http://inside.example/good",
        "http://unlisted.example/good",
        "http://good.example:22/good",
        "http://user@good.example/good",
        "http://0x7f000001/good",
        "file:///etc/passwd",
        "gopher://good.example/good",
        "data:image/png;base64,AAAA",
    ],
)
def test_a_redirect_is_checked_like_the_first_address(network, target):
    with pytest.raises(MediaRefused):
        fetch_url(f"http://good.example/to?{target}", POLICY, network)
    assert [number for number, _ in network.reached] == [PUBLIC]


def test_redirects_end(network):
    with pytest.raises(InvalidMedia, match="more than 3 times"):
        fetch_url("http://good.example/loop", POLICY, network)
    assert len(network.reached) == 4
    with pytest.raises(InvalidMedia, match="more than 0 times"):
        fetch_url("http://good.example/to?/good", MediaPolicy(allowed_hosts=("*",), max_redirects=0), network)


@pytest.mark.parametrize("path", ["large", "flood", "chunks"])
def test_no_more_than_the_limit_is_taken(network, path):
    began = time.monotonic()
    with pytest.raises(InvalidMedia, match="more than 100,000 bytes"):
        fetch_url(f"http://good.example/{path}", POLICY, network)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("path", ["drip", "headers", "line", "silence"])
def test_a_slow_host_is_cut_off_by_the_time_for_all_of_it(network, path):
    hasty = MediaPolicy(allowed_hosts=("*",), fetch_timeout_seconds=0.4)
    began = time.monotonic()
    with pytest.raises(InvalidMedia, match=r"within 0\.4 seconds"):
        fetch_url(f"http://good.example/{path}", hasty, network)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(("path", "words"), [("missing", "404"), ("packed", "packed"), ("nonsense", "failed")])
def test_other_answers_are_said(network, path, words):
    with pytest.raises(InvalidMedia, match=words):
        fetch_url(f"http://good.example/{path}", POLICY, network)


def test_a_host_that_does_not_answer_is_said():
    def connect(number: str, port: int, seconds: float) -> socket.socket:
        raise ConnectionRefusedError

    with pytest.raises(InvalidMedia, match="ConnectionRefusedError"):
        fetch_url("http://good.example/", POLICY, Network(resolve=lambda *_: [PUBLIC], connect=connect))


def test_the_next_number_is_tried_where_one_does_not_answer(network):
    def connect(number: str, port: int, seconds: float) -> socket.socket:
        if number == "93.184.216.1":
            raise ConnectionRefusedError
        return network.connect(number, port, seconds)

    both = Network(resolve=lambda *_: ["93.184.216.1", PUBLIC], connect=connect)
    assert fetch_url("http://good.example/good", POLICY, both) == b"picture"


def test_an_encrypted_connection_is_for_the_name_and_a_redirect_out_of_it_is_refused(network):
    class Context:
        names: ClassVar[list[str]] = []

        def wrap_socket(self, connection: socket.socket, server_hostname: str) -> socket.socket:
            self.names.append(server_hostname)
            return connection  # the server on loopback speaks plainly

    secure = Network(resolve=network.resolve, connect=network.connect, create_ssl_context=Context)
    assert fetch_url("https://good.example/good", POLICY, secure) == b"picture"
    assert Context.names == ["good.example"]
    assert network.reached == [(PUBLIC, 443)]
    with pytest.raises(MediaRefused, match="from https: to http:"):
        fetch_url("https://good.example/to?http://good.example/good", POLICY, secure)


def test_a_certificate_is_checked(port):
    """The real context, against a server that speaks no TLS."""
    policy = MediaPolicy(allowed_hosts=(f"127.0.0.1:{port}",), allow_private=True)
    with pytest.raises(InvalidMedia, match="SSL"):
        fetch_url(f"https://127.0.0.1:{port}/good", policy)


def test_loopback_is_asked_only_where_private_numbers_are_allowed(port):
    hosts = (f"localhost:{port}", f"127.0.0.1:{port}")
    assert (
        fetch_url(f"http://127.0.0.1:{port}/good", MediaPolicy(allowed_hosts=hosts, allow_private=True)) == b"picture"
    )
    assert (
        fetch_url(f"http://localhost:{port}/good", MediaPolicy(allowed_hosts=hosts, allow_private=True)) == b"picture"
    )
    for name in ("localhost", "127.0.0.1"):
        with pytest.raises(MediaRefused, match="not on the public internet"):
            fetch_url(f"http://{name}:{port}/good", MediaPolicy(allowed_hosts=hosts))
