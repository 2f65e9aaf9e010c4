"""Limits of JSON text that a grammar cannot express: unique array items, and numbers of bounded length.

Both remove tokens from those that the grammar allows, and never all of them unless the schema has no instance. Unique
items are found among items with numbers of bounded length: no item gets another value only by digits without end.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from afterglow.engine.types.constraints import UNIQUE_ITEM_PLACEHOLDER, TokenBytes, describe_grammar_error
from afterglow.errors import InvalidGrammar

WHITESPACE, DIGITS = b" \t\n\r", b"0123456789"
MAX_INTEGER = 2**63 - 1
MAX_INTEGER_DIGITS, MAX_FRACTION_DIGITS, MAX_EXPONENT_DIGITS = 19, 17, 2
NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_START, NUMBER_BYTES = b"-" + DIGITS, b"+-.eE" + DIGITS
NEVER_AFTER_NUMBER = b'"/:_xA'  # bytes that follow no number, in JSON and in the formats of tool calls
NUMBER_END = re.compile(rb"((?<=[0-9])(?:\.|[eE][+-]?)|)([0-9]*)$")  # matches every text
ZERO_WITH_EXPONENT = re.compile(rb"-?0(\.0*)?[eE]0*")
MAX_SEARCH_NODES = 400  # per step, to find out which tokens leave only repetitions: about 0.1 s
MAX_TOKENS_TO_TRY = 256  # of more tokens, only those that look like the end or a part of an item are tried
ITEM_INDENTS = (b"", b" ", b"\n", b"\n ", b"\n  ", b"\n    ", b"\n\t")

# A schema whose only instance is a text that no other JSON of a grammar contains: \u escapes are not allowed in it.
PROBE_TEXT = b'{"\\u0001":1}'
FREE_TEXT = b"@@"  # follows no item of JSON
PROBE_SCHEMA = {
    "type": "object", "properties": {"\x01": {"const": 1}}, "required": ["\x01"], "additionalProperties": False,
}  # fmt: skip


def build_probe_grammar(grammar: str) -> str | None:
    """Return the grammar that also allows `PROBE_TEXT` as an item of arrays with unique items; None if it has none."""
    placeholder, probe = json.dumps(UNIQUE_ITEM_PLACEHOLDER), json.dumps(PROBE_SCHEMA)
    quoted_placeholder, quoted_probe = json.dumps(placeholder)[1:-1], json.dumps(probe)[1:-1]
    if placeholder not in grammar and quoted_placeholder not in grammar:
        return None
    return grammar.replace(placeholder, probe).replace(quoted_placeholder, quoted_probe)


class PieceIndex:
    """Properties of the tokens of a vocabulary that JSON limits need. Control tokens have no text."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self.pieces: Sequence[bytes] = [
            b"" if token in token_bytes.control_tokens else piece for token, piece in enumerate(token_bytes.pieces)
        ]

    @cached_property
    def leading_digits(self) -> NDArray[np.intp]:
        return np.array([len(piece) - len(piece.lstrip(DIGITS)) for piece in self.pieces], np.intp)

    @cached_property
    def tokens(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self.pieces) if piece}

    @cached_property
    def quotes(self) -> NDArray[np.intp]:
        return np.array([piece.count(b'"') for piece in self.pieces], np.intp)

    @cached_property
    def ends_string_and_more(self) -> NDArray[np.bool_]:
        """Tokens that may end a string and begin the next item."""
        return np.array([b'"' in piece and (b"," in piece or piece.count(b'"') > 1) for piece in self.pieces], bool)

    @cached_property
    def has_closing(self) -> NDArray[np.bool_]:
        return np.array([b"}" in piece or b"]" in piece for piece in self.pieces], bool)

    @cached_property
    def is_whitespace(self) -> NDArray[np.bool_]:
        return np.array([bool(piece) and not piece.strip(WHITESPACE) for piece in self.pieces], bool)

    @cached_property
    def sorted_pieces(self) -> tuple[list[bytes], list[int]]:
        order = sorted(range(len(self.pieces)), key=self.pieces.__getitem__)
        return [self.pieces[token] for token in order], order

    def find_prefixed(self, prefix: bytes) -> list[int]:
        """Return the tokens whose text begins with `prefix`."""
        pieces, order = self.sorted_pieces
        start = bisect_left(pieces, prefix)
        end = start
        while end < len(pieces) and pieces[end].startswith(prefix):
            end += 1
        return order[start:end]

    def find_single_bytes(self, texts: bytes) -> list[int]:
        """Return the tokens of single bytes."""
        return [self.tokens[bytes([code])] for code in texts if bytes([code]) in self.tokens]

    def drop_long_numbers(self, tokens: NDArray[np.intp], text: bytes) -> NDArray[np.intp]:
        """Return the tokens without digits that would make the number at the end of a text too long.

        All tokens if no other ones are left: the grammar wants a longer number.
        """
        end = NUMBER_END.search(text)
        if end is None or not end[0]:
            return tokens
        separator, digits = end.groups()
        limit = {b"": MAX_INTEGER_DIGITS, b".": MAX_FRACTION_DIGITS}.get(separator, MAX_EXPONENT_DIGITS)
        missing = max(0, limit - len(digits))
        counts = self.leading_digits[tokens]
        is_kept = counts <= missing
        if not separator and missing:
            for position in np.flatnonzero(counts == missing):
                is_kept[position] = int(digits + self.pieces[tokens[position]][:missing]) <= MAX_INTEGER
        return tokens[is_kept] if is_kept.any() else tokens

    def prepare(self, *, unique_items: bool) -> None:
        """Compute what the limiters need, on the thread that compiles grammars."""
        names = ("quotes", "ends_string_and_more", "has_closing", "is_whitespace", "sorted_pieces")
        for name in ("leading_digits", "tokens", *(names if unique_items else ())):
            getattr(self, name)


