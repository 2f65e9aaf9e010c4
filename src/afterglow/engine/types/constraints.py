"""Token constraints of a request as plain values: grammar and reasoning budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from afterglow.errors import InvalidArgument, InvalidGrammar
from afterglow.llama.checks import check_integer

MAX_GRAMMAR_CHARACTERS = 1024 * 1024  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConstraint:
    """A grammar in llguidance's form for the whole answer; or grammars that hold from the moment their beginning in
    `after` was written until their own end, each time anew, or `once`: then the answer ends there.

    >>> Constraint(grammar='start: "yes" | "no"').after
    ()
    """

    grammar: str = ""
    triggers: tuple[tuple[bytes, str], ...] = ()  # beginnings, and what follows each
    stop_after_first: bool = False

    def __post_init__(self) -> None:
        if bool(self.grammar) == bool(self.triggers):
            raise InvalidArgument("constraint", "must be a grammar, or grammars with their beginnings")
        for grammar in (self.grammar, *(grammar for _, grammar in self.triggers)):
            if not isinstance(grammar, str):
                raise InvalidArgument("grammar", f"must be text, not {type(grammar).__name__}")
            if len(grammar) > MAX_GRAMMAR_CHARACTERS:
                raise InvalidGrammar(f"it has {len(grammar):,} characters, {MAX_GRAMMAR_CHARACTERS:,} are allowed")


class TokenBytes(Protocol):
    """The tokens that a grammar is made of, as a vocabulary has them."""

    @property
    def pieces(self) -> Sequence[bytes]: ...
    @property
    def control_tokens(self) -> frozenset[int]: ...
    @property
    def eog_tokens(self) -> frozenset[int]: ...
    def tokenize(self, text: bytes) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBudget:
    """At most `tokens` tokens between the texts `opens` and `closes`; then `ending` is written.

    >>> ThoughtBudget(tokens=100, opens=b"<think>", closes=b"</think>", ending=(7, 8), open=True).tokens
    100
    """

    max_tokens: int
    start_marker: bytes
    end_marker: bytes
    closing_tokens: tuple[int, ...]  # tokens that close a thought; they contain `closes`
    starts_open: bool  # the prompt ends inside a thought

    def __post_init__(self) -> None:
        check_integer("reasoning budget", self.max_tokens, 0)
        if not self.end_marker or not self.closing_tokens:
            raise InvalidArgument("reasoning budget", "needs a text and tokens that close a thought")
