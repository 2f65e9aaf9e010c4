"""Grammar constraints: llguidance compiles a grammar and returns the allowed tokens before each sampling step.

Any thread may compile; a `GrammarMatcher` belongs to one request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import llguidance
import numpy as np
from numpy.typing import NDArray

from afterglow.engine.sampling.json_text import (
    NumberLimiter,
    PieceIndex,
    UniqueItemLimiter,
    build_probe_grammar,
    get_allowed_tokens,
)
from afterglow.engine.sampling.stops import StopMatcher
from afterglow.engine.types.constraints import GrammarConstraint, TokenBytes, describe_grammar_error
from afterglow.errors import InvalidGrammar

MAX_CACHED_CONSTRAINTS = 32  # agents use the same schemas again and again
MAX_CACHED_CHARACTERS = 8 * 1024 * 1024  # of all grammars; a compiled grammar takes about 100 bytes per character
TriggerTexts: TypeAlias = tuple[tuple[bytes, str], ...]  # trigger texts, each with its grammar
JSON_GRAMMAR_TEXTS = ('"json_schema"', "%json")


class GrammarCompiler:
    """Compiles grammars for one vocabulary and caches them."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._piece_index: PieceIndex | None = None
        self._compiled: OrderedDict[TriggerTexts, dict[bytes, CompiledGrammar]] = OrderedDict()

    def compile(self, constraint: GrammarConstraint) -> GrammarMatcher:
        """Return a new matcher. Raise `InvalidGrammar` with the position and cause if a grammar does not compile."""
        with self._lock:
            if self._tokenizer is None:
                eog_tokens = sorted(self._token_bytes.eog_tokens)
                if not eog_tokens:
                    raise InvalidGrammar("the model has no end-of-generation token")
                self._tokenizer = llguidance.LLTokenizer(_TokenizerAdapter(self._token_bytes), eos_token=eog_tokens)
                self._piece_index = PieceIndex(self._token_bytes)
        grammars = self._get_or_compile(constraint.triggers or ((b"", constraint.grammar),))
        return GrammarMatcher(constraint, grammars, self._tokenizer, self._token_bytes)

    def _get_or_compile(self, triggers: TriggerTexts) -> dict[bytes, CompiledGrammar]:
        assert self._tokenizer is not None
        assert self._piece_index is not None
        with self._lock:
            compiled = self._compiled.get(triggers)
        if compiled is None:
            compiled = {
                trigger: CompiledGrammar(grammar, self._tokenizer, self._piece_index) for trigger, grammar in triggers
            }
        with self._lock:
            self._compiled[triggers] = compiled
            self._compiled.move_to_end(triggers)
            while len(self._compiled) > 1 and self._is_over_limit():
                self._compiled.popitem(last=False)
        return compiled

    def _is_over_limit(self) -> bool:
        characters = sum(len(grammar) for triggers in self._compiled for _, grammar in triggers)
        return len(self._compiled) > MAX_CACHED_CONSTRAINTS or characters > MAX_CACHED_CHARACTERS


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


class CompiledGrammar:
    """A compiled grammar, and the limits of JSON text if it contains any. Creates one position per completion."""

    def __init__(self, grammar: str, tokenizer: llguidance.LLTokenizer, piece_index: PieceIndex) -> None:
        self._tokenizer, self._piece_index = tokenizer, piece_index
        self._matcher = _compile(tokenizer, grammar)
        self._is_json = any(text in grammar for text in JSON_GRAMMAR_TEXTS)
        probe_grammar = build_probe_grammar(grammar)
        self._probe = None if probe_grammar is None else _compile(tokenizer, probe_grammar)
        if self._is_json:
            piece_index.prepare(unique_items=self._probe is not None)

    def start(self, trigger: bytes = b"") -> GrammarPosition:
        """Return the position at the beginning of the grammar, after the text of its trigger."""
        limiters: list[NumberLimiter | UniqueItemLimiter] = []
        if self._is_json:  # first: an item must become unique with the digits that are left
            limiters.append(NumberLimiter(self._piece_index, trigger))
        if self._probe is not None:
            limiters.append(UniqueItemLimiter(self._piece_index, self._tokenizer, self._probe.deep_copy()))
        return GrammarPosition(self._matcher.deep_copy(), limiters, len(self._piece_index.pieces))

    def start_after(self, prefix: bytes) -> GrammarPosition:
        """Return the position after a text. Raises `InvalidGrammar` if the grammar does not allow it."""
        position, tokens = self.start(), self._tokenizer.tokenize_bytes(prefix)
        if position.count_allowed(tokens) < len(tokens):
            raise InvalidGrammar(f"no text that it allows begins with {prefix.decode()!r}")
        position.accept(tokens)
        return position


