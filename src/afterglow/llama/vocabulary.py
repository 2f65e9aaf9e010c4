"""Tokenization and detokenization, in bytes. A vocabulary belongs to a model and is thread-safe."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument
from afterglow.llama.checks import check_integer
from afterglow.llama.handle import Handle
from afterglow.llama.library.loader import get_library

CONTROL_OR_UNKNOWN, STRIPS_BEFORE, STRIPS_AFTER = 1 << 3 | 1 << 0, 1 << 7, 1 << 8
SPECIAL_TOKEN_NAMES = ("bos", "eos", "eot", "sep", "nl", "pad", "mask", "fim_pre", "fim_suf", "fim_mid")


class Vocabulary:
    """The tokens of a model.

    >>> model.vocabulary.detokenize(model.vocabulary.tokenize("hello"))
    b'hello'
    """

    def __init__(self, model: Handle) -> None:
        self._model = model
        self._library = get_library()
        self._pointer = self._library.symbols.llama_model_get_vocab(model.pointer)
        self.size: int = self._library.symbols.llama_vocab_n_tokens(self._pointer)
        self._piece_cache: dict[tuple[int, bool], bytes] = {}

    @property
    def pointer(self) -> Any:
        assert self._model.pointer  # raises Closed after the model was closed
        return self._pointer

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens of this model, by llama.cpp's names (`bos`, `eos`, `eot`, …)."""
        symbols = self._library.symbols
        tokens = {name: getattr(symbols, f"llama_vocab_{name}")(self.pointer) for name in SPECIAL_TOKEN_NAMES}
        return {name: token for name, token in tokens.items() if token >= 0}

    @functools.cached_property
    def eog_tokens(self) -> frozenset[int]:
        """The end-of-generation tokens."""
        is_eog = self._library.symbols.llama_vocab_is_eog
        return frozenset(token for token in range(self.size) if is_eog(self.pointer, token))

    def get_text(self, token: int) -> str:
        """Return the text of a token as stored in the file: a control token's spelling in chat templates."""
        pointer = self._library.symbols.llama_vocab_get_text(self.pointer, self.check_token(token))
        return self._library.decode_string(pointer)

    @functools.cached_property
    def control_tokens_by_text(self) -> dict[str, int]:
        """The control tokens by their spelling in chat templates."""
        attributes = self._library.symbols.llama_vocab_get_attr
        control = [token for token in range(self.size) if attributes(self.pointer, token) & CONTROL_OR_UNKNOWN]
        return {text: token for token in control if (text := self.get_text(token))}

    @functools.cached_property
    def control_tokens(self) -> frozenset[int]:
        """The control tokens."""
        return frozenset(self.control_tokens_by_text.values())

    def get_strip_flags(self, token: int) -> tuple[bool, bool]:
        """Return whether a control token strips the whitespace before it, and after it."""
        attributes = self._library.symbols.llama_vocab_get_attr(self.pointer, self.check_token(token))
        return bool(attributes & STRIPS_BEFORE), bool(attributes & STRIPS_AFTER)

    @property
    def adds_bos(self) -> bool:
        return bool(self._library.symbols.llama_vocab_get_add_bos(self.pointer))

    def tokenize(self, text: str | bytes, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """Return the token ids of `text`.

        With `parse_special`, the spelling of a control token becomes that control token. With `add_special`, the BOS
        and EOS tokens are added if the model requires them.
        """
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
        ffi, tokenize = self._library.ffi, self._library.symbols.llama_tokenize
        size = len(data) + 8
        buffer = ffi.new("llama_token[]", size)
        count = tokenize(self.pointer, data, check_integer("text", len(data)), buffer, size, add_special, parse_special)
        if count < 0:  # the buffer was too small; the result is the negated required size
            size = -count
            buffer = ffi.new("llama_token[]", size)
            count = tokenize(self.pointer, data, len(data), buffer, size, add_special, parse_special)
        if count < 0:
            raise InvalidArgument("text", f"of {len(data)} bytes could not be tokenized")
        return list(ffi.unpack(buffer, count))

    def token_to_piece(self, token: int, *, special: bool = True) -> bytes:
        """Return the bytes of one token, possibly part of a character. Control tokens are empty without `special`."""
        key = self.check_token(token), special
        assert self.pointer
        if (piece := self._piece_cache.get(key)) is None:
            piece = self._piece_cache[key] = self._read_piece(*key)
        return piece

    def _read_piece(self, token: int, special: bool) -> bytes:
        ffi, to_piece = self._library.ffi, self._library.symbols.llama_token_to_piece
        size = 64
        buffer = ffi.new("char[]", size)
        count = to_piece(self.pointer, token, buffer, size, 0, special)
        if count < 0:
            buffer = ffi.new("char[]", -count)
            count = to_piece(self.pointer, token, buffer, -count, 0, special)
        return bytes(ffi.buffer(buffer, max(count, 0)))

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of every token, including control tokens: a lookup table for streaming."""
        return [self.token_to_piece(token) for token in range(self.size)]

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> bytes:
        """Return the bytes of `tokens`. They may end inside a character."""
        return b"".join(self.token_to_piece(token, special=special) for token in tokens)

    def check_token(self, token: int) -> int:
        """Return `token`; raise `InvalidArgument` if it is not in the vocabulary, on which llama.cpp would abort."""
        return check_integer("token", token, 0, self.size - 1)

    def check_tokens(self, tokens: Iterable[int]) -> NDArray[np.int32]:
        """Return `tokens` as an array; raise `InvalidArgument` if one is not in the vocabulary."""
        try:
            array = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
        except OverflowError:
            raise InvalidArgument("tokens", f"must be from 0 to {self.size - 1}") from None
        if array.size and (array.dtype.kind not in "iu" or array.ndim != 1):
            raise InvalidArgument("tokens", "must be a flat list of integers")
        if array.size and not (int(array.min()) >= 0 and int(array.max()) < self.size):
            invalid = int(array.min()) if array.min() < 0 else int(array.max())
            raise InvalidArgument("tokens", f"must be from 0 to {self.size - 1}, not {invalid}")
        return array.astype(np.int32)

    def is_control(self, token: int) -> bool:
        """Return whether `token` is a control token, which is never part of visible text."""
        return bool(self._library.symbols.llama_vocab_is_control(self.pointer, self.check_token(token)))