class NumberLimiter:
    """Ends numbers that get too long: models may otherwise generate digits until `max_tokens`.

    It follows the quotes of the text to know where strings are. `preceding` is text before the grammar, of a trigger.
    """

    def __init__(self, index: PieceIndex, preceding: bytes = b"") -> None:
        self._index = index
        self._text_tokens = index.find_single_bytes(NEVER_AFTER_NUMBER)
        self._minus, self._newline = index.find_single_bytes(b"-"), index.find_single_bytes(b"\n")
        self._tail = b""
        self._in_string = self._is_escaped = False
        self._read(preceding)

    def feed(self, token: int) -> None:
        """Advance by a token of the completion."""
        piece = self._index.pieces[token]
        if not piece:  # a control token is in no string
            self._in_string = self._is_escaped = False
        self._read(piece)

    def _read(self, text: bytes) -> None:
        self._tail = (self._tail + text)[-64:]
        for code in text:
            self._in_string, self._is_escaped = read_string_byte(bytes([code]), self._in_string, self._is_escaped)

    def restrict(self, tokens: NDArray[np.intp], matcher: llguidance.LLMatcher) -> NDArray[np.intp]:
        """Return the allowed tokens without digits that would make the current number too long."""
        if self._in_string and has_any(tokens, self._newline):  # the quote was in text outside of JSON
            self._in_string = self._is_escaped = False
        if self._in_string:
            return tokens
        others = self._index.drop_long_numbers(tokens, self._tail)
        if len(others) < len(tokens) and self._is_in_other_text(tokens):
            return tokens
        return others

    def _is_in_other_text(self, tokens: NDArray[np.intp]) -> bool:
        """Return whether the end of the text looks like a number outside of JSON, as in an unquoted argument."""
        return has_any(tokens, self._text_tokens + (self._minus if self._tail[-1:] in DIGITS else []))


