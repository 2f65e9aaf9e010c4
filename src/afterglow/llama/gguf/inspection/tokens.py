"""Checks the vocabulary for everything that makes llama.cpp abort while it loads it, or later while it tokenizes."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import numpy as np

from afterglow.llama.gguf.formats import ValueType
from afterglow.llama.gguf.header import StringArray, decode_string
from afterglow.llama.gguf.inspection.metadata import MetadataReader

ESCAPE_SEQUENCE = re.compile(rb"\\(x[0-9a-f]{2}|[^x])", re.DOTALL)
BYTE_TOKENS = {b"<0x%02X>" % byte: bytes([byte]) for byte in range(256)}
MODELS_WITHOUT_VOCABULARY = ("none", "no_vocab")
BPE_MODELS = ("gpt2", "hybriddna", "whitespace", "gemma4")
BYTE_TOKEN_TYPE = 6

MAX_TOKEN_BYTES = 16_384  # the longest real tokens, runs of spaces, have 1,024; tries recurse once per byte
MAX_VOCABULARY_BYTES = 32 * 1024 * 1024  # the largest real ones have 3 MiB; a trie takes a hundred times as much
MAX_SUFFIX_PIECES = 2**28  # plamo's tokenizers look up every piece of every suffix of every token

# Defaults of each tokenizer if the file does not set them: whether it adds (BOS, EOS) to a text, and the token ids.
# llama.cpp aborts if it has to add a token that does not exist.
DEFAULT_ADD_BOS_EOS = {"llama": (True, False), "bert": (True, False), "t5": (False, True), "gemma4": (True, False)}
DEFAULT_BOS_TOKENS = {"llama": 1, "bert": 101, "gpt2": 11, "hybriddna": 11, "whitespace": 11, "plamo2": 1, "plamo3": 1}
DEFAULT_EOS_TOKENS = {"llama": 2, "t5": 1, "gpt2": 11, "hybriddna": 11, "whitespace": 11, "plamo2": 2, "plamo3": 2}
DEFAULT_SEP_TOKENS = {"bert": 102}
DEFAULT_UNK_TOKENS = {"bert": 100, "t5": 2}


def check_tokens(metadata: MetadataReader) -> None:
    model = metadata.get_string("tokenizer.ggml.model")
    if model is None:
        metadata.fail("it has no tokenizer (tokenizer.ggml.model is missing)")
    if model in MODELS_WITHOUT_VOCABULARY:
        _check_vocabulary_size(metadata)
        return
    tokens = metadata.get_strings("tokenizer.ggml.tokens")
    if not tokens:
        metadata.fail("it has no vocabulary (tokenizer.ggml.tokens is missing or empty)")
    _check_embedding_rows(metadata, len(tokens))
    _check_array_lengths(metadata, len(tokens))
    _check_special_tokens(metadata, model, len(tokens))
    _check_merges(metadata, model)
    _check_token_texts(metadata, model, tokens)
    if model == "t5":
        _check_normalizer(metadata)


def _check_vocabulary_size(metadata: MetadataReader) -> None:
    """Check the number of empty tokens that llama.cpp creates without a vocabulary: each needs a row in a tensor."""
    claimed = metadata.get_uint32(metadata.build_key("vocab_size"))
    largest = max((size for tensor in metadata.header.tensors for size in tensor.shape), default=0)
    if metadata.header.split_count <= 1 and claimed > largest:
        metadata.fail(f"{metadata.build_key('vocab_size')} is {claimed:,}, its largest tensor has {largest:,} rows")


def _check_embedding_rows(metadata: MetadataReader, count: int) -> None:
    """Check the rows of the embedding table. llama.cpp does too, but only after seconds if the vocabulary is large."""
    for tensor in metadata.header.tensors:
        if tensor.name == "token_embd.weight" and metadata.architecture != "eagle3" and tensor.shape[1:] != (count,):
            metadata.fail(f"it has {count:,} tokens, but its {tensor.name} has the shape {list(tensor.shape)}")


def _check_array_lengths(metadata: MetadataReader, count: int) -> None:
    scores = metadata.get_array("tokenizer.ggml.scores", ValueType.FLOAT32, ValueType.INT32)
    types = metadata.get_array("tokenizer.ggml.token_type", ValueType.INT32)
    for label, values in (("scores", scores), ("token types", types)):
        if values is not None and len(values) != count:
            metadata.fail(f"it has {len(values):,} {label} for {count:,} tokens")


def _check_special_tokens(metadata: MetadataReader, model: str, count: int) -> None:
    for key in metadata.header.metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and metadata.get_uint32(key) >= count:
            metadata.fail(f"{key} is {metadata.get_uint32(key):,}, the vocabulary has {count:,} tokens")
    for name, defaults in _list_required_special_tokens(metadata, model):
        key = f"tokenizer.ggml.{name}_token_id"
        if not metadata.has_key(key) and defaults.get(model, count) >= count:
            metadata.fail(f"its tokenizer needs {key}, which is missing")


def _list_required_special_tokens(metadata: MetadataReader, model: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the special tokens that this tokenizer requires, with their default ids by tokenizer model."""
    add_bos, add_eos = DEFAULT_ADD_BOS_EOS.get(model, (False, False))
    if metadata.get_bool("tokenizer.ggml.add_bos_token", add_bos) or model in ("bert", "gemma4"):
        yield "bos", DEFAULT_BOS_TOKENS
    if metadata.get_bool("tokenizer.ggml.add_eos_token", add_eos) and model != "bert":
        yield "eos", DEFAULT_EOS_TOKENS
    if model in DEFAULT_SEP_TOKENS:
        yield "seperator", DEFAULT_SEP_TOKENS  # the format's spelling
    if model in DEFAULT_UNK_TOKENS:
        yield "unknown", DEFAULT_UNK_TOKENS


