"""Client of an object store: reads and writes whole objects and their heads, encrypted if there is a key.

`obstore` supports S3, Google Cloud Storage, Azure and directories. Credentials come from the environment, as for the
tools of each vendor. Thread-safe. Every failure is an `OSError`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from afterglow.errors import InvalidArgument

REQUEST_TIMEOUT = "10s"
CONNECT_TIMEOUT = "3s"
MAX_RETRIES = 2
RETRY_TIMEOUT = timedelta(seconds=5)
NONCE_BYTES, TAG_BYTES, KEY_BYTES = 12, 16, 32
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # of S3, read by the library
SUPPORTED_URL = re.compile(r"(s3|s3a|gs|az|azure|abfss?|https?)://[^/].*|(file|memory)://.*")


def check_store_url(url: str) -> str:
    """Return the URL of a store; raise `InvalidArgument` if it is none, or if `obstore` is not installed.

    A directory is an absolute path or a `file://` URL.

    >>> check_store_url("/mnt/cache")
    'file:///mnt/cache'
    """
    url = Path(url).expanduser().as_uri() if url.startswith(("/", "~")) else url
    if not SUPPORTED_URL.fullmatch(url):
        raise InvalidArgument(
            "shared_cache", f"must be a URL such as s3://bucket/path, or an absolute path, not {url!r}"
        )
    if find_spec("obstore") is None:
        raise InvalidArgument("shared_cache", "needs the package obstore: pip install 'afterglow-llm[store]'")
    return url


def read_key(path: Path) -> bytes:
    """Return the key of a file with 64 hexadecimal digits; raise `InvalidArgument` if it has none."""
    try:
        key = bytes.fromhex(path.expanduser().read_text().strip())
    except (OSError, ValueError) as error:
        raise InvalidArgument("shared_cache_key_file", f"{path} cannot be read: {error}") from None
    if len(key) != KEY_BYTES:
        raise InvalidArgument("shared_cache_key_file", f"{path} must have {2 * KEY_BYTES} hexadecimal digits")
    return key


class ObjectClient:
    """Objects of one store by name. An object is a head of fixed length, which can be read alone, and a body."""

    def __init__(self, url: str, *, head_bytes: int, key: bytes | None = None) -> None:
        """`key`: 32 bytes; objects are encrypted and authenticated with it (AES-256-GCM), bound to their names."""
        import obstore
        from obstore.store import from_url

        self._obstore: Any = obstore
        self._head_bytes = head_bytes
        self._cipher = None if key is None else AESGCM(key)
        options: dict[str, Any] = {}
        if url.startswith("file:"):
            options["mkdir"] = True
        elif not url.startswith("memory:"):
            addresses = [url, *(os.environ.get(name, "") for name in ENDPOINT_VARIABLES)]
            options["client_options"] = {
                "timeout": REQUEST_TIMEOUT,
                "connect_timeout": CONNECT_TIMEOUT,
                "allow_http": bool(os.environ.get("AWS_ALLOW_HTTP")) or any(a.startswith("http:") for a in addresses),
            }
            options["retry_config"] = {"max_retries": MAX_RETRIES, "retry_timeout": RETRY_TIMEOUT}
        with self._convert_errors():
            self._store = from_url(url, **options)

    @property
    def _overhead_bytes(self) -> int:
        """Bytes that encryption adds to the head and to the body."""
        return 0 if self._cipher is None else NONCE_BYTES + TAG_BYTES

    def get_size(self, name: str) -> int | None:
        """Return the size of an object; None if there is none."""
        with self._convert_errors():
            try:
                return int(self._obstore.head(self._store, name)["size"])
            except FileNotFoundError:
                return None

    def read_head(self, name: str) -> bytes | None:
        """Return the head of an object; None if there is none."""
        with self._convert_errors():
            try:
                length = self._head_bytes + self._overhead_bytes
                sealed = bytes(self._obstore.get_range(self._store, name, start=0, length=length))
            except FileNotFoundError:
                return None
        return self._open(sealed, f"{name} head")

    def read(self, name: str) -> bytes:
        """Return an object, head and body."""
        with self._convert_errors():
            sealed = memoryview(self._obstore.get(self._store, name).bytes())
        if self._cipher is None:
            return bytes(sealed)
        length = self._head_bytes + self._overhead_bytes
        return self._open(sealed[:length], f"{name} head") + self._open(sealed[length:], f"{name} body")

    def write(self, name: str, head: bytes, body: Sequence[bytes | memoryview]) -> int:
        """Write an object; return its size."""
        data = self._seal(head, f"{name} head") + self._seal(b"".join(body), f"{name} body")
        with self._convert_errors():
            self._obstore.put(self._store, name, data)
        return len(data)

    def delete(self, name: str) -> None:
        """Delete an object if it exists."""
        with self._convert_errors(), contextlib.suppress(FileNotFoundError):
            self._obstore.delete(self._store, name)

    def delete_folder(self, folder: str) -> None:
        """Delete all objects in a folder."""
        with self._convert_errors():
            for listed in self._obstore.list(self._store, prefix=folder):
                self._obstore.delete(self._store, [item["path"] for item in listed])

    def _seal(self, data: bytes, name: str) -> bytes:
        if self._cipher is None:
            return data
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, name.encode())

    def _open(self, sealed: bytes | memoryview, name: str) -> bytes:
        if self._cipher is None:
            return bytes(sealed)
        try:
            return self._cipher.decrypt(bytes(sealed[:NONCE_BYTES]), bytes(sealed[NONCE_BYTES:]), name.encode())
        except (InvalidTag, ValueError):
            raise OSError(f"{name} is damaged or was encrypted with another key") from None

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Raise every failure of the library as `OSError`. Its panics are no `Exception`."""
        try:
            yield
        except (OSError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise OSError(
                f"object store: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from None