def _compile(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise InvalidGrammar(describe_grammar_error(matcher.get_error()))
    return matcher


class GrammarPosition:
    """Position of a text in one grammar."""

    def __init__(
        self, matcher: llguidance.LLMatcher, limiters: list[NumberLimiter | UniqueItemLimiter], token_count: int
    ) -> None:
        self._matcher, self._limiters, self._token_count = matcher, limiters, token_count

    @property
    def is_finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def get_allowed_tokens(self) -> NDArray[np.intp]:
        """Return the tokens that may come next."""
        tokens = get_allowed_tokens(self._matcher, self._token_count)
        self._raise_on_error()
        for limiter in self._limiters:
            tokens = limiter.restrict(tokens, self._matcher)
        if not len(tokens):
            raise InvalidGrammar("no token of this model continues it here")
        return tokens

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens`, in order, the grammar allows next. Does not consider limits of JSON text."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def find_forced_tokens(self) -> list[int]:
        """Return the tokens of the text that must come next, e.g. the rest of a JSON key; empty if there is a choice.

        A last token that could continue into the free text after it is left out.
        """
        return list(self._matcher.compute_ff_tokens())

    def accept(self, tokens: Sequence[int]) -> bool:
        """Advance by tokens; return whether the grammar allows them."""
        if not self._matcher.consume_tokens(list(tokens)):
            self._raise_on_error()
            return False
        for limiter in self._limiters:
            for token in tokens:
                limiter.feed(token)
        return True

    def _raise_on_error(self) -> None:
        if self._matcher.is_error():
            raise InvalidGrammar(describe_grammar_error(self._matcher.get_error()))


class GrammarMatcher:
    """Position of one completion in its constraint."""

    def __init__(
        self,
        constraint: GrammarConstraint,
        grammars: dict[bytes, CompiledGrammar],
        tokenizer: llguidance.LLTokenizer,
        token_bytes: TokenBytes,
    ) -> None:
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        self._stops_at_other_text = constraint.stop_at_other_text
        self._is_repeating = bool(constraint.triggers) and not constraint.stop_after_first
        self._active: GrammarPosition | None = None
        if constraint.grammar:
            self._active = grammars[b""].start_after(constraint.prefix)
        else:
            self._wait_for_trigger()
            self._trigger_matcher.feed(constraint.prefix)

    @property
    def is_finished(self) -> bool:
        """Whether the completion is complete: only an end-of-generation token may follow."""
        return self._active is not None and self._active.is_finished and not self._is_repeating

    def get_allowed_tokens(self) -> NDArray[np.intp] | None:
        """Return the tokens that may come next, or None if all may."""
        if self._active is None or (self._stops_at_other_text and self._active.is_complete):
            return None
        return self._active.get_allowed_tokens()

    def replace_other_text(self, token: int) -> int:
        """Return the token, or an end-of-generation token in place of one that ends generation."""
        if not self._stops_at_other_text or self._active is None or self._active.count_allowed([token]):
            return token
        return min(self._token_bytes.eog_tokens)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens`, in order, may come next. Does not advance the matcher."""
        return len(tokens) if self._active is None else self._active.count_allowed(tokens)

    def find_forced_tokens(self) -> list[int]:
        """Return the tokens of the text that must come next; empty if there is a choice."""
        if self._active is None or self._active.is_finished or self._active.is_complete:
            return []
        return self._active.find_forced_tokens()

    def accept(self, token: int) -> None:
        """Advance by a token of the completion."""
        if self._active is None:
            self._match_trigger(token)
        elif not self._active.accept([token]):
            raise InvalidGrammar(f"token {token} is not allowed here")
        if self._is_repeating and self._active is not None and self._active.is_finished:
            self._wait_for_trigger()

    def _wait_for_trigger(self) -> None:
        self._active, self._trigger_matcher = None, StopMatcher(list(self._grammars))

    def _match_trigger(self, token: int) -> None:
        """Activate the grammar of a trigger that was generated. Bytes of the token after the trigger belong to it."""
        piece = self._token_bytes.pieces[token]
        if (trigger := self._trigger_matcher.feed(piece)) is None:
            return
        self._active = self._grammars[trigger].start(trigger)
        remainder = piece[self._trigger_matcher.match_end :]
        if remainder and not self._active.accept(self._tokenizer.tokenize_bytes(remainder)):
            self._wait_for_trigger()  # the text contains the trigger by chance
