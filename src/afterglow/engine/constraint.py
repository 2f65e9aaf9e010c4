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
    """A grammar in llguidance's form, and when it holds: from the start, or right after one of the texts `after`
    was written, until its end, each time anew.

    >>> Constraint(grammar='start: "yes" | "no"').after
    ()
    """

    grammar: str
    after: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.grammar, str) or not self.grammar:
            raise InvalidArgument("grammar", "must be a text that is not empty")
        if len(self.grammar) > MAX_GRAMMAR:
            raise InvalidGrammar(f"it has {len(self.grammar):,} characters, {MAX_GRAMMAR:,} are allowed")


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
            fresh = self._compiled.get(constraint.grammar)
        if fresh is None:
            fresh = llguidance.LLMatcher(self._tokenizer, constraint.grammar, log_level=0)
            if fresh.is_error():
                raise InvalidGrammar(fresh.get_error())
        with self._lock:
            self._compiled[constraint.grammar] = fresh
            self._compiled.move_to_end(constraint.grammar)
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        return Matcher(constraint, fresh, self._tokenizer, self._words)

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
        fresh: llguidance.LLMatcher,
        tokenizer: llguidance.LLTokenizer,
        words: Words,
    ) -> None:
        self._fresh = fresh
        self._tokenizer = tokenizer
        self._words = words
        self._after = constraint.after
        self._waiting = StopMatcher(constraint.after)
        self._active: llguidance.LLMatcher | None = None if constraint.after else fresh.deep_copy()

    @property
    def ended(self) -> bool:
        """Whether the answer is complete: nothing but an end may follow."""
        return self._active is not None and self._active.is_stopped() and not self._after

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
        if self._after and self._active is not None and self._active.is_stopped():
            self._active, self._waiting = None, StopMatcher(self._after)

    def _watch(self, token: int) -> None:
        """Begin the grammar where its beginning was written; what the token has beyond it belongs to it already."""
        piece = self._words.pieces[token]
        if self._waiting.feed(piece) is None:
            return
        self._active = self._fresh.deep_copy()
        beyond = piece[self._waiting.end :]
        if beyond and not self._active.consume_tokens(self._tokenizer.tokenize_bytes(beyond)):
            self._active, self._waiting = None, StopMatcher(self._after)  # it was not meant as one

    def _check(self) -> None:
        assert self._active is not None
        if self._active.is_error():
            raise InvalidGrammar(self._active.get_error())
