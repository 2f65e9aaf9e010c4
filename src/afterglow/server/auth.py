"""Middleware in front of all routes: API keys, `Host` and `Origin`, body size limit, shutdown, and the log and count
of requests.

Plain ASGI, so that it neither buffers streams nor hides disconnects.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from afterglow.server.errors import CLIENT_CLOSED_REQUEST, APIError, ErrorFormats, ReceiveError
from afterglow.server.held_models import hold_models
from afterglow.server.logs import start_record
from afterglow.server.settings import KEY_DIGEST_PREFIX, ServerSettings, hash_api_key
from afterglow.server.state import ServerState

UNAUTHENTICATED_PATHS = frozenset({"/health", "/v1/health"})  # need no key and respond during shutdown
PAGE_PATH, PAGE_FILES_PREFIX = "/", "/web/"  # the web page needs no key; its requests to the other routes do

# What Ollama accepts unless it is configured: names that public DNS does not have, pages of servers on this machine,
# and programs that show web pages.
OLLAMA_HOST_SUFFIXES = (".localhost", ".local", ".internal")
OLLAMA_ORIGINS = (
    *(
        f"{scheme}://{host}{port}"
        for scheme in ("http", "https")
        for host in ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")
        for port in ("", ":*")
    ),
    *(f"{scheme}://*" for scheme in ("app", "file", "tauri", "vscode-webview", "vscode-file")),
)

KEY_HEADERS = ("authorization", "x-api-key")
UPLOAD_PATH = "/v1/files"
FORM_BYTES = 64 * 1024  # of a form around its file


class APIKeys:
    """Set of API keys. Stores digests only.

    >>> keys = APIKeys([hash_api_key("secret")])
    >>> keys.is_valid("secret"), keys.is_valid("wrong")
    (True, False)
    """

    def __init__(self, digests: Iterable[str]) -> None:
        """`digests` are results of `hash_api_key`."""
        self._digests = list(digests)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def is_valid(self, key: str) -> bool:
        """Whether `key` is one of the keys. Takes the same time for every input."""
        digest = self._hash_sent_key(key)
        return sum([hmac.compare_digest(digest, known) for known in self._digests]) > 0

    def get_salt(self, key: str) -> str:
        """Return the cache salt of the tenant with this key. Without keys, all clients are one tenant.

        >>> APIKeys([]).get_salt("any"), APIKeys([hash_api_key("secret")]).get_salt("secret")[:8]
        ('', '2bb80d53')
        """
        return self._hash_sent_key(key).removeprefix(KEY_DIGEST_PREFIX) if self else ""

    def _hash_sent_key(self, key: str) -> str:
        """Return the digest of a key that a client sent. A client must not send a digest instead of the key.

        Headers are decoded as Latin-1; keys are UTF-8.
        """
        key = key.encode("latin-1", "replace").decode("utf-8", "surrogateescape")
        return "" if not key.strip() or key.startswith(KEY_DIGEST_PREFIX) else hash_api_key(key)


def is_loopback_name(name: str) -> bool:
    """Whether a host name always means this machine.

    >>> is_loopback_name("127.0.0.1"), is_loopback_name("::1"), is_loopback_name("127.0.0.1.example.com")
    (True, True, False)
    """
    address = parse_address(name)
    return name == "localhost" if address is None else address.is_loopback


def parse_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a host name is; None for other names."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class BrowserPolicy:
    """Decides which web pages may use the server: a page must not reach it by a name that it controls.

    >>> policy = BrowserPolicy(ServerSettings(allow_hosts=("box.example",)))
    >>> policy.is_host_allowed("localhost:8080"), policy.is_host_allowed("evil.example")
    (True, False)
    >>> policy.is_origin_allowed("http://evil.example", host="localhost:8080")
    False
    >>> BrowserPolicy(ServerSettings(), like_ollama=True).is_origin_allowed("http://localhost:3000", host="localhost")
    True
    """

    def __init__(self, settings: ServerSettings, *, like_ollama: bool = False) -> None:
        """`like_ollama`: what Ollama accepts by default is accepted, too."""
        own_names = [socket.gethostname()] if like_ollama else []
        self._hosts = {normalize_host(host) for host in (settings.host, *settings.allow_hosts, *own_names)}
        self._host_suffixes = OLLAMA_HOST_SUFFIXES if like_ollama else ()
        # An address is not a name that a page could control. A server on all addresses is reached by each of them.
        address = parse_address(settings.host)
        self._allows_addresses = like_ollama or (address is not None and address.is_unspecified)
        self._allows_all_hosts = bool(settings.api_keys) or "*" in settings.allow_hosts
        self.origin_pattern = compile_origins((*settings.allow_origins, *(OLLAMA_ORIGINS if like_ollama else ())))

    def check(self, headers: Headers) -> APIError | None:
        """Return the error of a request whose `Host` or `Origin` is not allowed."""
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        host = hosts[0] if len(hosts) == 1 else ""
        if not self.is_host_allowed(host):
            advice = "add it to the server setting `allow_hosts`, or set `api_keys`"
            return APIError(403, f"the host name {host[:200]!r} is not allowed: {advice}", code="host_not_allowed")
        for origin in origins:
            if not self.is_origin_allowed(origin, host):
                advice = "add it to the server setting `allow_origins`"
                return APIError(403, f"the origin {origin[:200]!r} is not allowed: {advice}", code="origin_not_allowed")
        return None

    def is_host_allowed(self, host: str) -> bool:
        """Whether a `Host` header is a loopback name or configured. Every name is if there are API keys."""
        name = normalize_host(host)
        if self._allows_all_hosts or is_loopback_name(name):
            return True
        if parse_address(name) is not None and self._allows_addresses:
            return True
        return bool(name) and (name in self._hosts or name.endswith(self._host_suffixes))

    def is_origin_allowed(self, origin: str, host: str) -> bool:
        """Whether an `Origin` header is configured or is the server itself."""
        if self.origin_pattern.fullmatch(origin):
            return True
        try:
            return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:  # malformed
            return False


def compile_origins(origins: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for origins in which `*` stands for any text without a slash; `*` alone for every origin.

    >>> pattern = compile_origins(["http://localhost:*", "http://[::1]"])
    >>> [bool(pattern.fullmatch(f"http://{host}")) for host in ("localhost:3000", "localhost", "[::1]", "example.com")]
    [True, False, True, False]
    """
    patterns = [".*" if origin == "*" else re.escape(origin).replace(r"\*", "[^/]*") for origin in origins]
    return re.compile("|".join(patterns) or r"(?!)")


