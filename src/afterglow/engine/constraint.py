"""What an answer may be: a grammar, compiled by llguidance, says before each token which tokens are allowed.

Compiling is for any thread; a `Matcher` belongs to one request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import llguidance
import numpy as np
from numpy.typing import NDArray

from afterglow.engine.stops import StopMatcher
from afterglow.errors import InvalidArgument, InvalidGrammar

COMPILED = 32  # grammars that are kept compiled: agents ask for the same shapes again and again
MAX_GRAMMAR = 1024 * 1024  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A grammar in llguidance's form for the whole answer; or grammars that hold from the moment their beginning in
    `after` was written until their own end, each time anew, or `once`: then the answer ends there.

    >>> Constraint(grammar='start: "yes" | "no"').after
    ()
    """

    grammar: str = ""
    after: tuple[tuple[bytes, str], ...] = ()  # beginnings, and what follows each
    once: bool = False

    def __post_init__(self) -> None:
        if bool(self.grammar) == bool(self.after):
            raise InvalidArgument("constraint", "must be a grammar, or grammars with their beginnings")
        for grammar in (self.grammar, *(grammar for _, grammar in self.after)):
            if not isinstance(grammar, str):
                raise InvalidArgument("grammar", f"must be text, not {type(grammar).__name__}")
            if len(grammar) > MAX_GRAMMAR:
                raise InvalidGrammar(f"it has {len(grammar):,} characters, {MAX_GRAMMAR:,} are allowed")


class Words(Protocol):
    """The tokens that a grammar is made of, as a vocabulary has them."""

    @property
    def pieces(self) -> Sequence[bytes]: ...
    @property
    def control(self) -> frozenset[int]: ...
    @property
    def ends(self) -> frozenset[int]: ...
    def tokenize(self, text: bytes) -> list[int]: ...


class Compiler:
    """Makes matchers for one vocabulary."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def compile(self, constraint: Constraint) -> Matcher:
        """`InvalidGrammar` says where and why it cannot be."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_words()
        beginnings = constraint.after or ((b"", constraint.grammar),)
        grammars = {beginning: self._compile_one(grammar) for beginning, grammar in beginnings}
        return Matcher(constraint, grammars, self._tokenizer, self._words)

    def _compile_one(self, grammar: str) -> llguidance.LLMatcher:
        assert self._tokenizer is not None
        with self._lock:
            fresh = self._compiled.get(grammar)
        if fresh is None:
            fresh = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            if fresh.is_error():
                raise InvalidGrammar(fresh.get_error())
        with self._lock:
            self._compiled[grammar] = fresh
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        return fresh

    def _read_words(self) -> llguidance.LLTokenizer:
        words = self._words
        if not words.ends:
            raise InvalidGrammar("the model has no token that ends an answer")
        return llguidance.LLTokenizer(_Wrapped(words), eos_token=sorted(words.ends))


class _Wrapped(llguidance.TokenizerWrapper):
    """A vocabulary as llguidance reads it: control tokens begin with a byte that no text has."""

    is_tokenizer_wrapper = True

    def __init__(self, words: Words) -> None:
        self.eos_token_id = min(words.ends)
        self.bos_token_id = None
        self.special_token_ids = sorted(words.control)
        self.tokens = [b"\xff" + piece if token in words.control else piece for token, piece in enumerate(words.pieces)]
        self._tokenize = words.tokenize

    def __call__(self, text: str) -> list[int]:
        return self._tokenize(text.encode())


class Matcher:
    """Where an answer stands in its grammar."""

    def __init__(
        self,
        constraint: Constraint,
        grammars: dict[bytes, llguidance.LLMatcher],
        tokenizer: llguidance.LLTokenizer,
        words: Words,
    ) -> None:
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._words = words
        self._comes_back = bool(constraint.after) and not constraint.once
        self._active: llguidance.LLMatcher | None = None
        if constraint.grammar:
            self._active = grammars[b""].deep_copy()
        else:
            self._wait()

    @property
    def ended(self) -> bool:
        """Whether the answer is complete: nothing but an end may follow."""
        return self._active is not None and self._active.is_stopped() and not self._comes_back

    def allowed(self) -> NDArray[np.intp] | None:
        """The tokens that may be next; None: all of them."""
        if self._active is None:
            return None
        bits = np.frombuffer(self._active.compute_bitmask(), np.uint8)
        self._check()
        tokens = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(self._words.pieces)])
        if not len(tokens):
            raise InvalidGrammar("no token of this model continues it here")
        return tokens

    def permits(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, one after the other, may be next. Nothing is accepted."""
        return len(tokens) if self._active is None else self._active.validate_tokens(list(tokens))

    def accept(self, token: int) -> None:
        """`token` was kept."""
        if self._active is None:
            self._watch(token)
        elif not self._active.consume_token(token):
            self._check()
            raise InvalidGrammar(f"token {token} is not allowed here")
        if self._comes_back and self._active is not None and self._active.is_stopped():
            self._wait()

    def _wait(self) -> None:
        self._active, self._waiting = None, StopMatcher(list(self._grammars))

    def _watch(self, token: int) -> None:
        """Begin the grammar where its beginning was written; what the token has beyond it belongs to it already."""
        piece = self._words.pieces[token]
        if (beginning := self._waiting.feed(piece)) is None:
            return
        self._active = self._grammars[beginning].deep_copy()
        beyond = piece[self._waiting.end :]
        if beyond and not self._active.consume_tokens(self._tokenizer.tokenize_bytes(beyond)):
            self._wait()  # it was not meant as one

    def _check(self) -> None:
        assert self._active is not None
        if self._active.is_error():
            raise InvalidGrammar(self._active.get_error())
