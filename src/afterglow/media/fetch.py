"""HTTP client for allowed URLs. Connects to the IP address that was checked, with one deadline and a size limit."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urljoin

from afterglow.errors import InvalidMedia, MediaRefused
from afterglow.media.policy import MediaPolicy, abbreviate_source
from afterglow.media.urls import MediaURL, is_ip_allowed, parse_url

REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
READ_CHUNK_BYTES = 64 * 1024
MAX_ADDRESSES_TRIED = 4  # IP addresses of a host, tried in order
REQUEST_HEADERS = {
    "Accept-Encoding": "identity",
    "Accept": "image/*, audio/*",
    "User-Agent": "afterglow",
    "Connection": "close",
}


def resolve_host(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host."""
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in results))


def connect(ip: str, port: int, timeout_seconds: float) -> socket.socket:
    """Connect to an IP address."""
    return socket.create_connection((ip, port), timeout=timeout_seconds)


@dataclass(frozen=True)
class Network:
    """Functions that access the network; tests replace them."""

    resolve: Callable[[str, int], list[str]] = resolve_host
    connect: Callable[[str, int, float], socket.socket] = connect
    create_ssl_context: Callable[[], ssl.SSLContext] = ssl.create_default_context


def fetch_url(url: str, policy: MediaPolicy, network: Network | None = None) -> bytes:
    """Fetch a URL. Checks the target of every redirect like the first URL."""
    deadline = Deadline(policy.fetch_timeout_seconds)
    network = network or Network()
    current = parse_url(url, policy)
    for _ in range(policy.max_redirects + 1):
        try:
            response = _request(current, policy, network, deadline)
        except TimeoutError:
            reason = f"the fetch did not finish within {policy.fetch_timeout_seconds:g} seconds"
            raise InvalidMedia(abbreviate_source(url), reason) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InvalidMedia(abbreviate_source(url), f"the fetch failed ({type(error).__name__})") from None
        if isinstance(response, bytes):
            return response
        try:
            location = urljoin(current.url, response)
        except ValueError:
            raise InvalidMedia(abbreviate_source(url), "it redirects to an invalid URL") from None
        target = parse_url(location, policy)
        if (current.scheme, target.scheme) == ("https", "http"):
            raise MediaRefused(abbreviate_source(url), "it redirects from https: to http:")
        current = target
    raise InvalidMedia(abbreviate_source(url), f"it exceeds the limit of {policy.max_redirects} redirects")


def _request(url: MediaURL, policy: MediaPolicy, network: Network, deadline: Deadline) -> bytes | str:
    """Send one request; return the body, or the location of a redirect."""
    ips = run_with_timeout(deadline.get_remaining_seconds(), lambda: network.resolve(url.host, url.port))
    # All IP addresses of the host must be allowed: public and private ones together suggest an attack.
    if not ips or not all(is_ip_allowed(ip, policy) for ip in ips):
        raise MediaRefused(abbreviate_source(url.url), f"{url.host} is not on the public internet")
    with contextlib.closing(_open_connection(url, ips[:MAX_ADDRESSES_TRIED], network, deadline)) as connection:
        client = http.client.HTTPConnection(url.host, url.port)
        client.sock = cast(Any, DeadlineSocket(connection, deadline))
        client.putrequest("GET", url.request_target, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": url.authority, **REQUEST_HEADERS}.items():
            client.putheader(name, value)
        client.endheaders()
        with client.getresponse() as response:
            if response.status in REDIRECT_STATUSES and (location := response.getheader("Location")):
                return location
            return _read_body(url, response, policy.max_bytes)


def _open_connection(url: MediaURL, ips: list[str], network: Network, deadline: Deadline) -> socket.socket:
    """Connect to the first IP address that accepts, with TLS for https."""
    failure: OSError = OSError("no IP address")
    for ip in ips:
        try:
            connection = network.connect(ip, url.port, deadline.get_remaining_seconds())
            break
        except OSError as error:
            failure = error
    else:
        raise failure
    if url.scheme == "http":
        return connection
    try:
        connection.settimeout(deadline.get_remaining_seconds())
        return network.create_ssl_context().wrap_socket(connection, server_hostname=url.host)
    except BaseException:
        connection.close()
        raise


def _read_body(url: MediaURL, response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    if response.status != 200:
        raise InvalidMedia(abbreviate_source(url.url), f"the server returned status {response.status}")
    if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
        raise InvalidMedia(abbreviate_source(url.url), "the server compressed it, although the request forbids that")
    data = bytearray()
    if (response.length or 0) <= max_bytes:
        while len(data) <= max_bytes and (chunk := response.read1(READ_CHUNK_BYTES)):
            data += chunk
    if max(len(data), response.length or 0) > max_bytes:
        raise InvalidMedia(abbreviate_source(url.url), f"it exceeds the limit of {max_bytes:,} bytes")
    return bytes(data)


class Deadline:
    """Deadline for the whole fetch, including redirects."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def get_remaining_seconds(self) -> float:
        """Return the seconds left; raise `TimeoutError` if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class DeadlineSocket:
    """Socket for `http.client` on which no operation blocks beyond the deadline."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection = connection
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._connection.settimeout(self._deadline.get_remaining_seconds())
        self._connection.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(DeadlineReader(self._connection, self._deadline))

    def close(self) -> None:
        """Do nothing: the opener closes the connection."""


class DeadlineReader(io.RawIOBase):
    """Reads from a connection until the deadline, also if the server sends slowly."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(self._deadline.get_remaining_seconds())
        return self._connection.recv_into(buffer)


def run_with_timeout(timeout_seconds: float, function: Callable[[], list[str]]) -> list[str]:
    """Run `function` in a thread and return its result; raise `TimeoutError` and abandon the thread if it is late.

    Name resolution has no timeout of its own.
    """
    results: list[list[str] | BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, name="afterglow-resolving", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if not results:
        raise TimeoutError
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]