def _check_merges(metadata: MetadataReader, model: str) -> None:
    pattern = metadata.get_string("tokenizer.ggml.pre")
    if model in BPE_MODELS and metadata.get_strings("tokenizer.ggml.merges") is None and pattern != "kimi-k2":
        metadata.fail("its tokenizer is BPE, but tokenizer.ggml.merges is missing")
    if pattern == "whitespace" and model == "gpt2":
        # This pattern leaves spaces in the text, and the BPE merge aborts on spaces.
        metadata.fail("tokenizer.ggml.pre is 'whitespace', which needs tokenizer.ggml.model to be 'whitespace'")


def _check_token_texts(metadata: MetadataReader, model: str, tokens: StringArray) -> None:
    texts = [text or b"[EMPTY_%d]" % number for number, text in enumerate(tokens.iter_raw())]
    longest = max(map(len, texts))
    total = sum(map(len, texts))
    if longest > MAX_TOKEN_BYTES or total > MAX_VOCABULARY_BYTES:
        limits = f"{MAX_TOKEN_BYTES:,} and {MAX_VOCABULARY_BYTES:,}"
        metadata.fail(f"its longest token has {longest:,} bytes and all tokens {total:,}, the limits are {limits}")
    unique = set(texts)
    if len(unique) != len(texts):
        _fail_on_duplicate(metadata, texts)
    if model == "llama":
        _check_byte_coverage(metadata, {BYTE_TOKENS.get(text, text) for text in unique})
    elif model == "rwkv":
        # llama.cpp loops forever if a text starts like a token but matches none: each byte must be a token.
        _check_byte_coverage(metadata, {_unescape(text) for text in unique})
    elif model.startswith("plamo") and sum(len(decode_string(text)) ** 3 for text in texts) > MAX_SUFFIX_PIECES:
        metadata.fail(f"its tokens are too long, up to {longest:,} bytes, for the {model} tokenizer")
    elif model == "bert":
        types = metadata.get_array("tokenizer.ggml.token_type", ValueType.INT32)
        if types is not None and BYTE_TOKEN_TYPE in types:
            metadata.fail("its vocabulary has byte tokens, which a WordPiece tokenizer does not support")


def _fail_on_duplicate(metadata: MetadataReader, texts: list[bytes]) -> None:
    seen: dict[bytes, int] = {}
    for number, text in enumerate(texts):
        if text in seen:
            metadata.fail(f"tokens {seen[text]:,} and {number:,} are the same: {text[:32]!r}")
        seen[text] = number


def _check_byte_coverage(metadata: MetadataReader, texts: set[bytes]) -> None:
    for byte in range(256):
        if bytes([byte]) not in texts:
            metadata.fail(f"its vocabulary has no token for the byte {byte:#04x}: text with it would crash llama.cpp")


def _unescape(text: bytes) -> bytes:
    """Return the bytes of an RWKV token, which spells bytes as `\\xe9`."""
    return ESCAPE_SEQUENCE.sub(lambda match: _unescape_byte(match[1]), text)


def _unescape_byte(escape: bytes) -> bytes:
    if escape[:1] == b"x":
        return bytes([int(escape[1:], 16)])
    return {b"t": b"\t", b"n": b"\n", b"r": b"\r"}.get(escape, escape)


def _check_normalizer(metadata: MetadataReader) -> None:
    """Check the normalization table of t5, a double-array trie: each transition must stay inside the table."""
    stored = metadata.get_array("tokenizer.ggml.precompiled_charsmap", ValueType.INT8, ValueType.UINT8)
    if stored is None:
        return
    table = stored.tobytes()
    size = struct.unpack_from("<I", table)[0] if len(table) >= 4 else 0
    if size == 0 or size % 4 or 4 + size >= len(table):
        metadata.fail(f"tokenizer.ggml.precompiled_charsmap has {len(table):,} bytes and claims {size:,} for its nodes")
    nodes = np.frombuffer(table, "<u4", size // 4, 4)
    bases = (nodes >> 10) << ((nodes & (1 << 9)) >> 6)
    inner = nodes < 2**31
    targets = (np.arange(len(nodes), dtype=np.uint32) ^ bases)[inner] | 0xFF
    replacements = len(table) - 4 - size
    values = nodes[~inner] & (2**31 - 1)
    if np.any(targets >= len(nodes)) or np.any(values >= replacements) or table[-1] != 0:
        metadata.fail("tokenizer.ggml.precompiled_charsmap has offsets outside the table")