@dataclass(slots=True)
class ItemReader:
    """Reads the items of one array, byte by byte."""

    values: frozenset[Any] = frozenset()  # of the items before the current one
    texts: tuple[bytes, ...] = ()
    text: bytes = b""  # of the current item, without white space around its tokens; complete numbers are normalized
    number_start: int | None = None  # position in `text` of a number that may go on
    depth: int = 0
    in_string: bool = False
    is_escaped: bool = False
    is_complete: bool = False
    has_duplicate: bool = False
    is_closed: bool = False

    def feed(self, piece: bytes) -> int:
        """Read until the array is closed or an item equals another one. Return the number of bytes read."""
        for count, code in enumerate(piece, 1):
            self._feed_byte(bytes([code]))
            if self.is_closed or self.has_duplicate:
                return count
        return len(piece)

    def _feed_byte(self, byte: bytes) -> None:
        if self.in_string:
            self._feed_string(byte)
            return
        if self.number_start is not None and byte not in NUMBER_BYTES:
            self.text = self.text[: self.number_start] + normalize_number(self.number)
            self.number_start = None
        is_separator = byte in WHITESPACE or byte in b",]"
        if self.depth == 0 and is_separator:
            if self.text and not self.is_complete:
                self._complete()
            if byte == b"]":
                self.is_closed = True
            elif byte == b"," and not self.has_duplicate:
                self.values, self.texts = self.values | {parse_value(self.text)}, (*self.texts, self.text)
                self.text, self.is_complete = b"", False
        elif self.number_start is not None or byte in NUMBER_START:
            self._feed_number(byte)
        elif byte not in WHITESPACE:
            self.text += byte
            self.in_string = byte == b'"'
            self.depth += (byte in b"{[") - (byte in b"}]")
            if self.depth == 0 and byte in b"}]":
                self._complete()

    def _feed_string(self, byte: bytes) -> None:
        self.text += byte
        self.in_string, self.is_escaped = read_string_byte(byte, self.in_string, self.is_escaped)
        if not self.in_string and self.depth == 0:
            self._complete()

    def _feed_number(self, byte: bytes) -> None:
        if self.number_start is None:
            self.number_start = len(self.text)
        elif ZERO_WITH_EXPONENT.fullmatch(self.number):  # zero with every exponent
            byte = b"0" if byte in DIGITS else b""
        self.text += byte

    def _complete(self) -> None:
        self.is_complete = True
        self.has_duplicate = parse_value(self.text) in self.values

    @property
    def number(self) -> bytes:
        """The number that may go on; empty if there is none."""
        return b"" if self.number_start is None else self.text[self.number_start :]

    @property
    def may_become_duplicate(self) -> bool:
        """Whether the current item may still become equal to another one."""
        if self.is_complete or self.is_closed:
            return False
        return any(text.startswith(self.text) for text in self.texts) or self._has_equal_number()

    def _has_equal_number(self) -> bool:
        """Whether an earlier item has the same text before the current number, and an equal number there."""
        if self.number_start is None:
            return False
        prefix, is_complete = self.text[: self.number_start], self.number[-1:] in DIGITS
        number = normalize_number(self.number) if is_complete else None
        found = (NUMBER.match(text, len(prefix)) for text in self.texts if text.startswith(prefix))
        return any(other is not None and number in (None, other[0]) for other in found)


def read_string_byte(byte: bytes, in_string: bool, is_escaped: bool) -> tuple[bool, bool]:
    """Return whether JSON text is in a string after a byte, and whether the next byte there is escaped.

    >>> read_string_byte(b'"', True, False), read_string_byte(b'"', True, True)
    ((False, False), (True, False))
    """
    if not in_string:
        return byte == b'"', False
    return byte != b'"' or is_escaped, byte == b"\\" and not is_escaped


def normalize_number(text: bytes) -> bytes:
    """Return a number as text that is the same for equal numbers. Fractions have the precision of 64-bit floats.

    >>> normalize_number(b"-0.0"), normalize_number(b"1.50e1"), normalize_number(b"0.10000000000000000001")
    (b'0', b'15', b'0.1')
    """
    try:
        value = json.loads(text)
    except ValueError:  # more digits than Python converts
        return text
    if value == 0 or isinstance(value, int):
        return b"%d" % value
    written = f"{Decimal(repr(value)):f}"
    return written.removesuffix(".0").encode()


