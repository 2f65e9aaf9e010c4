"""Texts and grammars: whether a grammar accepts a text, and random texts of a grammar, as the engine would see them."""

from __future__ import annotations

from random import Random

from afterglow.engine.sampling.grammar import GrammarCompiler
from afterglow.engine.types.constraints import GrammarConstraint

CLOSING = tuple(b'"}],:')


class PieceVocabulary:
    """One token per byte, an end token, and tokens of several bytes."""

    end_token = 256
    eog_tokens = control_tokens = frozenset({end_token})

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = (*(bytes([value]) for value in range(256)), b"<|end|>", *pieces)

    def tokenize(self, text: bytes) -> list[int]:
        return list(text)


BYTES = GrammarCompiler(PieceVocabulary())
# Tokens that begin, end or contain several JSON values at once, as tokens of real vocabularies do.
MERGED_VOCABULARY = PieceVocabulary(
    *(b'", "', b'","', b'["', b'"]', b'"a"', b'"a","a"', b'a",', b'a"', b", ", b"12", b"1,", b"1, 1", b"1,1,", b"123"),
    *(b"},{", b"}, {", b"[{", b"}]", b'"red', b'"red"', b"red", b"true,", b"true,true]", b'": ', b"[[", b"],[", b"[1"),
)
MERGED = GrammarCompiler(MERGED_VOCABULARY)


def accepts(grammar: str, text: str) -> bool:
    """Return whether the grammar allows the text, byte by byte, and its end."""
    matcher = BYTES.compile(GrammarConstraint(grammar=grammar))
    data = text.encode("utf-8", "surrogatepass")
    if matcher.count_allowed(list(data)) < len(data):
        return False
    for byte in data:  # limits of JSON text come in addition
        if matcher.is_finished or byte not in matcher.get_allowed_tokens():
            return False
        matcher.accept(byte)
    return matcher.is_finished or PieceVocabulary.end_token in matcher.get_allowed_tokens()


def generate(
    grammar: str, random: Random, compiler: GrammarCompiler = BYTES, max_tokens: int = 2000, closing: float = 0.4
) -> str | None:
    """Return a random text of the grammar; None if it is longer than `max_tokens`."""
    matcher = compiler.compile(GrammarConstraint(grammar=grammar))
    text = b""
    for _ in range(max_tokens):
        if matcher.is_finished:
            return text.decode()
        allowed = matcher.get_allowed_tokens()
        if random.random() < closing:
            preferred = [token for token in (*CLOSING, PieceVocabulary.end_token) if token in allowed]
            allowed = preferred or allowed
        # Whole characters only: a random walk through bytes is almost never UTF-8.
        ascii_tokens = [token for token in allowed if token < 128 or token >= PieceVocabulary.end_token]
        token = int(random.choice(ascii_tokens or list(allowed)))
        if token == PieceVocabulary.end_token:
            return text.decode()
        matcher.accept(token)
        text += MERGED_VOCABULARY.pieces[token]  # the first of them are those of the bytes
    return None
