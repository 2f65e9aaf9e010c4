"""Sealed reasoning: signatures and encrypted content."""

from __future__ import annotations

from pathlib import Path

import pytest

from afterglow.server.sealing import KEY_BYTES, Sealer, read_or_create_key

SEALER = Sealer(b"k" * KEY_BYTES)


@pytest.mark.parametrize("text", ["", "a thought", "ü\n" * 1000, "\ud800"])
def test_encrypted_content_is_decrypted_to_the_same_text(text: str) -> None:
    assert SEALER.decrypt(SEALER.encrypt(text, "tenant"), "tenant") == text


@pytest.mark.parametrize("salt", ["", "other"])
def test_another_tenant_can_neither_verify_nor_decrypt(salt: str) -> None:
    assert not SEALER.verify(SEALER.sign("a thought", "tenant"), "a thought", salt)
    assert SEALER.decrypt(SEALER.encrypt("a thought", "tenant"), salt) is None


@pytest.mark.parametrize("content", ["", "x", "ü", "A" * 100, "====", "\ud800"])
def test_content_of_another_origin_is_rejected(content: str) -> None:
    assert SEALER.decrypt(content, "tenant") is None
    assert not SEALER.verify(content, "a thought", "tenant")


def test_a_changed_thought_does_not_have_the_signature() -> None:
    assert not SEALER.verify(SEALER.sign("a thought", "tenant"), "a thoughT", "tenant")


def test_the_key_is_created_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "server" / "reasoning.key"
    key = read_or_create_key(path)
    assert read_or_create_key(path) == key
    assert len(key) == KEY_BYTES
    assert path.stat().st_mode & 0o077 == 0
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_key_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "reasoning.key"
    path.write_bytes(b"short")
    assert len(read_or_create_key(path)) == KEY_BYTES
