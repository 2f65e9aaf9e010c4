"""Is a vocabulary on which llama.cpp aborts, at once or on some text, refused?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from afterglow.llama.gguf.formats import ValueType
from support.gguf_document import Document
from support.gguf_verdict import opened, passes, refusal

U32, I32, F32, TEXT = ValueType.UINT32, ValueType.INT32, ValueType.FLOAT32, ValueType.STRING
BYTES = [b"<0x%02X>" % byte for byte in range(256)]


def speak(document: Document, model: bytes, tokens: list[bytes]) -> None:
    """Give the document another tokenizer, with as many tokens as it has rows for."""
    document.put("tokenizer.ggml.model", TEXT, model)
    fillers = (b"<%d>" % number for number in range(document.weights[0].shape[1] - len(tokens)))
    document.put("tokenizer.ggml.tokens", TEXT, *tokens, *fillers)


@pytest.mark.parametrize("name", ["draft", "embedding"])
def test_a_repeated_token_is_refused_whatever_the_tokenizer(name: str, tmp_path: Path) -> None:
    document = opened(name)
    tokens = document.entry("tokenizer.ggml.tokens")
    assert tokens
    tokens.values[40] = tokens.values[30] + b"\0 unseen by llama.cpp"
    assert "tokens 30 and 40 are the same" in refusal(document, tmp_path)


def test_an_empty_token_is_fine_but_not_the_name_llama_cpp_gives_it(tmp_path: Path) -> None:
    document = opened("draft")
    tokens = document.entry("tokenizer.ggml.tokens")
    assert tokens
    tokens.values[280] = b""
    assert passes(document, tmp_path)
    tokens.values[281] = b"[EMPTY_280]"
    assert "tokens 280 and 281 are the same: b'[EMPTY_280]'" in refusal(document, tmp_path)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("model", "no tokenizer"),
        ("tokens", "no vocabulary"),
        ("merges", "tokenizer.ggml.merges is missing"),
    ],
)
def test_a_missing_part_of_the_vocabulary_is_named(key: str, reason: str, tmp_path: Path) -> None:
    document = opened("draft")
    document.drop(f"tokenizer.ggml.{key}")
    assert reason in refusal(document, tmp_path)


def test_lists_beside_the_tokens_must_be_as_long(tmp_path: Path) -> None:
    document = opened("draft")
    document.put("tokenizer.ggml.scores", F32, 0.0, 1.0)
    assert "it has 2 scores for 288 tokens" in refusal(document, tmp_path)
    document.put("tokenizer.ggml.scores", U32, 0, 1)
    assert "it must be an array of FLOAT32 or INT32" in refusal(document, tmp_path)
    document = opened("draft")
    document.put("tokenizer.ggml.token_type", I32, 1, array=True)
    assert "it has 1 token types for 288 tokens" in refusal(document, tmp_path)


def test_tokens_and_their_rows_must_be_as_many(tmp_path: Path) -> None:
    document = opened("draft")
    tokens = document.entry("tokenizer.ggml.tokens")
    assert tokens
    tokens.values = tokens.values[:-1]
    assert "it has 287 tokens, but its token_embd.weight has the shape [32, 288]" in refusal(document, tmp_path)


def test_a_special_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    document = opened("draft")
    document.put("tokenizer.ggml.eos_token_id", U32, 288)
    assert "tokenizer.ggml.eos_token_id is 288, the vocabulary has 288 tokens" in refusal(document, tmp_path)


def test_a_special_token_that_every_text_needs_must_be_there(tmp_path: Path) -> None:
    document = opened("draft")
    document.put("tokenizer.ggml.model", TEXT, b"gemma4")
    document.drop("tokenizer.ggml.bos_token_id")
    assert "needs a token that tokenizer.ggml.bos_token_id does not name" in refusal(document, tmp_path)


def test_a_vocabulary_without_bytes_is_refused_where_they_are_the_last_resort(tmp_path: Path) -> None:
    document = opened("draft")
    speak(document, b"llama", BYTES)
    assert passes(document, tmp_path)
    speak(document, b"llama", [text for text in BYTES if text != b"<0xE9>"])
    assert "no token for the byte 0xe9" in refusal(document, tmp_path)


def test_a_vocabulary_that_would_never_end_is_refused(tmp_path: Path) -> None:
    document = opened("draft")
    escaped = [b"\\x%02x" % byte for byte in range(256)]
    speak(document, b"rwkv", [*escaped, b"the"])
    assert passes(document, tmp_path)
    speak(document, b"rwkv", [text for text in escaped if text != b"\\x74"] + [b"the"])
    assert "no token for the byte 0x74" in refusal(document, tmp_path)
    speak(document, b"rwkv", BYTES)  # another tokenizer's spelling
    assert "no token for the byte 0x00" in refusal(document, tmp_path)


def test_a_token_of_absurd_length_is_refused(tmp_path: Path) -> None:
    document = opened("draft")
    speak(document, b"gpt2", [b"x" * 20_000])
    assert "its longest token has 20,000 bytes" in refusal(document, tmp_path)
    speak(document, b"plamo2", [b"x" * 1_000])
    assert "too long, up to 1,000 bytes" in refusal(document, tmp_path)


def test_byte_tokens_among_word_pieces_are_refused(tmp_path: Path) -> None:
    document = opened("embedding")
    types = document.entry("tokenizer.ggml.token_type")
    assert types
    types.values[20] = 6
    assert "byte tokens, which a word-piece tokenizer cannot write" in refusal(document, tmp_path)


def test_a_pattern_that_leaves_spaces_is_refused(tmp_path: Path) -> None:
    document = opened("draft")
    document.put("tokenizer.ggml.pre", TEXT, b"whitespace")
    assert "needs tokenizer.ggml.model to be 'whitespace'" in refusal(document, tmp_path)


def test_empty_tokens_without_number_are_refused(tmp_path: Path) -> None:
    document = opened("draft")
    document.put("tokenizer.ggml.model", TEXT, b"none")
    document.put("llama.vocab_size", U32, 10**7)
    assert "vocab_size is 10,000,000, its largest tensor has 288 rows" in refusal(document, tmp_path)


def charsmap(*, base: int = 0, value: int = 0, replacements: bytes = b"a\0") -> list[int]:
    """t5's table with 256 nodes: a root, one child that stands for a replacement, and nothing else."""
    nodes = np.zeros(256, "<u4")
    nodes[0] = base << 10
    nodes[97] = 97 | 1 << 8 | 1 << 10
    nodes[96] = 1 << 31 | value
    return [int(byte) for byte in (nodes.nbytes.to_bytes(4, "little") + nodes.tobytes() + replacements)]


@pytest.mark.parametrize(
    "table", [charsmap(base=2**20), charsmap(value=2), charsmap(replacements=b"a"), charsmap()[:200], [1, 2]]
)
def test_a_table_of_replacements_that_leads_out_of_itself_is_refused(table: list[int], tmp_path: Path) -> None:
    document = opened("draft")
    speak(document, b"t5", [])
    document.put("tokenizer.ggml.precompiled_charsmap", ValueType.UINT8, *charsmap())
    assert passes(document, tmp_path)
    document.put("tokenizer.ggml.precompiled_charsmap", ValueType.UINT8, *table)
    assert "tokenizer.ggml.precompiled_charsmap" in refusal(document, tmp_path)


def test_tokens_that_are_no_strings_are_refused(tmp_path: Path) -> None:
    document = opened("draft")
    document.put("tokenizer.ggml.tokens", U32, 1, 2)
    assert refusal(document, tmp_path) == (
        "tokenizer.ggml.tokens is stored as an array of UINT32, it must be an array of STRING"
    )
