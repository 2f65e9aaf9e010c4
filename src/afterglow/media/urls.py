"""Decides which URLs and IP addresses media may be fetched from. Does no I/O; `fetch` does."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

from afterglow.errors import MediaRefused
from afterglow.media.policy import MediaPolicy, abbreviate_source

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_URL_CHARACTERS = 4096
PRINTABLE_PATTERN = re.compile(r"[\x21-\x7e]+")
HOSTNAME_PATTERN = re.compile(
    r"(?=.{1,253}\Z)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
)
NUMERIC_HOST_PATTERN = re.compile(r"(.*\.)?(0x[0-9a-f]*|[0-9]+)")  # some resolvers parse these as IPv4 addresses
TUNNEL_NETWORKS = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96")))
ISATAP_INTERFACE_IDS = {0x00005EFE, 0x02005EFE}


@dataclass(frozen=True, slots=True)
class MediaURL:
    """URL with an allowed host. `is_ip_allowed` checks the IP addresses of the host.

    >>> parse_url("https://example.com/cat.png", MediaPolicy(allowed_hosts=("example.com",))).port
    443
    """

    url: str
    scheme: str
    host: str  # lower-case hostname or IP address
    port: int
    request_target: str  # path and query

    @property
    def authority(self) -> str:
        """Value of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str, policy: MediaPolicy) -> MediaURL:
    """Parse a URL whose host is allowed; raise `MediaRefused` for any other."""

    def refuse(reason: str) -> MediaRefused:
        return MediaRefused(abbreviate_source(url), reason)

    if not policy.allowed_hosts:
        raise refuse("no host is allowed for media URLs: send the data inline, as a data: URI")
    if len(url) > MAX_URL_CHARACTERS or not PRINTABLE_PATTERN.fullmatch(url) or "\\" in url:
        raise refuse(f"a URL has at most {MAX_URL_CHARACTERS} ASCII characters, with others percent-encoded")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise refuse("it is not a valid URL") from None
    if parts.scheme not in DEFAULT_PORTS:
        raise refuse("only http: and https: URLs are fetched")
    if "@" in parts.netloc:
        raise refuse("a URL must not have a user or a password")
    host = parse_host(parts.netloc)
    if host is None or port == 0:
        raise refuse("its host is neither a hostname nor an IP address in standard notation")
    port = port or DEFAULT_PORTS[parts.scheme]
    if not is_host_allowed(host, port, parts.scheme, policy.allowed_hosts):
        raise refuse(f"the host {host[:80]} at port {port} is not on the list of allowed hosts")
    return MediaURL(url, parts.scheme, host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def parse_host(netloc: str) -> str | None:
    """Return the host in lower case without a trailing dot; None if its notation is ambiguous.

    >>> parse_host("Example.COM.:80"), parse_host("0x7f.1"), parse_host("[::1]:80")
    ('example.com', None, '::1')
    """
    if netloc.startswith("["):
        ip, _, rest = netloc[1:].partition("]")
        if rest and not re.fullmatch(r":[0-9]*", rest):
            return None
        try:
            return str(ipaddress.IPv6Address(ip)) if "%" not in ip else None
        except ValueError:
            return None
    host = netloc.partition(":")[0].lower().removesuffix(".")
    if NUMERIC_HOST_PATTERN.fullmatch(host):
        try:
            return str(ipaddress.IPv4Address(host))  # accepts only four decimal numbers
        except ValueError:
            return None
    return host if HOSTNAME_PATTERN.fullmatch(host) else None


def is_host_allowed(host: str, port: int, scheme: str, allowed_hosts: tuple[str, ...]) -> bool:
    """Return whether a host and port match one of the allowed hosts.

    >>> is_host_allowed("a.example.com", 443, "https", ("*.example.com",))
    True
    >>> is_host_allowed("a.example.com", 8080, "http", ("*",))
    False
    """
    return any(_matches_pattern(host, port, scheme, pattern.lower()) for pattern in allowed_hosts)


def _matches_pattern(host: str, port: int, scheme: str, pattern: str) -> bool:
    name, colon, pattern_port = pattern.rpartition(":")
    if not colon or not pattern_port.isdigit() or (":" in name and not name.startswith("[")):
        name, pattern_port = pattern, str(DEFAULT_PORTS[scheme])  # a pattern without a port allows the default port
    name = name.strip("[]").removesuffix(".")
    if str(port) != pattern_port:
        return False
    if name == "*":
        return True
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def is_ip_allowed(ip: str, policy: MediaPolicy) -> bool:
    """Return whether connecting to a resolved IP address is allowed: only public ones, unless private ones are allowed.

    >>> is_ip_allowed("93.184.216.34", MediaPolicy()), is_ip_allowed("::ffff:127.0.0.1", MediaPolicy())
    (True, False)
    """
    try:
        address = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return False
    if policy.allow_private:
        return not (address.is_multicast or address.is_unspecified)
    return all(_is_public(candidate) for candidate in (address, *_find_embedded_ipv4(address)))


def _is_public(address: IPAddress) -> bool:
    is_special = address.is_multicast or address.is_reserved or address.is_unspecified or address.is_link_local
    is_site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not (is_special or is_site_local or address.is_private or address.is_loopback)


def _find_embedded_ipv4(address: IPAddress) -> list[IPAddress]:
    """Return the IPv4 addresses embedded in an IPv6 address: mapped, tunneled or translated."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    embedded: list[IPAddress | None] = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    is_isatap = (int(address) >> 32) & 0xFFFFFFFF in ISATAP_INTERFACE_IDS
    if is_isatap or any(address in network for network in TUNNEL_NETWORKS):
        embedded.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [candidate for candidate in embedded if candidate is not None]
