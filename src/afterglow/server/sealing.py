"""Sealing of reasoning that clients send back: signatures (Anthropic) and encrypted content (OpenAI Responses).

A signature shows that this server generated a text. Encrypted content carries the text itself. Both are bound to the
tenant, and both stay valid over restarts, because the key is a file in the data directory of the user.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from afterglow.paths import get_data_directory

KEY_BYTES = 32
NONCE_BYTES = 12


@dataclass(frozen=True)
class Sealer:
    """Signs and encrypts texts of a tenant with one key.

    >>> sealer = Sealer(bytes(32))
    >>> sealer.verify(sealer.sign("a thought", "tenant"), "a thought", "tenant")
    True
    >>> sealer.decrypt(sealer.encrypt("a thought", "tenant"), "other tenant") is None
    True
    """

    key: bytes

    def sign(self, text: str, salt: str) -> str:
        """Return the signature of a text that was generated for the tenant."""
        return encode_base64(
            hmac.digest(self._derive_key("sign", salt), text.encode("utf-8", "surrogatepass"), "sha256")
        )

    def verify(self, signature: str, text: str, salt: str) -> bool:
        """Return whether a signature is the one of the text and the tenant."""
        return hmac.compare_digest(signature.encode("utf-8", "surrogatepass"), self.sign(text, salt).encode())

    def encrypt(self, text: str, salt: str) -> str:
        """Return the text as encrypted content."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return encode_base64(nonce + self._get_cipher(salt).encrypt(nonce, text.encode("utf-8", "surrogatepass"), None))

    def decrypt(self, content: str, salt: str) -> str | None:
        """Return the text of encrypted content; None if it was not encrypted here for the tenant."""
        try:
            data = base64.urlsafe_b64decode(content.encode("ascii"))
            plain = self._get_cipher(salt).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], None)
        except (ValueError, InvalidTag):
            return None
        return plain.decode("utf-8", "surrogatepass")

    def _derive_key(self, purpose: str, salt: str) -> bytes:
        return hmac.digest(self.key, f"afterglow {purpose} {salt}".encode(), hashlib.sha256)

    def _get_cipher(self, salt: str) -> AESGCM:
        return AESGCM(self._derive_key("encrypt", salt))


@functools.cache
def get_sealer() -> Sealer:
    """Return the sealer of this user. Its key is created on first use; if it cannot be stored, it is lost at exit."""
    path = get_data_directory("server") / "reasoning.key"
    with contextlib.suppress(OSError):
        return Sealer(read_or_create_key(path))
    return Sealer(secrets.token_bytes(KEY_BYTES))


def read_or_create_key(path: Path) -> bytes:
    """Return the key in a file. Of several processes that create it, one wins."""
    with contextlib.suppress(FileNotFoundError):
        if len(key := path.read_bytes()) == KEY_BYTES:
            return key
        path.unlink()  # damaged
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # readable by the user only
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    return path.read_bytes()


def encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()
