"""The vocabulary: what makes llama.cpp abort while it loads one, or later, on some text, while it tokenizes."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import numpy as np

from afterglow.llama.formats import ValueType
from afterglow.llama.header import Strings, decoded
from afterglow.llama.inspection.facts import Facts

ESCAPED = re.compile(rb"\\(x[0-9a-f]{2}|[^x])", re.DOTALL)
SPELLED = {b"<0x%02X>" % byte: bytes([byte]) for byte in range(256)}
WORDLESS = ("none", "no_vocab")
BYTE_PAIRS = ("gpt2", "hybriddna", "whitespace", "gemma4")
BYTE_TYPE = 6

TOKEN_BYTES = 16_384  # the longest real tokens, runs of spaces, have 1,024; tries recurse once for each byte
VOCABULARY_BYTES = 32 * 1024 * 1024  # the largest real vocabularies have 3 MiB; a trie takes a hundred times as much
SUFFIXES = 2**28  # plamo's tokenizers look for every piece of every suffix of every token

# What each tokenizer adds around a text, where the file does not say: (beginning, end), and the tokens it takes for
# them. llama.cpp aborts when it has to add one that is not there.
ADDED = {"llama": (True, False), "bert": (True, False), "t5": (False, True), "gemma4": (True, False)}
BEGINNINGS = {"llama": 1, "bert": 101, "gpt2": 11, "hybriddna": 11, "whitespace": 11, "plamo2": 1, "plamo3": 1}
ENDS = {"llama": 2, "t5": 1, "gpt2": 11, "hybriddna": 11, "whitespace": 11, "plamo2": 2, "plamo3": 2}
SEPARATORS = {"bert": 102}
UNKNOWNS = {"bert": 100, "t5": 2}


def check_tokens(facts: Facts) -> None:
    model = facts.text("tokenizer.ggml.model")
    if model is None:
        facts.fail("it has no tokenizer (tokenizer.ggml.model is missing)")
    if model in WORDLESS:
        _check_size(facts)
        return
    tokens = facts.strings("tokenizer.ggml.tokens")
    if not tokens:
        facts.fail("it has no vocabulary (tokenizer.ggml.tokens is missing or empty)")
    _check_rows(facts, len(tokens))
    _check_lengths(facts, len(tokens))
    _check_special(facts, model, len(tokens))
    _check_merges(facts, model)
    _check_texts(facts, model, tokens)
    if model == "t5":
        _check_normalizer(facts)


def _check_size(facts: Facts) -> None:
    """Without a vocabulary llama.cpp makes as many empty tokens as it is told to; each has a row somewhere."""
    claimed = facts.number(facts.own("vocab_size"))
    largest = max((size for tensor in facts.header.tensors for size in tensor.shape), default=0)
    if facts.header.split_count <= 1 and claimed > largest:
        facts.fail(f"{facts.own('vocab_size')} is {claimed:,}, its largest tensor has {largest:,} rows")


def _check_rows(facts: Facts, count: int) -> None:
    """llama.cpp says this too, but only after seconds over a vocabulary that is too large."""
    for tensor in facts.header.tensors:
        if tensor.name == "token_embd.weight" and facts.architecture != "eagle3" and tensor.shape[1:] != (count,):
            facts.fail(f"it has {count:,} tokens, but its {tensor.name} has the shape {list(tensor.shape)}")


def _check_lengths(facts: Facts, count: int) -> None:
    scores = facts.array("tokenizer.ggml.scores", ValueType.FLOAT32, ValueType.INT32)
    types = facts.array("tokenizer.ggml.token_type", ValueType.INT32)
    for what, values in (("scores", scores), ("token types", types)):
        if values is not None and len(values) != count:
            facts.fail(f"it has {len(values):,} {what} for {count:,} tokens")


def _check_special(facts: Facts, model: str, count: int) -> None:
    for key in facts.header.metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and facts.number(key) >= count:
            facts.fail(f"{key} is {facts.number(key):,}, the vocabulary has {count:,} tokens")
    for name, defaults in _needed(facts, model):
        key = f"tokenizer.ggml.{name}_token_id"
        if not facts.has(key) and defaults.get(model, count) >= count:
            facts.fail(f"its tokenizer needs a token that {key} does not name")


def _needed(facts: Facts, model: str) -> Iterator[tuple[str, dict[str, int]]]:
    """The special tokens that this tokenizer cannot do without, and where each model has them if the file is silent."""
    begins, ends = ADDED.get(model, (False, False))
    if facts.flag("tokenizer.ggml.add_bos_token", begins) or model in ("bert", "gemma4"):
        yield "bos", BEGINNINGS
    if facts.flag("tokenizer.ggml.add_eos_token", ends) and model != "bert":
        yield "eos", ENDS
    if model in SEPARATORS:
        yield "seperator", SEPARATORS  # the format's spelling
    if model in UNKNOWNS:
        yield "unknown", UNKNOWNS


def _check_merges(facts: Facts, model: str) -> None:
    pattern = facts.text("tokenizer.ggml.pre")
    if model in BYTE_PAIRS and facts.strings("tokenizer.ggml.merges") is None and pattern != "kimi-k2":
        facts.fail("its tokenizer merges pairs, but tokenizer.ggml.merges is missing")
    if pattern == "whitespace" and model == "gpt2":
        # This pattern leaves spaces in the text, and those abort in a byte-pair merge.
        facts.fail("tokenizer.ggml.pre is 'whitespace', which needs tokenizer.ggml.model to be 'whitespace'")


def _check_texts(facts: Facts, model: str, tokens: Strings) -> None:
    texts = [text or b"[EMPTY_%d]" % number for number, text in enumerate(tokens.raw())]
    longest = max(map(len, texts))
    total = sum(map(len, texts))
    if longest > TOKEN_BYTES or total > VOCABULARY_BYTES:
        facts.fail(f"its longest token has {longest:,} bytes and all together {total:,}, which no vocabulary has")
    unique = set(texts)
    if len(unique) != len(texts):
        _fail_on_repeated(facts, texts)
    if model == "llama":
        _check_bytes(facts, {SPELLED.get(text, text) for text in unique})
    elif model == "rwkv":
        # llama.cpp never ends when a text begins like a token but no token is found: each byte must be one.
        _check_bytes(facts, {_unescaped(text) for text in unique})
    elif model.startswith("plamo") and sum(len(decoded(text)) ** 3 for text in texts) > SUFFIXES:
        facts.fail(f"its tokens are too long, up to {longest:,} bytes, for a tokenizer that takes them to pieces")
    elif model == "bert":
        types = facts.array("tokenizer.ggml.token_type", ValueType.INT32)
        if types is not None and BYTE_TYPE in types:
            facts.fail("its vocabulary has byte tokens, which a word-piece tokenizer cannot write")


def _fail_on_repeated(facts: Facts, texts: list[bytes]) -> None:
    seen: dict[bytes, int] = {}
    for number, text in enumerate(texts):
        if text in seen:
            facts.fail(f"tokens {seen[text]:,} and {number:,} are the same: {text[:32]!r}")
        seen[text] = number


def _check_bytes(facts: Facts, texts: set[bytes]) -> None:
    for byte in range(256):
        if bytes([byte]) not in texts:
            facts.fail(f"its vocabulary has no token for the byte {byte:#04x}: text with it would end the process")


def _unescaped(text: bytes) -> bytes:
    """A token of RWKV's list, which writes bytes as `\\xe9`."""
    return ESCAPED.sub(lambda found: _byte(found[1]), text)


