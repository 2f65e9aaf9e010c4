"""Allowed hosts and IP addresses: hostile URLs are refused, however they are written."""

from __future__ import annotations

import threading
import time

import pytest

from afterglow.errors import InvalidMedia, MediaRefused
from afterglow.media.fetch import Network, fetch_url
from afterglow.media.load import load_media_bytes
from afterglow.media.policy import MediaPolicy
from afterglow.media.urls import is_host_allowed, is_ip_allowed, parse_url

PUBLIC = "93.184.216.34"
RESOLVED_IPS = {  # answers of a resolver that an attacker controls
    "inside.example": ["10.1.2.3"],
    "loopback.example": ["127.0.0.1"],
    "half.example": [PUBLIC, "192.168.0.1"],
    "meta.example": ["169.254.169.254"],
    "mapped.example": ["::ffff:169.254.169.254"],
    "unique.example": ["fd00::1"],
    "scoped.example": ["fe80::1%eth0"],
    "nowhere.example": ["0.0.0.0"],
    "carrier.example": ["100.64.0.1"],
    "translated.example": ["64:ff9b::7f00:1"],
    "tunnelled.example": ["2002:7f00:1::"],
    "teredo.example": ["2001:0:7f00:1:0:0:80ff:fffe"],
    "isatap.example": ["2606:2800::5efe:10.0.0.1"],
    "strange.example": ["not a number"],
    "empty.example": [],
    "localhost": ["127.0.0.1", "::1"],
    "metadata.google.internal": ["169.254.169.254"],
    "good.example": [PUBLIC],
    "0x5db8d822": [PUBLIC],
    "1572395042": [PUBLIC],
    "0135.0270.0330.0042": [PUBLIC],
}
HOSTILE_URLS = [
    "http://127.0.0.1/a.png",
    "http://127.1/a.png",
    "http://0177.0.0.1/a.png",
    "http://0x7f.0.0.1/a.png",
    "http://0x7f000001/a.png",
    "http://2130706433/a.png",
    "http://017700000001/a.png",
    "http://127.0.0.1./a.png",
    "http://0x5db8d822/a.png",
    "http://1572395042/a.png",
    "http://0135.0270.0330.0042/a.png",
    "http://0/a.png",
    "http://0.0.0.0/a.png",
    "http://10.0.0.1/a.png",
    "http://172.16.0.1/a.png",
    "http://192.168.1.1/a.png",
    "http://100.64.0.1/a.png",
    "http://169.254.169.254/latest/meta-data/",
    "http://224.0.0.1/a.png",
    "http://255.255.255.255/a.png",
    "http://240.0.0.1/a.png",
    "http://[::1]/a.png",
    "http://[::]/a.png",
    "http://[::ffff:127.0.0.1]/a.png",
    "http://[::ffff:7f00:1]/a.png",
    "http://[::127.0.0.1]/a.png",
    "http://[64:ff9b::7f00:1]/a.png",
    "http://[2002:7f00:1::]/a.png",
    "http://[fe80::1%25eth0]/a.png",
    "http://[fd00::1]/a.png",
    "http://[fec0::1]/a.png",
    "http://[ff02::1]/a.png",
    "http://localhost/a.png",
    "http://LOCALHOST./a.png",
    "http://metadata.google.internal/computeMetadata/v1/",
    "http://inside.example/a.png",
    "http://loopback.example/a.png",
    "http://half.example/a.png",
    "http://meta.example/a.png",
    "http://mapped.example/a.png",
    "http://unique.example/a.png",
    "http://scoped.example/a.png",
    "http://nowhere.example/a.png",
    "http://carrier.example/a.png",
    "http://translated.example/a.png",
    "http://tunnelled.example/a.png",
    "http://teredo.example/a.png",
    "http://isatap.example/a.png",
    "http://strange.example/a.png",
    "http://empty.example/a.png",
    "http://good.example@127.0.0.1/a.png",
    "http://127.0.0.1@good.example/a.png",
    "http://user:word@good.example/a.png",
    "http://good.example:22/a.png",
    "http://good.example:0/a.png",
    "http://good.example:99999/a.png",
    "http://good.example:80:80/a.png",
    "http://good.example\\@127.0.0.1/a.png",
    "http:\\\\127.0.0.1\\a.png",
    "http://good.example/a\\b.png",
    "http://good.example\t.evil/a.png",
    "http://good.example/a.png\r\nHost: 127.0.0.1",
    "http://good.example/a b.png",
    "http://good..example/a.png",
    "http://.good.example/a.png",
    "http://-good.example/a.png",
    "http://①②⑦.⓪.⓪.①/a.png",
    "http://ⓛocalhost/a.png",
    "http://g\u043e\u043ed.example/a.png",
    "http://127。0。0。1/a.png",
    "http://%31%32%37.0.0.1/a.png",
    "http:///a.png",
    "http:a.png",
    "http://[::1/a.png",
    "http://[::1]x/a.png",
    "http://" + "a" * 5000,
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "gopher://good.example/1",
    "ftp://good.example/a.png",
    "dict://good.example:11211/stats",
    "ldap://good.example/",
    "jar:http://good.example/a.png!/",
    "javascript:alert(1)",
    "blob:http://good.example/1",
    "//good.example/a.png",
    "/etc/passwd",
    "../../etc/passwd",
    "\\\\good.example\\share\\a.png",
]