def normalize_host(host: str) -> str:
    """Return the name of a `Host` header without its port; empty if it is malformed.

    >>> normalize_host("[::1]:8080"), normalize_host("::1"), normalize_host("Box.example.:80")
    ('::1', '::1', 'box.example')
    """
    if host.count(":") > 1 and not host.startswith("["):
        return host.lower()  # an IPv6 address from the settings
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def get_tenant_salt(request: Request) -> str:
    """Return the cache salt of a request. Tenants with different salts share no cached state and no responses."""
    salt: str = request.state.salt
    return salt


def join_salts(tenant_salt: str, request_salt: str | None) -> str:
    """Return the salt of a tenant with that of a request."""
    return tenant_salt if request_salt is None else f"{tenant_salt}\n{request_salt}"


class AuthMiddleware:
    """Passes valid requests to the application and responds to all others itself."""

    def __init__(self, app: ASGIApp, state: ServerState, error_formats: ErrorFormats) -> None:
        settings = state.settings
        self.app = app
        self.is_shutting_down = False  # if true, new requests get 503
        self.active_requests = 0
        self._state = state
        self._keys = APIKeys(settings.api_keys)
        self.browser_policy = BrowserPolicy(settings)
        self.ollama_policy = BrowserPolicy(settings, like_ollama=True)
        self._max_body_bytes = settings.max_body_bytes
        self._max_upload_bytes = max(settings.max_body_bytes, settings.max_file_bytes + FORM_BYTES)
        self._strict = settings.strict
        self._metrics = state.metrics
        self._error_formats = error_formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = CLIENT_CLOSED_REQUEST  # unless a response starts
        record = start_record(scope["method"], scope["path"], refuses_hints=self._strict)

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                request_ids = {"request-id": record.id, "x-request-id": record.id}  # as Anthropic and OpenAI call it
                MutableHeaders(scope=message).update(request_ids | record.headers)
            await send(message)

        self.active_requests += 1
        try:
            error = self._check_request(scope)
            if error is None:
                with hold_models():
                    await self.app(scope, self._limit_body(receive, scope["path"]), send_and_record)
            else:
                response = self._error_formats.build_response(error, scope["path"])
                await response(scope, receive, send_and_record)
        finally:
            self.active_requests -= 1
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status)).inc()
            record.log(status)

    def _check_request(self, scope: Scope) -> APIError | None:
        headers = Headers(scope=scope)
        if (error := self._get_browser_policy(scope).check(headers)) is not None:
            return error
        if scope["path"] in UNAUTHENTICATED_PATHS:
            return None
        if self.is_shutting_down:
            return APIError(
                503, "the server is shutting down", error_type="server_error", code="shutting_down", retry_after=5
            )
        if scope["path"] == PAGE_PATH or scope["path"].startswith(PAGE_FILES_PREFIX):
            return None
        sent_keys = {headers[name].removeprefix("Bearer ") for name in KEY_HEADERS if headers.get(name)}
        key = next(iter(sent_keys), "")
        scope.setdefault("state", {})["salt"] = self._keys.get_salt(key)
        if self._keys and (len(sent_keys) > 1 or not self._keys.is_valid(key)):
            message = "a valid API key is required: `Authorization: Bearer …` or `x-api-key: …`"
            if len(sent_keys) > 1:
                message = "`Authorization` and `x-api-key` have different keys: send one of them"
            return APIError(401, message, error_type="authentication_error", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdigit() and len(length) < 20 and int(length) > self._get_max_bytes(scope["path"]):
            return self._build_too_large_error(scope["path"])
        return None

    def _get_browser_policy(self, scope: Scope) -> BrowserPolicy:
        return self.ollama_policy if self._state.is_for_ollama_port(scope) else self.browser_policy

    def _get_max_bytes(self, path: str) -> int:
        return self._max_upload_bytes if path == UPLOAD_PATH else self._max_body_bytes

    def _limit_body(self, receive: Receive, path: str) -> Receive:
        received_bytes, max_bytes = 0, self._get_max_bytes(path)

        async def receive_limited() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > max_bytes:
                raise ReceiveError(self._build_too_large_error(path))
            return message

        return receive_limited

    def _build_too_large_error(self, path: str) -> APIError:
        setting = "max_file_bytes" if path == UPLOAD_PATH else "max_body_bytes"
        limit = f"{self._get_max_bytes(path):,} bytes (server setting `{setting}`)"
        return APIError(413, f"the body is too large: the limit is {limit}", code="body_too_large")
