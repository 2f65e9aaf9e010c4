"""Middleware in front of all routes: API keys, body size limit, shutdown, and request counting.

Plain ASGI, so that it neither buffers streams nor hides disconnects.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from fastapi import Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from afterglow.server.errors import CLIENT_CLOSED_REQUEST, APIError
from afterglow.server.metrics import Metrics

UNAUTHENTICATED_PATHS = frozenset({"/health", "/v1/health"})  # need no key and respond during shutdown


class APIKeys:
    """Set of API keys. Stores hashes only.

    >>> keys = APIKeys(["secret"])
    >>> keys.is_valid("secret"), keys.is_valid("wrong")
    (True, False)
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [self._hash_key(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def is_valid(self, key: str) -> bool:
        """Whether `key` is one of the keys. Takes the same time for every input."""
        digest = self._hash_key(key)
        return sum([hmac.compare_digest(digest, known) for known in self._digests]) > 0

    def get_salt(self, key: str) -> str:
        """Return the cache salt of the tenant with this key. Without keys, all clients are one tenant.

        >>> APIKeys([]).get_salt("any"), APIKeys(["secret"]).get_salt("secret")[:8]
        ('', '2bb80d53')
        """
        return self._hash_key(key).hex() if self else ""

    def _hash_key(self, key: str) -> bytes:
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def get_tenant_salt(request: Request) -> str:
    """Return the cache salt of a request. Tenants with different salts share no cached state and no responses."""
    salt: str = request.state.salt
    return salt


class AuthMiddleware:
    """Passes valid requests to the application and responds to all others itself."""

    def __init__(self, app: ASGIApp, *, keys: APIKeys, max_body_bytes: int, metrics: Metrics) -> None:
        self.app = app
        self.is_shutting_down = False  # if true, new requests get 503
        self.active_requests = 0
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = CLIENT_CLOSED_REQUEST  # unless a response starts

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.active_requests += 1
        try:
            error = self._check_request(scope)
            if error is None:
                await self.app(scope, self._limit_body(receive), send_and_record)
            else:
                await error.to_response()(scope, receive, send_and_record)
        finally:
            self.active_requests -= 1
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status)).inc()

    def _check_request(self, scope: Scope) -> APIError | None:
        if scope["path"] in UNAUTHENTICATED_PATHS:
            return None
        if self.is_shutting_down:
            return APIError(
                503, "the server is shutting down", error_type="server_error", code="shutting_down", retry_after=5
            )
        headers = Headers(scope=scope)
        key = headers.get("authorization", "").removeprefix("Bearer ")
        scope.setdefault("state", {})["salt"] = self._keys.get_salt(key)
        if self._keys and not self._keys.is_valid(key):
            return APIError(
                401,
                "a valid API key is required: Authorization: Bearer …",
                error_type="authentication_error",
                code="invalid_api_key",
            )
        length = headers.get("content-length", "0")
        if length.isdigit() and len(length) < 20 and int(length) > self._max_body_bytes:
            return self._build_too_large_error()
        return None

    def _limit_body(self, receive: Receive) -> Receive:
        received_bytes = 0

        async def receive_limited() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > self._max_body_bytes:
                raise HTTPException(413, self._build_too_large_error().message)
            return message

        return receive_limited

    def _build_too_large_error(self) -> APIError:
        limit = f"{self._max_body_bytes:,} bytes (server setting `max_body_bytes`)"
        return APIError(413, f"the body is too large: the limit is {limit}", code="body_too_large")