def _byte(escape: bytes) -> bytes:
    if escape[:1] == b"x":
        return bytes([int(escape[1:], 16)])
    return {b"t": b"\t", b"n": b"\n", b"r": b"\r"}.get(escape, escape)


def _check_normalizer(facts: Facts) -> None:
    """t5's table of replacements, a double array: each step from a node must land inside it."""
    stored = facts.array("tokenizer.ggml.precompiled_charsmap", ValueType.INT8, ValueType.UINT8)
    if stored is None:
        return
    table = stored.tobytes()
    size = struct.unpack_from("<I", table)[0] if len(table) >= 4 else 0
    if size == 0 or size % 4 or 4 + size >= len(table):
        facts.fail(f"tokenizer.ggml.precompiled_charsmap has {len(table):,} bytes and claims {size:,} for its nodes")
    nodes = np.frombuffer(table, "<u4", size // 4, 4)
    bases = (nodes >> 10) << ((nodes & (1 << 9)) >> 6)
    inner = nodes < 2**31
    targets = (np.arange(len(nodes), dtype=np.uint32) ^ bases)[inner] | 0xFF
    replacements = len(table) - 4 - size
    values = nodes[~inner] & (2**31 - 1)
    if np.any(targets >= len(nodes)) or np.any(values >= replacements) or table[-1] != 0:
        facts.fail("tokenizer.ggml.precompiled_charsmap points outside itself")
