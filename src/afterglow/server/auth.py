"""What stands before every route: API keys, the size of bodies, the end of the server, and a count of what happened.

Plain ASGI: nothing here may buffer a stream or hide a disconnect.
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

UNAUTHENTICATED_PATHS = frozenset({"/health", "/v1/health"})  # what needs no key, and is answered to the end


class APIKeys:
    """API keys, kept only as hashes.

    >>> keys = Keys(["secret"])
    >>> keys.fit("secret"), keys.fit("guess")
    (True, False)
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [self._hash_key(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def is_valid(self, key: str) -> bool:
        """Whether it is one of them; takes equally long for every guess."""
        digest = self._hash_key(key)
        return sum([hmac.compare_digest(digest, known) for known in self._digests]) > 0

    def get_salt(self, key: str) -> str:
        """Whose requests those with this key are, as far as engines need to know; without keys all are one's own.

        >>> Keys([]).salt("whatever"), Keys(["secret"]).salt("secret")[:8]
        ('', '2bb80d53')
        """
        return self._hash_key(key).hex() if self else ""

    def _hash_key(self, key: str) -> bytes:
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def get_tenant_salt(request: Request) -> str:
    """Whose request it is: nothing that is computed, stored or shown for one is used or seen with another."""
    salt: str = request.state.salt
    return salt


class AuthMiddleware:
    """Lets requests through, or answers them itself."""

    def __init__(self, app: ASGIApp, *, keys: APIKeys, max_body_bytes: int, metrics: Metrics) -> None:
        self.app = app
        self.is_shutting_down = False  # from now on nothing new is begun
        self.active_requests = 0  # requests that are being answered
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = CLIENT_CLOSED_REQUEST  # unless an answer is begun

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.active_requests += 1
        try:
            refusal = self._check_request(scope)
            if refusal is None:
                await self.app(scope, self._limit_body(receive), note)
            else:
                await refusal.to_response()(scope, receive, note)
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
                "a valid API key is needed: Authorization: Bearer …",
                error_type="authentication_error",
                code="invalid_api_key",
            )
        length = headers.get("content-length", "0")
        if length.isdigit() and len(length) < 20 and int(length) > self._max_body_bytes:
            return self._build_too_large_error()
        return None

    def _limit_body(self, receive: Receive) -> Receive:
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(413, self._build_too_large_error().message)
            return message

        return bounded

    def _build_too_large_error(self) -> APIError:
        limit = f"{self._max_body_bytes:,} bytes are allowed here (the server's setting `max_body_bytes`)"
        return APIError(413, f"the body is too large: at most {limit}", code="body_too_large")
