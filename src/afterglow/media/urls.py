"""Which addresses may be asked for a picture or a sound. Decides; `fetching` acts."""

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
MAX_URL_CHARACTERS = 4096  # characters of an address
PRINTABLE_PATTERN = re.compile(r"[\x21-\x7e]+")
HOSTNAME_PATTERN = re.compile(
    r"(?=.{1,253}\Z)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
)
NUMERIC_HOST_PATTERN = re.compile(
    r"(.*\.)?(0x[0-9a-f]*|[0-9]+)"
)  # what some resolvers take for an IPv4 address in disguise
TUNNEL_NETWORKS = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96")))
ISATAP_INTERFACE_IDS = {0x00005EFE, 0x02005EFE}


@dataclass(frozen=True, slots=True)
class MediaURL:
    """An address that may be asked, as far as its name says; what the name stands for is checked by `allowed_number`.

    >>> parsed("https://example.com/cat.png", MediaPolicy(allowed_hosts=("example.com",))).port
    443
    """

    url: str
    scheme: str
    host: str  # a name in small letters, or a number
    port: int
    request_target: str  # what is asked of the host

    @property
    def authority(self) -> str:
        """For the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str, policy: MediaPolicy) -> MediaURL:
    """An address whose host is on the list; `MediaRefused` for every other."""

    def refuse(reason: str) -> MediaRefused:
        return MediaRefused(abbreviate_source(url), reason)

    if not policy.allowed_hosts:
        raise refuse("nothing is fetched from the network here: send the data itself, as a data: URI")
    if len(url) > MAX_URL_CHARACTERS or not PRINTABLE_PATTERN.fullmatch(url) or "\\" in url:
        raise refuse(f"an address is at most {MAX_URL_CHARACTERS} characters of ASCII, with others written as %41")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise refuse("it is no address") from None
    if parts.scheme not in DEFAULT_PORTS:
        raise refuse("only http: and https: are fetched")
    if "@" in parts.netloc:
        raise refuse("an address must not have a user or a password")
    host = parse_host(parts.netloc)
    if host is None or port == 0:
        raise refuse("its host is neither a name nor a plainly written number")
    port = port or DEFAULT_PORTS[parts.scheme]
    if not is_host_allowed(host, port, parts.scheme, policy.allowed_hosts):
        raise refuse(f"the host {host[:80]} at port {port} is not on the list of those that are allowed")
    return MediaURL(url, parts.scheme, host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def parse_host(netloc: str) -> str | None:
    """The host in small letters and without the dot at its end; None where it is written in a way that may mislead.

    >>> host_of("Example.COM.:80"), host_of("0x7f.1"), host_of("[::1]:80")
    ('example.com', None, '::1')
    """
    if netloc.startswith("["):
        inside, _, rest = netloc[1:].partition("]")
        if rest and not re.fullmatch(r":[0-9]*", rest):
            return None
        try:
            return str(ipaddress.IPv6Address(inside)) if "%" not in inside else None
        except ValueError:
            return None
    host = netloc.partition(":")[0].lower().removesuffix(".")
    if NUMERIC_HOST_PATTERN.fullmatch(host):
        try:
            return str(ipaddress.IPv4Address(host))  # takes only four plain decimal numbers
        except ValueError:
            return None
    return host if HOSTNAME_PATTERN.fullmatch(host) else None


def is_host_allowed(host: str, port: int, scheme: str, allowed_hosts: tuple[str, ...]) -> bool:
    """Whether a host and its port are among those that are allowed.

    >>> on_list("a.example.com", 443, "https", ("*.example.com",)), on_list("a.example.com", 8080, "http", ("*",))
    (True, False)
    """
    return any(_matches_pattern(host, port, scheme, entry.lower()) for entry in allowed_hosts)


def _matches_pattern(host: str, port: int, scheme: str, pattern: str) -> bool:
    name, colon, number = pattern.rpartition(":")
    if not colon or not number.isdigit() or (":" in name and not name.startswith("[")):
        name, number = pattern, str(DEFAULT_PORTS[scheme])  # no port is written: the usual one
    name = name.strip("[]").removesuffix(".")
    if str(port) != number:
        return False
    if name == "*":
        return True
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def is_ip_allowed(ip: str, policy: MediaPolicy) -> bool:
    """Whether a resolved address may be connected to: one on the public internet, unless private ones are allowed.

    >>> allowed_number("93.184.216.34", MediaPolicy()), allowed_number("::ffff:127.0.0.1", MediaPolicy())
    (True, False)
    """
    try:
        address = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return False
    if policy.allow_private:
        return not (address.is_multicast or address.is_unspecified)
    return all(_is_public(one) for one in (address, *_find_embedded_ipv4(address)))


def _is_public(address: IPAddress) -> bool:
    special = address.is_multicast or address.is_reserved or address.is_unspecified or address.is_link_local
    site = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not (special or site or address.is_private or address.is_loopback)


def _find_embedded_ipv4(address: IPAddress) -> list[IPAddress]:
    """The IPv4 addresses that an IPv6 address leads to: mapped, tunnelled or translated."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[IPAddress | None] = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    low = int(address) & 0xFFFFFFFF
    if (
        any(address in network for network in TUNNEL_NETWORKS)
        or (int(address) >> 32) & 0xFFFFFFFF in ISATAP_INTERFACE_IDS
    ):
        found.append(ipaddress.IPv4Address(low))
    return [one for one in found if one is not None]
