"""Tokenization and detokenization, in bytes. A vocabulary belongs to a model and is thread-safe."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument
from afterglow.llama.checks import check_integer
from afterglow.llama.deep_call import call_with_stack
from afterglow.llama.handle import Handle
from afterglow.llama.library.loader import get_library

CONTROL_OR_UNKNOWN, USER_DEFINED, STRIPS_BEFORE, STRIPS_AFTER = 1 << 3 | 1 << 0, 1 << 4, 1 << 7, 1 << 8
SPECIAL_TOKEN_NAMES = (
    *("bos", "eos", "eot", "sep", "nl", "pad", "mask"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep"),
)

# Most BPE pre-tokenizers divide a text into words with std::regex, which recurses once per character of a match: 352
# bytes of stack each. After a line break, a match continues with whitespace and slashes only, so the longest line with
# these bounds the depth. The flat pre-tokenizers are loops, or match single characters only.
FLAT_VOCABULARY_TYPES = (0, 1, 3, 4, 5, 6)  # none, SPM, WPM, UGM, RWKV and PLaMo-2: they use no std::regex
FLAT_PRE_TOKENIZERS = frozenset(
    {
        "a.x-4.0", "chatglm-bpe", "codeshell", "command-r", "dbrx", "deepseek-r1-qwen", "exaone", "exaone4", "f2llmv2",
        "falcon-h1", "falcon3", "gemma4", "gigachat", "glm4", "gpt-2", "granite-docling", "granite-embed-multi-311m",
        "grok-2", "hunyuan", "jais", "jina-de", "jina-es", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es",
        "jina-v5-nano", "kimi-k2", "kormo", "laguna", "lfm2", "llama-bpe", "llama-v3", "llama3", "megrez", "mellum",
        "mellum2", "midm-2.0", "minerva-7b", "modern-bert", "mpt", "olmo", "phi-2", "pixtral", "qwen2", "qwen35",
        "refact", "roberta-bpe", "sarvam-moe", "smaug-bpe", "smollm", "solar-open", "stablelm2", "starcoder",
        "trillion",
    }
)  # fmt: skip
STACK_BYTES_PER_CHARACTER = 1024
STACK_BASE_BYTES = 256 * 1024
MAX_LINE_CHARACTERS = 512 * 1024
LINE = re.compile(r"[^\r\n]*[\s/]*")  # with what one match may include after it, as in `[\r\n/]*`
SHORT_TEXT_CHARACTERS = 512  # fits on the stack of every thread
UNDIVIDED_TEXT_CHARACTERS = 8192  # up to here the text counts as one line, which is faster than finding the lines
# Patterns that try a run again from each of its characters: n characters take n² · 60 ns, at most four seconds.
MAX_SQUARED_RUNS = UNDIVIDED_TEXT_CHARACTERS**2
QUADRATIC_RUNS = {
    "superbpe": ("digits", re.compile(r"\d+")),
    "deepseek-llm": ("spaces", re.compile(r"[^\S\r\n]+")),
}
# Every vocabulary takes time with the square of the number of special tokens in a text: 2 to 4 seconds for this many.
MAX_SPECIAL_TOKENS = 32_768
# 4 bytes beyond U+10FFFF, on which llama.cpp throws through C. It reads other invalid bytes as U+FFFD.
INVALID_CHARACTER = re.compile(rb"(?:\xf4[\x90-\xbf]|[\xf5-\xf7][\x80-\xbf])[\x80-\xbf]{2}")
UNMERGED_CHARACTER = "\ue000"  # for private use: SPM vocabularies have it as bytes only, which no token continues


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
        is_eog, pointer = self._library.symbols.llama_vocab_is_eog, self.pointer
        return frozenset(token for token in range(self.size) if is_eog(pointer, token))

    def get_text(self, token: int) -> str:
        """Return the text of a token as stored in the file: a control token's spelling in chat templates."""
        pointer = self._library.symbols.llama_vocab_get_text(self.pointer, self.check_token(token))
        return self._library.decode_string(pointer)

    @functools.cached_property
    def control_tokens_by_text(self) -> dict[str, int]:
        """The control tokens by their spelling in chat templates."""
        return self._find_tokens(CONTROL_OR_UNKNOWN)

    @functools.cached_property
    def user_defined_tokens_by_text(self) -> dict[str, int]:
        """The tokens that every text is parsed for, by their text: runs of spaces, HTML tags, and in many files
        `<tool_call>` and `<think>`."""
        return self._find_tokens(USER_DEFINED)

    def _find_tokens(self, attributes: int) -> dict[str, int]:
        """Return the tokens that have one of the attributes, by their text."""
        get_attributes, pointer = self._library.symbols.llama_vocab_get_attr, self.pointer
        tokens = [token for token in range(self.size) if get_attributes(pointer, token) & attributes]
        return {text: token for token in tokens if (text := self.get_text(token))}

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

    @property
    def adds_eos(self) -> bool:
        return bool(self._library.symbols.llama_vocab_get_add_eos(self.pointer))

    @property
    def adds_separator(self) -> bool:
        """Whether a separator follows the first text of a pair."""
        return bool(self._library.symbols.llama_vocab_get_add_sep(self.pointer))

    def tokenize(self, text: str | bytes, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """Return the token ids of `text`.

        With `parse_special`, the spelling of a control token becomes that control token. With `add_special`, the BOS
        and EOS tokens are added if the model requires them.

        Raises `InvalidArgument` if tokenizing the text would need too much memory or time; no text crashes the process.
        """
        if isinstance(text, str):
            data = text.encode("utf-8", "surrogatepass")
        else:
            text = data = INVALID_CHARACTER.sub("\ufffd".encode(), bytes(text))
        if len(text) > UNDIVIDED_TEXT_CHARACTERS:
            self._check_special_tokens(data, parse_special)
        if len(text) <= SHORT_TEXT_CHARACTERS or self._recursive_pre_tokenizer is None:
            return self._tokenize_on_this_stack(data, parse_special, add_special)
        stack_bytes = self._bound_stack_bytes(text)
        try:
            return call_with_stack(stack_bytes, lambda: self._tokenize_on_this_stack(data, parse_special, add_special))
        except MemoryError:
            need = f"needs {stack_bytes // 1024**2:,} MiB of memory to be tokenized"
            reason = f"{need}, which the system does not provide: divide its longest line"
            raise InvalidArgument("text", reason) from None

    def tokenize_continuation(self, text: str) -> list[int]:
        """Return the token ids of a text that other text precedes: without the space that SPM vocabularies put before
        every text."""
        if not self._adds_space:
            return self.tokenize(text)
        before, tokens = self.tokenize(UNMERGED_CHARACTER), self.tokenize(UNMERGED_CHARACTER + text)
        return tokens[len(before) :] if tokens[: len(before)] == before else self.tokenize(text)

    @functools.cached_property
    def _adds_space(self) -> bool:
        """Whether a space is put before every text."""
        return self.detokenize(self.tokenize("a")).startswith(b" ")

    def _tokenize_on_this_stack(self, data: bytes, parse_special: bool, add_special: bool) -> list[int]:
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

    @functools.cached_property
    def _recursive_pre_tokenizer(self) -> str | None:
        """Name of the pre-tokenizer if the text determines how deep it recurses. Unknown ones count as recursive."""
        ffi, symbols = self._library.ffi, self._library.symbols
        if symbols.llama_vocab_type(self.pointer) in FLAT_VOCABULARY_TYPES:
            return None
        buffer = ffi.new("char[]", 64)
        symbols.llama_model_meta_val_str(self._model.pointer, b"tokenizer.ggml.pre", buffer, len(buffer))
        name = str(ffi.string(buffer).decode("utf-8", "replace"))
        return None if name in FLAT_PRE_TOKENIZERS else name

    def _bound_stack_bytes(self, text: str | bytes) -> int:
        """Return a stack size that is enough for a text; raise `InvalidArgument` if it is too large, or takes too long.

        Bytes are counted like characters in short texts, of which they are never fewer.
        """
        longest = len(text)
        if longest > UNDIVIDED_TEXT_CHARACTERS:
            text = text if isinstance(text, str) else text.decode("utf-8", "replace")
            self._check_runs(text)
            longest = max(map(_get_length, LINE.finditer(text)))
        if longest > MAX_LINE_CHARACTERS:
            limit = f"at most {MAX_LINE_CHARACTERS:,} can be tokenized"
            raise InvalidArgument("text", f"has a line of {longest:,} characters, {limit}: insert line breaks")
        return STACK_BASE_BYTES + longest * STACK_BYTES_PER_CHARACTER

    def _check_runs(self, text: str) -> None:
        """Raise `InvalidArgument` if the runs of a text would take too long."""
        if self._recursive_pre_tokenizer not in QUADRATIC_RUNS:
            return
        name, pattern = QUADRATIC_RUNS[self._recursive_pre_tokenizer]
        lengths = list(map(_get_length, pattern.finditer(text)))
        if sum(length**2 for length in lengths) > MAX_SQUARED_RUNS:
            limit = f"{max(lengths):,} {name} in a row, for which the tokenizer of this model takes too long"
            reason = f"has up to {limit}; {UNDIVIDED_TEXT_CHARACTERS:,} are possible: shorten them"
            raise InvalidArgument("text", reason)

    def _check_special_tokens(self, data: bytes, parse_special: bool) -> None:
        """Raise `InvalidArgument` if a text has so many special tokens that tokenizing it would take minutes."""
        texts = self._special_texts if parse_special else self._user_defined_texts
        if sum(map(data.count, {text[:1] for text in texts})) <= MAX_SPECIAL_TOKENS:
            return
        total = 0
        for text in texts:
            if count := data.count(text):
                total += count
                data = data.replace(text, b"\xff")
        if total > MAX_SPECIAL_TOKENS:
            reason = f"contains {total:,} special tokens, at most {MAX_SPECIAL_TOKENS:,} can be tokenized at once"
            raise InvalidArgument("text", f"{reason}: shorten it")

    @functools.cached_property
    def _user_defined_texts(self) -> list[bytes]:
        """Texts that become a token of their own even without `parse_special`, longest first as in llama.cpp."""
        return sort_texts(self.user_defined_tokens_by_text)

    @functools.cached_property
    def _special_texts(self) -> list[bytes]:
        """Texts that become a token of their own with `parse_special`, longest first as in llama.cpp."""
        return sort_texts({**self.user_defined_tokens_by_text, **self.control_tokens_by_text})

    def token_to_piece(self, token: int, *, special: bool = True) -> bytes:
        """Return the bytes of one token, possibly part of a character. Control tokens are empty without `special`."""
        token = self.check_token(token)
        key = token, special
        assert self.pointer
        if (piece := self._piece_cache.get(key)) is None:
            ffi, to_piece = self._library.ffi, self._library.symbols.llama_token_to_piece
            buffer = ffi.new("char[]", 64)
            count = to_piece(self.pointer, token, buffer, len(buffer), 0, special)
            if count < 0:
                buffer = ffi.new("char[]", -count)
                count = to_piece(self.pointer, token, buffer, -count, 0, special)
            piece = self._piece_cache[key] = bytes(ffi.buffer(buffer, max(count, 0)))
        return piece

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


def sort_texts(texts: Iterable[str]) -> list[bytes]:
    """Return texts as bytes, longest first."""
    return sorted((text.encode() for text in texts), key=len, reverse=True)


def _get_length(match: re.Match[str]) -> int:
    return match.end() - match.start()
