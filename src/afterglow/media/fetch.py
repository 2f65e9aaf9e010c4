"""Asking an address that is allowed: once resolved, at that very number, within a time and a size."""

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
MAX_ADDRESSES_TRIED = 4  # of those that a name stands for, tried one after the other
REQUEST_HEADERS = {
    "Accept-Encoding": "identity",
    "Accept": "image/*, audio/*",
    "User-Agent": "afterglow",
    "Connection": "close",
}


def resolve_host(host: str, port: int) -> list[str]:
    """The numbers that a name stands for."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


def connect(ip: str, port: int, timeout_seconds: float) -> socket.socket:
    """A connection to a number."""
    return socket.create_connection((ip, port), timeout=timeout_seconds)


@dataclass(frozen=True)
class Network:
    """What reaches the network; tests have their own."""

    resolve: Callable[[str, int], list[str]] = resolve_host
    connect: Callable[[str, int, float], socket.socket] = connect
    create_ssl_context: Callable[[], ssl.SSLContext] = ssl.create_default_context


def fetch_url(url: str, policy: MediaPolicy, network: Network | None = None) -> bytes:
    """What an address has. Every hop of a redirect is checked like the first."""
    clock = Deadline(policy.fetch_timeout_seconds)
    network = network or Network()
    address = parse_url(url, policy)
    for _ in range(policy.max_redirects + 1):
        try:
            answer = _request(address, policy, network, clock)
        except TimeoutError:
            reason = f"it did not arrive within {policy.fetch_timeout_seconds:g} seconds, which is the limit here"
            raise InvalidMedia(abbreviate_source(url), reason) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InvalidMedia(abbreviate_source(url), f"fetching it failed ({type(error).__name__})") from None
        if isinstance(answer, bytes):
            return answer
        following = parse_url(urljoin(address.url, answer.location), policy)
        if (address.scheme, following.scheme) == ("https", "http"):
            raise MediaRefused(abbreviate_source(url), "it leads from https: to http:")
        address = following
    raise InvalidMedia(
        abbreviate_source(url), f"it leads on more than {policy.max_redirects} times, which is the limit here"
    )


@dataclass(frozen=True, slots=True)
class Redirect:
    """Where to ask instead."""

    location: str


def _request(url: MediaURL, policy: MediaPolicy, network: Network, deadline: Deadline) -> bytes | Redirect:
    """One hop."""
    numbers = _resolve_allowed(url, policy, network, deadline)
    with contextlib.closing(_open_connection(url, numbers, network, deadline)) as connection:
        line = http.client.HTTPConnection(url.host, url.port)
        line.sock = cast(Any, DeadlineSocket(connection, deadline))
        line.putrequest("GET", url.request_target, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": url.authority, **REQUEST_HEADERS}.items():
            line.putheader(name, value)
        line.endheaders()
        with line.getresponse() as response:
            if response.status in REDIRECT_STATUSES and (to := response.getheader("Location")):
                return Redirect(to)
            return _read_body(url, response, policy.max_bytes)


def _resolve_allowed(url: MediaURL, policy: MediaPolicy, network: Network, deadline: Deadline) -> list[str]:
    """The numbers behind a name, all of which must be allowed: one that is not is a sign of a trick."""
    numbers = run_with_timeout(deadline.get_remaining_seconds(), lambda: network.resolve(url.host, url.port))
    if not numbers or not all(is_ip_allowed(number, policy) for number in numbers):
        raise MediaRefused(abbreviate_source(url.url), f"{url.host} is not on the public internet")
    return numbers[:MAX_ADDRESSES_TRIED]


def _open_connection(url: MediaURL, ips: list[str], network: Network, deadline: Deadline) -> socket.socket:
    """A connection to the first number that takes one, encrypted for the name where it should be."""
    failure: OSError = OSError("no number")
    for number in ips:
        try:
            connection = network.connect(number, url.port, deadline.get_remaining_seconds())
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
        raise InvalidMedia(abbreviate_source(url.url), f"the host answered with status {response.status}")
    if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
        raise InvalidMedia(abbreviate_source(url.url), "the host packed it, though it was asked not to")
    data = bytearray()
    if (response.length or 0) <= max_bytes:
        while len(data) <= max_bytes and (piece := response.read1(READ_CHUNK_BYTES)):
            data += piece
    if max(len(data), response.length or 0) > max_bytes:
        raise InvalidMedia(abbreviate_source(url.url), f"it has more than {max_bytes:,} bytes, which is the limit here")
    return bytes(data)


class Deadline:
    """Counts the time for everything about one address."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def get_remaining_seconds(self) -> float:
        """Seconds; `TimeoutError` where there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class DeadlineSocket:
    """A connection for `http.client`, on which no wait is longer than the clock has left."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection = connection
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._connection.settimeout(self._deadline.get_remaining_seconds())
        self._connection.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(DeadlineReader(self._connection, self._deadline))

    def close(self) -> None:
        """Whoever opened the connection closes it."""


class DeadlineReader(io.RawIOBase):
    """What comes in on a connection, however slowly it drips."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(self._deadline.get_remaining_seconds())
        return self._connection.recv_into(buffer)


def run_with_timeout(timeout_seconds: float, function: Callable[[], list[str]]) -> list[str]:
    """What `work` returns, if it does so in time. Resolving a name knows no limit of its own, so it is left behind."""
    answers: list[list[str] | BaseException] = []

    def run() -> None:
        try:
            answers.append(function())
        except BaseException as error:
            answers.append(error)

    thread = threading.Thread(target=run, name="afterglow-resolving", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if not answers:
        raise TimeoutError
    if isinstance(answers[0], BaseException):
        raise answers[0]
    return answers[0]
