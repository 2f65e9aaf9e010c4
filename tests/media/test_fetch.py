"""Fetching from hostile servers: redirects, slow and endless responses, malformed data. Uses a real loopback server."""

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
from afterglow.media.policy import MediaPolicy

pytestmark = pytest.mark.slow

PUBLIC = "93.184.216.34"
RESOLVED_IPS = {
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
    """Responds by path."""

    protocol_version = "HTTP/1.1"
    requests: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        Handler.requests.append((self.headers["Host"], self.path))
        with contextlib.suppress(OSError):
            getattr(self, "on_" + self.path.strip("/").partition("?")[0].partition("/")[0])()
        self.close_connection = True

    def respond(self, body: bytes = b"", status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def on_good(self) -> None:
        self.respond(b"image", Content_Type="text/html")

    def on_to(self) -> None:
        self.respond(status=302, Location=self.path.partition("?")[2])

    def on_loop(self) -> None:
        self.respond(status=301, Location="/loop")

    def on_missing(self) -> None:
        self.respond(b"no", status=404)

    def on_large(self) -> None:
        self.respond(Content_Length="100001")
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

    def on_compressed(self) -> None:
        self.respond(b"\x1f\x8b", Content_Encoding="gzip")

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

    def on_malformed(self) -> None:
        self.wfile.write(b"\0\1\2 SSH-2.0\r\n\r\n")

    def on_short(self) -> None:
        self.respond(b"half", Content_Length="8")

    def drip(self, chunk: bytes) -> None:
        for _ in range(60):
            self.wfile.write(chunk)
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
    """Network with fixed DNS entries that connects every IP address to the loopback server."""
    connections: list[tuple[str, int]] = []

    def connect(ip: str, requested_port: int, timeout_seconds: float) -> socket.socket:
        connections.append((ip, requested_port))
        return socket.create_connection(("127.0.0.1", port), timeout=timeout_seconds)

    network = Network(resolve=lambda host, _: RESOLVED_IPS.get(host, [host]), connect=connect)
    object.__setattr__(network, "connections", connections)
    Handler.requests.clear()
    return network


def test_a_fetch_connects_to_the_resolved_ip_and_sends_the_hostname(network):
    assert fetch_url("http://good.example/good?x=1", POLICY, network) == b"image"
    assert network.connections == [(PUBLIC, 80)]
    assert Handler.requests == [("good.example", "/good?x=1")]


def test_a_host_is_resolved_once_so_that_dns_cannot_change_in_between(network):
    resolutions = [[PUBLIC], ["127.0.0.1"]]
    changing = Network(resolve=lambda *_: resolutions.pop(0), connect=network.connect)
    assert fetch_url("http://good.example/good", POLICY, changing) == b"image"
    assert network.connections == [(PUBLIC, 80)]
    assert len(resolutions) == 1


def test_a_redirect_to_another_allowed_host_is_followed(network):
    assert fetch_url("http://good.example/to?http://other.example/good", POLICY, network) == b"image"
    assert [ip for ip, _ in network.connections] == [PUBLIC, "93.184.216.35"]
    assert fetch_url("http://good.example/to?/good", POLICY, network) == b"image"


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
def test_a_redirect_target_is_checked_like_the_first_url(network, target):
    with pytest.raises(MediaRefused):
        fetch_url(f"http://good.example/to?{target}", POLICY, network)
    assert [ip for ip, _ in network.connections] == [PUBLIC]


@pytest.mark.parametrize("target", ["http://[", "//[::1", "http://[no-address]/"])
def test_a_redirect_to_an_invalid_url_is_reported(network, target):
    with pytest.raises(InvalidMedia, match="it redirects to an invalid URL"):
        fetch_url(f"http://good.example/to?{target}", POLICY, network)


def test_redirects_are_limited(network):
    with pytest.raises(InvalidMedia, match="limit of 3 redirects"):
        fetch_url("http://good.example/loop", POLICY, network)
    assert len(network.connections) == 4
    with pytest.raises(InvalidMedia, match="limit of 0 redirects"):
        fetch_url("http://good.example/to?/good", MediaPolicy(allowed_hosts=("*",), max_redirects=0), network)


@pytest.mark.parametrize("path", ["large", "flood", "chunks"])
def test_a_response_over_the_size_limit_is_rejected(network, path):
    start = time.monotonic()
    with pytest.raises(InvalidMedia, match="limit of 100,000 bytes"):
        fetch_url(f"http://good.example/{path}", POLICY, network)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("path", ["drip", "headers", "line", "silence"])
def test_a_slow_server_hits_the_total_timeout(network, path):
    policy = MediaPolicy(allowed_hosts=("*",), fetch_timeout_seconds=0.4)
    start = time.monotonic()
    with pytest.raises(InvalidMedia, match=r"within 0\.4 seconds"):
        fetch_url(f"http://good.example/{path}", policy, network)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("path", "message"), [("missing", "404"), ("compressed", "compressed"), ("malformed", "failed")]
)
def test_an_unusable_response_is_reported(network, path, message):
    with pytest.raises(InvalidMedia, match=message):
        fetch_url(f"http://good.example/{path}", POLICY, network)


def test_a_refused_connection_is_reported():
    def connect(ip: str, port: int, timeout_seconds: float) -> socket.socket:
        raise ConnectionRefusedError

    with pytest.raises(InvalidMedia, match="ConnectionRefusedError"):
        fetch_url("http://good.example/", POLICY, Network(resolve=lambda *_: [PUBLIC], connect=connect))


def test_the_next_ip_is_tried_if_one_refuses(network):
    def connect(ip: str, port: int, timeout_seconds: float) -> socket.socket:
        if ip == "93.184.216.1":
            raise ConnectionRefusedError
        return network.connect(ip, port, timeout_seconds)

    network_with_two_ips = Network(resolve=lambda *_: ["93.184.216.1", PUBLIC], connect=connect)
    assert fetch_url("http://good.example/good", POLICY, network_with_two_ips) == b"image"


def test_tls_uses_the_hostname_and_a_redirect_to_http_is_refused(network):
    class Context:
        names: ClassVar[list[str]] = []

        def wrap_socket(self, connection: socket.socket, server_hostname: str) -> socket.socket:
            self.names.append(server_hostname)
            return connection  # the loopback server has no TLS

    secure = Network(resolve=network.resolve, connect=network.connect, create_ssl_context=Context)
    assert fetch_url("https://good.example/good", POLICY, secure) == b"image"
    assert Context.names == ["good.example"]
    assert network.connections == [(PUBLIC, 443)]
    with pytest.raises(MediaRefused, match="from https: to http:"):
        fetch_url("https://good.example/to?http://good.example/good", POLICY, secure)


def test_a_certificate_is_checked(port):
    """Uses the real SSL context against a server without TLS."""
    policy = MediaPolicy(allowed_hosts=(f"127.0.0.1:{port}",), allow_private=True)
    with pytest.raises(InvalidMedia, match="SSL"):
        fetch_url(f"https://127.0.0.1:{port}/good", policy)


def test_loopback_is_fetched_only_if_private_ips_are_allowed(port):
    hosts = (f"localhost:{port}", f"127.0.0.1:{port}")
    assert fetch_url(f"http://127.0.0.1:{port}/good", MediaPolicy(allowed_hosts=hosts, allow_private=True)) == b"image"
    assert fetch_url(f"http://localhost:{port}/good", MediaPolicy(allowed_hosts=hosts, allow_private=True)) == b"image"
    for name in ("localhost", "127.0.0.1"):
        with pytest.raises(MediaRefused, match="not on the public internet"):
            fetch_url(f"http://{name}:{port}/good", MediaPolicy(allowed_hosts=hosts))
