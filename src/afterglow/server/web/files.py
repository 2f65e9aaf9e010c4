"""Files of the web page, with the headers that a browser needs to run nothing else.

All files but the page itself have the digest of the whole folder in their path, so browsers cache them for ever and
load all of them again after an upgrade.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from afterglow.server.auth import is_loopback_name
from afterglow.server.settings import ServerSettings

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE_NAME = "index.html"
DIGEST_PLACEHOLDER = b"DIGEST"  # in paths of the page
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # a string can never become markup
        "trusted-types 'none'",
    )
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class WebFile:
    """A file of the page."""

    content: bytes
    content_type: str
    etag: str


class WebFiles:
    """All files of the page, in memory.

    >>> files = WebFiles.load()
    >>> files.digest.encode() in files.page.content
    True
    """

    def __init__(self, contents: dict[str, bytes]) -> None:
        digest = hashlib.sha256()
        for name, content in sorted(contents.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self.digest = digest.hexdigest()[:16]
        page = contents[PAGE_NAME].replace(DIGEST_PLACEHOLDER, self.digest.encode())
        self.page = _build_file(PAGE_NAME, page)
        self._files = {name: _build_file(name, content) for name, content in contents.items() if name != PAGE_NAME}

    @classmethod
    def load(cls) -> WebFiles:
        """Load the files of the package."""
        folder = resources.files("afterglow").joinpath("web")
        return cls(
            {entry.name: entry.read_bytes() for entry in folder.iterdir() if _get_suffix(entry.name) in CONTENT_TYPES}
        )

    def get(self, digest: str, name: str) -> WebFile | None:
        """Return a file of this version of the page."""
        return self._files.get(name) if digest == self.digest else None


def explain_disabled_page(settings: ServerSettings) -> str | None:
    """Return why the page is off, or None if it is on.

    >>> explain_disabled_page(ServerSettings()) is None
    True
    >>> explain_disabled_page(ServerSettings(host="0.0.0.0"))
    'the web page is off on other addresses than loopback unless API keys are set (server setting `api_keys`)'
    """
    if not settings.web:
        return "the web page is off (server setting `web`)"
    if not settings.api_keys and not is_loopback_name(settings.host):
        advice = "unless API keys are set (server setting `api_keys`)"
        return f"the web page is off on other addresses than loopback {advice}"
    return None


def _build_file(name: str, content: bytes) -> WebFile:
    return WebFile(content, CONTENT_TYPES[_get_suffix(name)], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _get_suffix(name: str) -> str:
    return f".{name.rpartition('.')[2]}"
