"""Vocabularies on which llama.cpp aborts, at load or on some text, are rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from afterglow.llama.gguf.formats import ValueType
from support.gguf_document import Document
from support.gguf_verdict import get_rejection, inspect_document, open_document

U32, I32, F32, TEXT = ValueType.UINT32, ValueType.INT32, ValueType.FLOAT32, ValueType.STRING
BYTES = [b"<0x%02X>" % byte for byte in range(256)]


def set_tokenizer(document: Document, model: bytes, tokens: list[bytes]) -> None:
    """Set another tokenizer model, with as many tokens as the embedding table has rows."""
    document.set("tokenizer.ggml.model", TEXT, model)
    fillers = (b"<%d>" % number for number in range(document.tensors[0].shape[1] - len(tokens)))
    document.set("tokenizer.ggml.tokens", TEXT, *tokens, *fillers)


@pytest.mark.parametrize("name", ["draft", "embedding"])
def test_a_duplicate_token_is_rejected_for_every_tokenizer(name: str, tmp_path: Path) -> None:
    document = open_document(name)
    tokens = document.find("tokenizer.ggml.tokens")
    assert tokens
    tokens.values[40] = tokens.values[30] + b"\0 ignored by llama.cpp"
    assert "tokens 30 and 40 are the same" in get_rejection(document, tmp_path)


def test_an_empty_token_is_allowed_but_not_its_llama_cpp_placeholder(tmp_path: Path) -> None:
    document = open_document("draft")
    tokens = document.find("tokenizer.ggml.tokens")
    assert tokens
    tokens.values[280] = b""
    assert inspect_document(document, tmp_path)
    tokens.values[281] = b"[EMPTY_280]"
    assert "tokens 280 and 281 are the same: b'[EMPTY_280]'" in get_rejection(document, tmp_path)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("model", "no tokenizer"),
        ("tokens", "no vocabulary"),
        ("merges", "tokenizer.ggml.merges is missing"),
    ],
)
def test_the_error_names_a_missing_tokenizer_key(key: str, reason: str, tmp_path: Path) -> None:
    document = open_document("draft")
    document.remove(f"tokenizer.ggml.{key}")
    assert reason in get_rejection(document, tmp_path)


def test_scores_and_token_types_must_match_the_token_count(tmp_path: Path) -> None:
    document = open_document("draft")
    document.set("tokenizer.ggml.scores", F32, 0.0, 1.0)
    assert "it has 2 scores for 288 tokens" in get_rejection(document, tmp_path)
    document.set("tokenizer.ggml.scores", U32, 0, 1)
    assert "it must be an array of FLOAT32 or INT32" in get_rejection(document, tmp_path)
    document = open_document("draft")
    document.set("tokenizer.ggml.token_type", I32, 1, array=True)
    assert "it has 1 token types for 288 tokens" in get_rejection(document, tmp_path)


def test_the_embedding_table_must_match_the_token_count(tmp_path: Path) -> None:
    document = open_document("draft")
    tokens = document.find("tokenizer.ggml.tokens")
    assert tokens
    tokens.values = tokens.values[:-1]
    assert "it has 287 tokens, but its token_embd.weight has the shape [32, 288]" in get_rejection(document, tmp_path)


def test_a_special_token_outside_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    document = open_document("draft")
    document.set("tokenizer.ggml.eos_token_id", U32, 288)
    assert "tokenizer.ggml.eos_token_id is 288, the vocabulary has 288 tokens" in get_rejection(document, tmp_path)


def test_a_required_special_token_must_exist(tmp_path: Path) -> None:
    document = open_document("draft")
    document.set("tokenizer.ggml.model", TEXT, b"gemma4")
    document.remove("tokenizer.ggml.bos_token_id")
    assert "needs tokenizer.ggml.bos_token_id, which is missing" in get_rejection(document, tmp_path)


def test_a_llama_vocabulary_without_byte_tokens_is_rejected(tmp_path: Path) -> None:
    document = open_document("draft")
    set_tokenizer(document, b"llama", BYTES)
    assert inspect_document(document, tmp_path)
    set_tokenizer(document, b"llama", [text for text in BYTES if text != b"<0xE9>"])
    assert "no token for the byte 0xe9" in get_rejection(document, tmp_path)


def test_an_rwkv_vocabulary_without_byte_tokens_is_rejected(tmp_path: Path) -> None:
    document = open_document("draft")
    escaped = [b"\\x%02x" % byte for byte in range(256)]
    set_tokenizer(document, b"rwkv", [*escaped, b"the"])
    assert inspect_document(document, tmp_path)
    set_tokenizer(document, b"rwkv", [text for text in escaped if text != b"\\x74"] + [b"the"])
    assert "no token for the byte 0x74" in get_rejection(document, tmp_path)
    set_tokenizer(document, b"rwkv", BYTES)  # the spelling of another tokenizer
    assert "no token for the byte 0x00" in get_rejection(document, tmp_path)


def test_an_oversized_token_is_rejected(tmp_path: Path) -> None:
    document = open_document("draft")
    set_tokenizer(document, b"gpt2", [b"x" * 20_000])
    assert "its longest token has 20,000 bytes" in get_rejection(document, tmp_path)
    set_tokenizer(document, b"plamo2", [b"x" * 1_000])
    assert "too long, up to 1,000 bytes" in get_rejection(document, tmp_path)


def test_byte_tokens_in_a_wordpiece_vocabulary_are_rejected(tmp_path: Path) -> None:
    document = open_document("embedding")
    types = document.find("tokenizer.ggml.token_type")
    assert types
    types.values[20] = 6
    assert "byte tokens, which a WordPiece tokenizer does not support" in get_rejection(document, tmp_path)


def test_the_whitespace_pattern_is_rejected_for_bpe(tmp_path: Path) -> None:
    document = open_document("draft")
    document.set("tokenizer.ggml.pre", TEXT, b"whitespace")
    assert "needs tokenizer.ggml.model to be 'whitespace'" in get_rejection(document, tmp_path)


def test_a_vocabulary_size_without_matching_rows_is_rejected(tmp_path: Path) -> None:
    document = open_document("draft")
    document.set("tokenizer.ggml.model", TEXT, b"none")
    document.set("llama.vocab_size", U32, 10**7)
    assert "vocab_size is 10,000,000, its largest tensor has 288 rows" in get_rejection(document, tmp_path)


def build_charsmap(*, base: int = 0, value: int = 0, replacements: bytes = b"a\0") -> list[int]:
    """Build t5's table with 256 nodes: a root and one child with a replacement."""
    nodes = np.zeros(256, "<u4")
    nodes[0] = base << 10
    nodes[97] = 97 | 1 << 8 | 1 << 10
    nodes[96] = 1 << 31 | value
    return [int(byte) for byte in (nodes.nbytes.to_bytes(4, "little") + nodes.tobytes() + replacements)]


@pytest.mark.parametrize(
    "table",
    [
        build_charsmap(base=2**20),
        build_charsmap(value=2),
        build_charsmap(replacements=b"a"),
        build_charsmap()[:200],
        [1, 2],
    ],
)
def test_a_charsmap_with_offsets_outside_the_table_is_rejected(table: list[int], tmp_path: Path) -> None:
    document = open_document("draft")
    set_tokenizer(document, b"t5", [])
    document.set("tokenizer.ggml.precompiled_charsmap", ValueType.UINT8, *build_charsmap())
    assert inspect_document(document, tmp_path)
    document.set("tokenizer.ggml.precompiled_charsmap", ValueType.UINT8, *table)
    assert "tokenizer.ggml.precompiled_charsmap" in get_rejection(document, tmp_path)


def test_tokens_must_be_strings(tmp_path: Path) -> None:
    document = open_document("draft")
    document.set("tokenizer.ggml.tokens", U32, 1, 2)
    assert get_rejection(document, tmp_path) == (
        "tokenizer.ggml.tokens is stored as an array of UINT32, it must be an array of STRING"
    )
