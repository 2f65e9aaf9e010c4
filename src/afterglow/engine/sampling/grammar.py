"""What an answer may be: a grammar, compiled by llguidance, says before each token which tokens are allowed.

Compiling is for any thread; a `Matcher` belongs to one request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import llguidance
import numpy as np
from numpy.typing import NDArray

from afterglow.engine.sampling.stops import StopMatcher
from afterglow.engine.types.constraints import GrammarConstraint, TokenBytes
from afterglow.errors import InvalidGrammar

MAX_COMPILED_GRAMMARS = 32  # grammars that are kept compiled: agents ask for the same shapes again and again


class GrammarCompiler:
    """Makes matchers for one vocabulary."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def compile(self, constraint: GrammarConstraint) -> GrammarMatcher:
        """`InvalidGrammar` says where and why it cannot be."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._build_tokenizer()
        beginnings = constraint.triggers or ((b"", constraint.grammar),)
        grammars = {beginning: self._compile_grammar(grammar) for beginning, grammar in beginnings}
        return GrammarMatcher(constraint, grammars, self._tokenizer, self._token_bytes)

    def _compile_grammar(self, grammar: str) -> llguidance.LLMatcher:
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
            if len(self._compiled) > MAX_COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
        return fresh

    def _build_tokenizer(self) -> llguidance.LLTokenizer:
        words = self._token_bytes
        if not words.eog_tokens:
            raise InvalidGrammar("the model has no token that ends an answer")
        return llguidance.LLTokenizer(_TokenizerAdapter(words), eos_token=sorted(words.eog_tokens))


class _TokenizerAdapter(llguidance.TokenizerWrapper):
    """A vocabulary as llguidance reads it: control tokens begin with a byte that no text has."""

    is_tokenizer_wrapper = True

    def __init__(self, token_bytes: TokenBytes) -> None:
        self.eos_token_id = min(token_bytes.eog_tokens)
        self.bos_token_id = None
        self.special_token_ids = sorted(token_bytes.control_tokens)
        self.tokens = [
            b"\xff" + piece if token in token_bytes.control_tokens else piece
            for token, piece in enumerate(token_bytes.pieces)
        ]
        self._tokenize = token_bytes.tokenize

    def __call__(self, text: str) -> list[int]:
        return self._tokenize(text.encode())


class GrammarMatcher:
    """Where an answer stands in its grammar."""

    def __init__(
        self,
        constraint: GrammarConstraint,
        grammars: dict[bytes, llguidance.LLMatcher],
        tokenizer: llguidance.LLTokenizer,
        token_bytes: TokenBytes,
    ) -> None:
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        self._is_repeating = bool(constraint.triggers) and not constraint.stop_after_first
        self._active: llguidance.LLMatcher | None = None
        if constraint.grammar:
            self._active = grammars[b""].deep_copy()
        else:
            self._wait_for_trigger()

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete: nothing but an end may follow."""
        return self._active is not None and self._active.is_stopped() and not self._is_repeating

    def get_allowed_tokens(self) -> NDArray[np.intp] | None:
        """The tokens that may be next; None: all of them."""
        if self._active is None:
            return None
        bits = np.frombuffer(self._active.compute_bitmask(), np.uint8)
        self._raise_on_error()
        tokens = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(self._token_bytes.pieces)])
        if not len(tokens):
            raise InvalidGrammar("no token of this model continues it here")
        return tokens

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, one after the other, may be next. Nothing is accepted."""
        return len(tokens) if self._active is None else self._active.validate_tokens(list(tokens))

    def accept(self, token: int) -> None:
        """`token` was kept."""
        if self._active is None:
            self._match_trigger(token)
        elif not self._active.consume_token(token):
            self._raise_on_error()
            raise InvalidGrammar(f"token {token} is not allowed here")
        if self._is_repeating and self._active is not None and self._active.is_stopped():
            self._wait_for_trigger()

    def _wait_for_trigger(self) -> None:
        self._active, self._trigger_matcher = None, StopMatcher(list(self._grammars))

    def _match_trigger(self, token: int) -> None:
        """Begin the grammar where its beginning was written; what the token has beyond it belongs to it already."""
        piece = self._token_bytes.pieces[token]
        if (beginning := self._trigger_matcher.feed(piece)) is None:
            return
        self._active = self._grammars[beginning].deep_copy()
        beyond = piece[self._trigger_matcher.match_end :]
        if beyond and not self._active.consume_tokens(self._tokenizer.tokenize_bytes(beyond)):
            self._wait_for_trigger()  # it was not meant as one

    def _raise_on_error(self) -> None:
        assert self._active is not None
        if self._active.is_error():
            raise InvalidGrammar(self._active.get_error())