def fail_to_connect(ip: str, port: int, seconds: float):
    raise AssertionError(f"connected to {ip}")


NETWORK = Network(resolve=lambda host, port: RESOLVED_IPS.get(host, [host]), connect=fail_to_connect)
ALL_HOSTS = MediaPolicy(allowed_hosts=("*",))


@pytest.mark.parametrize("url", HOSTILE_URLS)
def test_a_hostile_url_is_refused_even_if_every_host_is_allowed(url, monkeypatch):
    monkeypatch.setattr("afterglow.media.load.fetch_url", lambda source, policy: fetch_url(source, policy, NETWORK))
    with pytest.raises(MediaRefused):
        load_media_bytes("image", url, ALL_HOSTS)


def test_the_list_covers_at_least_forty_urls():
    assert len(set(HOSTILE_URLS)) >= 40


def test_an_allowed_url_connects_to_its_ip():
    with pytest.raises(AssertionError, match=PUBLIC):
        fetch_url("http://good.example/a.png", ALL_HOSTS, NETWORK)


def test_a_refusal_states_the_reason():
    for url, policy, message in (
        ("http://good.example/", MediaPolicy(), "send the data inline"),
        ("http://user@good.example/", ALL_HOSTS, "user or a password"),
        ("http://good.example/", MediaPolicy(allowed_hosts=("other.example",)), "good.example at port 80 is not on"),
        ("gopher://good.example/", ALL_HOSTS, "only data:, http:, https: and file:"),
    ):
        with pytest.raises(MediaRefused, match=message):
            load_media_bytes("image", url, policy)


@pytest.mark.parametrize("url", ["http://good.example/a.png", "https://good.example/", "http://127.0.0.1/"])
def test_a_host_that_is_not_allowed_is_not_resolved(url):
    def fail_to_resolve(host, port):
        raise AssertionError("resolved")

    for hosts in ((), ("other.example",), ("*.good.example",), ("good.example:8080",)):
        with pytest.raises(MediaRefused):
            fetch_url(url, MediaPolicy(allowed_hosts=hosts), Network(resolve=fail_to_resolve, connect=fail_to_connect))


def test_allowed_hosts_match_hosts_subdomains_and_ports():
    def allowed(url: str, *hosts: str) -> bool:
        try:
            return bool(parse_url(url, MediaPolicy(allowed_hosts=hosts)))
        except MediaRefused:
            return False

    assert allowed("https://Example.com./a", "example.COM")
    assert allowed("http://example.com:8080/a", "example.com:8080")
    assert not allowed("http://example.com:8080/a", "example.com")
    assert not allowed("http://example.com/a", "example.com:8080")
    assert allowed("http://a.b.example.com/a", "*.example.com")
    assert not allowed("http://example.com/a", "*.example.com")
    assert not allowed("http://evilexample.com/a", "*.example.com", "example.com")
    assert not allowed("http://example.com.evil.net/a", "*.example.com", "example.com")
    assert allowed("http://[2606:2800::1]/a", "[2606:2800::1]")
    assert allowed("http://[2606:2800::1]:81/a", "[2606:2800::1]:81")
    assert is_host_allowed("example.com", 443, "https", ("*",))


def test_a_parsed_url_preserves_path_and_query():
    parsed = parse_url("https://example.com/a/b%20c?d=e&f#g", MediaPolicy(allowed_hosts=("example.com",)))
    assert (parsed.request_target, parsed.authority) == ("/a/b%20c?d=e&f", "example.com")
    assert parse_url("http://example.com:81?x", MediaPolicy(allowed_hosts=("example.com:81",))).authority == (
        "example.com:81"
    )


def test_private_ips_are_allowed_only_if_the_policy_says_so():
    private = MediaPolicy(allow_private=True)
    for ip in ("127.0.0.1", "10.0.0.1", "192.168.1.1", "fd00::1", "::1"):
        assert not is_ip_allowed(ip, MediaPolicy())
        assert is_ip_allowed(ip, private)
    for ip in ("224.0.0.1", "0.0.0.0", "::", "ff02::1", "nonsense"):
        assert not is_ip_allowed(ip, private)
    assert is_ip_allowed("8.8.8.8", MediaPolicy())
    assert is_ip_allowed("2606:4700::1111", MediaPolicy())


def test_a_resolver_that_never_answers_times_out():
    released = threading.Event()

    def resolve_slowly(host, port):
        released.wait(120)
        return [PUBLIC]

    start = time.monotonic()
    with pytest.raises(InvalidMedia, match=r"within 0\.2 seconds"):
        fetch_url(
            "http://good.example/",
            MediaPolicy(allowed_hosts=("*",), fetch_timeout_seconds=0.2),
            Network(resolve=resolve_slowly, connect=fail_to_connect),
        )
    assert time.monotonic() - start < 60
    released.set()