def parse_value(text: bytes) -> Any:
    """Return a hashable value that is equal for equal JSON values; the text if it is no JSON or nested too deeply.

    >>> parse_value(b"[1, true]") == parse_value(b"[1.0,true]")
    True
    """
    try:
        return _freeze(json.loads(text))
    except (ValueError, RecursionError):
        return ("text", text)


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return ("object", frozenset((key, _freeze(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("array", *map(_freeze, value))
    return ("number" if type(value) in (int, float) else type(value).__name__, value)


class UniqueItemLimiter:
    """Keeps the items of `uniqueItems` arrays different. A second matcher, of the probe grammar, finds these arrays."""

    def __init__(self, index: PieceIndex, tokenizer: llguidance.LLTokenizer, probe: llguidance.LLMatcher) -> None:
        self._index, self._tokenizer, self._probe = index, tokenizer, probe
        self._probe_tokens = tokenizer.tokenize_bytes(PROBE_TEXT)
        self._free_tokens = tokenizer.tokenize_bytes(PROBE_TEXT + FREE_TEXT)
        self._reader: ItemReader | None = None
        self._nodes_left = 0
        self._open_items: dict[tuple[int, bytes], bool] = {}  # starts of items of this array that have other values

    def feed(self, token: int) -> None:
        """Advance by a token of the completion."""
        piece = self._index.pieces[token]
        if b"[" not in piece:
            self._consume([token])
            self._feed_items(piece)
            return
        while piece:
            start = piece.find(b"[") + 1 or len(piece)
            self._consume(self._tokenizer.tokenize_bytes(piece[:start]))
            is_outside = self._feed_items(piece[:start])
            if is_outside and piece[start - 1 : start] == b"[" and self._is_before_unique_item():
                self._reader, self._open_items = ItemReader(), {}
            piece = piece[start:]

    def _feed_items(self, piece: bytes) -> bool:
        """Return whether the text is outside of arrays with unique items after this piece."""
        if self._reader is not None:
            self._reader.feed(piece)
            if self._reader.is_closed:
                self._reader = None
        return self._reader is None

    def _is_before_unique_item(self) -> bool:
        if self._probe.validate_tokens(self._probe_tokens) < len(self._probe_tokens):
            return False
        return bool(self._probe.validate_tokens(self._free_tokens) < len(self._free_tokens))  # JSON, not prose

    def _consume(self, tokens: list[int]) -> None:
        if not self._probe.consume_tokens(tokens):
            error = describe_grammar_error(self._probe.get_error())
            raise InvalidGrammar(f"its array items cannot be told apart: {error}")

    def restrict(self, tokens: NDArray[np.intp], matcher: llguidance.LLMatcher) -> NDArray[np.intp]:
        """Return the allowed tokens without those that repeat an item, or that leave only repetitions."""
        if self._reader is None:
            return tokens
        dead_ends: set[tuple[int, bytes]] = set()
        self._nodes_left = MAX_SEARCH_NODES
        suspects = self._find_suspects(tokens, self._reader)
        results = {token: self._may_follow(token, self._reader, matcher, dead_ends) for token in suspects}
        certain = tokens[~np.isin(tokens, [token for token, may_follow in results.items() if may_follow is not True])]
        if len(certain):
            return certain
        return np.array([token for token, may_follow in results.items() if may_follow is None], np.intp)

    def _find_suspects(self, tokens: NDArray[np.intp], reader: ItemReader) -> list[int]:
        """Return the tokens that may complete an item or continue the text of an earlier one."""
        if len(tokens) <= MAX_TOKENS_TO_TRY:
            return [int(token) for token in tokens]
        index = self._index
        endings = [text[len(reader.text) :] for text in reader.texts if text.startswith(reader.text)]
        found: set[int] = set()
        if reader.in_string and reader.depth == 0:
            found.update(tokens[index.ends_string_and_more[tokens]].tolist())
            found.update(token for ending in endings for token in index.find_prefixed(ending))
        elif reader.depth:
            found.update(tokens[index.has_closing[tokens]].tolist())
        else:
            found.update(tokens[(index.quotes[tokens] != 1) | index.has_closing[tokens]].tolist())
        for ending in endings:
            for indent in (b"",) if reader.text else ITEM_INDENTS:
                for end in range(1, len(ending) + 1):
                    token = index.tokens.get(indent + ending[:end])
                    found.update([] if token is None else [token])
        allowed = np.zeros(len(index.pieces), bool)
        allowed[tokens] = True
        return [token for token in found if allowed[token]]

    def _may_follow(
        self, token: int, reader: ItemReader, matcher: llguidance.LLMatcher, dead_ends: set[tuple[int, bytes]]
    ) -> bool | None:
        """Whether the array can be completed after this token without a repetition. Tries the shortest ways first.

        None if the search took too many nodes: such a token is allowed only if no other one certainly is.
        """
        pending = deque([(token, reader, matcher)])
        visited = set(dead_ends)
        while pending:
            token, reader, matcher = pending.popleft()
            after = replace(reader)
            after.feed(self._index.pieces[token])
            if after.has_duplicate:
                continue
            if not after.may_become_duplicate:
                return True
            key = (len(after.texts), after.text)
            if key in visited:
                continue
            if self._open_items.get(key):
                return True
            visited.add(key)
            if self._nodes_left == 0:
                return None
            self._nodes_left -= 1
            position = matcher.deep_copy()
            position.consume_token(token)
            tokens = get_allowed_tokens(position, len(self._index.pieces))
            tokens = tokens[~self._index.is_whitespace[tokens]]
            tokens = self._index.drop_long_numbers(tokens, after.number)
            suspects = self._find_suspects(tokens, after)
            if len(suspects) < len(tokens):
                # Whether there is another item depends on the number of items, not on what they are.
                self._open_items[key] = after.text in (b"", b'"')
                return True
            pending.extend((suspect, after, position) for suspect in suspects)
        dead_ends |= visited
        return False


def has_any(tokens: NDArray[np.intp], wanted: Sequence[int]) -> bool:
    """Return whether an ascending array contains any of a few tokens.

    >>> has_any(np.array([2, 5]), [3, 5]), has_any(np.array([2, 5]), [3, 6])
    (True, False)
    """
    return bool((np.searchsorted(tokens, wanted) < np.searchsorted(tokens, wanted, "right")).any())


def get_allowed_tokens(matcher: llguidance.LLMatcher, token_count: int) -> NDArray[np.intp]:
    """Return the tokens that a grammar allows next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")[:token_count])
