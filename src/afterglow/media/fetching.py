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
from afterglow.media.addresses import Address, allowed_number, parsed
from afterglow.media.policy import MediaPolicy, shown

REDIRECTS = frozenset({301, 302, 303, 307, 308})
PIECE = 64 * 1024
NUMBERS = 4  # of those that a name stands for, tried one after the other
HEADERS = {
    "Accept-Encoding": "identity",
    "Accept": "image/*, audio/*",
    "User-Agent": "afterglow",
    "Connection": "close",
}


def resolve(host: str, port: int) -> list[str]:
    """The numbers that a name stands for."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


def connect(number: str, port: int, seconds: float) -> socket.socket:
    """A connection to a number."""
    return socket.create_connection((number, port), timeout=seconds)


@dataclass(frozen=True)
class Network:
    """What reaches the network; tests have their own."""

    resolve: Callable[[str, int], list[str]] = resolve
    connect: Callable[[str, int, float], socket.socket] = connect
    secure: Callable[[], ssl.SSLContext] = ssl.create_default_context


def fetch(url: str, policy: MediaPolicy, network: Network | None = None) -> bytes:
    """What an address has. Every hop of a redirect is checked like the first."""
    clock = Clock(policy.fetch_seconds)
    network = network or Network()
    address = parsed(url, policy)
    for _ in range(policy.max_redirects + 1):
        try:
            answer = _ask(address, policy, network, clock)
        except TimeoutError:
            reason = f"it did not arrive within {policy.fetch_seconds:g} seconds, which is the limit here"
            raise InvalidMedia(shown(url), reason) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InvalidMedia(shown(url), f"fetching it failed ({type(error).__name__})") from None
        if isinstance(answer, bytes):
            return answer
        following = parsed(urljoin(address.url, answer.to), policy)
        if (address.scheme, following.scheme) == ("https", "http"):
            raise MediaRefused(shown(url), "it leads from https: to http:")
        address = following
    raise InvalidMedia(shown(url), f"it leads on more than {policy.max_redirects} times, which is the limit here")


@dataclass(frozen=True, slots=True)
class Redirect:
    """Where to ask instead."""

    to: str


def _ask(address: Address, policy: MediaPolicy, network: Network, clock: Clock) -> bytes | Redirect:
    """One hop."""
    numbers = _numbers(address, policy, network, clock)
    with contextlib.closing(_connection(address, numbers, network, clock)) as connection:
        line = http.client.HTTPConnection(address.host, address.port)
        line.sock = cast(Any, Timed(connection, clock))
        line.putrequest("GET", address.target, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": address.authority, **HEADERS}.items():
            line.putheader(name, value)
        line.endheaders()
        with line.getresponse() as response:
            if response.status in REDIRECTS and (to := response.getheader("Location")):
                return Redirect(to)
            return _body(address, response, policy.max_bytes)


def _numbers(address: Address, policy: MediaPolicy, network: Network, clock: Clock) -> list[str]:
    """The numbers behind a name, all of which must be allowed: one that is not is a sign of a trick."""
    numbers = within(clock.left(), lambda: network.resolve(address.host, address.port))
    if not numbers or not all(allowed_number(number, policy) for number in numbers):
        raise MediaRefused(shown(address.url), f"{address.host} is not on the public internet")
    return numbers[:NUMBERS]


def _connection(address: Address, numbers: list[str], network: Network, clock: Clock) -> socket.socket:
    """A connection to the first number that takes one, encrypted for the name where it should be."""
    failure: OSError = OSError("no number")
    for number in numbers:
        try:
            connection = network.connect(number, address.port, clock.left())
            break
        except OSError as error:
            failure = error
    else:
        raise failure
    if address.scheme == "http":
        return connection
    try:
        connection.settimeout(clock.left())
        return network.secure().wrap_socket(connection, server_hostname=address.host)
    except BaseException:
        connection.close()
        raise


def _body(address: Address, response: http.client.HTTPResponse, limit: int) -> bytes:
    if response.status != 200:
        raise InvalidMedia(shown(address.url), f"the host answered with status {response.status}")
    if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
        raise InvalidMedia(shown(address.url), "the host packed it, though it was asked not to")
    data = bytearray()
    if (response.length or 0) <= limit:
        while len(data) <= limit and (piece := response.read1(PIECE)):
            data += piece
    if max(len(data), response.length or 0) > limit:
        raise InvalidMedia(shown(address.url), f"it has more than {limit:,} bytes, which is the limit here")
    return bytes(data)


class Clock:
    """Counts the time for everything about one address."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds; `TimeoutError` where there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class Timed:
    """A connection for `http.client`, on which no wait is longer than the clock has left."""

    def __init__(self, connection: socket.socket, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock

    def sendall(self, data: bytes) -> None:
        self._connection.settimeout(self._clock.left())
        self._connection.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(Incoming(self._connection, self._clock))

    def close(self) -> None:
        """Whoever opened the connection closes it."""


class Incoming(io.RawIOBase):
    """What comes in on a connection, however slowly it drips."""

    def __init__(self, connection: socket.socket, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(self._clock.left())
        return self._connection.recv_into(buffer)


def within(seconds: float, work: Callable[[], list[str]]) -> list[str]:
    """What `work` returns, if it does so in time. Resolving a name knows no limit of its own, so it is left behind."""
    answers: list[list[str] | BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:
            answers.append(error)

    thread = threading.Thread(target=run, name="afterglow-resolving", daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise TimeoutError
    if isinstance(answers[0], BaseException):
        raise answers[0]
    return answers[0]
