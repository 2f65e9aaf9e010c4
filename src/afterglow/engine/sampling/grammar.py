"""Grammar constraints: llguidance compiles a grammar and returns the allowed tokens before each sampling step.

Any thread may compile; a `GrammarMatcher` belongs to one request.
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

MAX_COMPILED_GRAMMARS = 32  # cached: agents use the same schemas again and again


class GrammarCompiler:
    """Compiles grammars for one vocabulary and caches them."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def compile(self, constraint: GrammarConstraint) -> GrammarMatcher:
        """Return a new matcher. Raise `InvalidGrammar` with the position and cause if a grammar does not compile."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._build_tokenizer()
        triggers = constraint.triggers or ((b"", constraint.grammar),)
        grammars = {trigger: self._compile_grammar(grammar) for trigger, grammar in triggers}
        return GrammarMatcher(constraint, grammars, self._tokenizer, self._token_bytes)

    def _compile_grammar(self, grammar: str) -> llguidance.LLMatcher:
        assert self._tokenizer is not None
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise InvalidGrammar(matcher.get_error())
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    def _build_tokenizer(self) -> llguidance.LLTokenizer:
        token_bytes = self._token_bytes
        if not token_bytes.eog_tokens:
            raise InvalidGrammar("the model has no end-of-generation token")
        return llguidance.LLTokenizer(_TokenizerAdapter(token_bytes), eos_token=sorted(token_bytes.eog_tokens))


class _TokenizerAdapter(llguidance.TokenizerWrapper):
    """A vocabulary in llguidance's form: control tokens begin with a byte that does not occur in text."""

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
    """Position of one completion in its grammar."""

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
            if constraint.prefix and not self._active.consume_tokens(tokenizer.tokenize_bytes(constraint.prefix)):
                raise InvalidGrammar(f"no text that it allows begins with {constraint.prefix.decode()!r}")
        else:
            self._wait_for_trigger()

    @property
    def is_finished(self) -> bool:
        """Whether the completion is complete: only an end-of-generation token may follow."""
        return self._active is not None and self._active.is_stopped() and not self._is_repeating

    def get_allowed_tokens(self) -> NDArray[np.intp] | None:
        """Return the tokens that may come next, or None if all may."""
        if self._active is None:
            return None
        bits = np.frombuffer(self._active.compute_bitmask(), np.uint8)
        self._raise_on_error()
        tokens = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(self._token_bytes.pieces)])
        if not len(tokens):
            raise InvalidGrammar("no token of this model continues it here")
        return tokens

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens`, in order, may come next. Does not advance the matcher."""
        return len(tokens) if self._active is None else self._active.validate_tokens(list(tokens))

    def accept(self, token: int) -> None:
        """Advance by a token of the completion."""
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
        """Activate the grammar of a trigger that was generated. Bytes of the token after the trigger belong to it."""
        piece = self._token_bytes.pieces[token]
        if (trigger := self._trigger_matcher.feed(piece)) is None:
            return
        self._active = self._grammars[trigger].deep_copy()
        remainder = piece[self._trigger_matcher.match_end :]
        if remainder and not self._active.consume_tokens(self._tokenizer.tokenize_bytes(remainder)):
            self._wait_for_trigger()  # the text contains the trigger by chance

    def _raise_on_error(self) -> None:
        assert self._active is not None
        if self._active.is_error():
            raise InvalidGrammar(self._active.get_error())
