"""Token constraints of a request as plain values: grammar and reasoning budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llguidance.gbnf_to_lark import any_to_lark

from afterglow.errors import InvalidArgument, InvalidGrammar
from afterglow.llama.checks import check_integer

MAX_GRAMMAR_CHARACTERS = 8 * 1024 * 1024  # of a request with 1 MiB of tools
# Alternative of the items of an array in a JSON schema. No value matches it. It tells the engine that the items must be
# unique, which a grammar cannot express.
UNIQUE_ITEM_PLACEHOLDER = {"enum": [], "x-unique-item": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConstraint:
    """Grammar of the generated text, in llguidance's format: one for the whole text, or several with triggers.

    A triggered grammar applies after its trigger text was generated, until the grammar ends, and again after each later
    trigger. With `stop_after_first`, generation ends when the first triggered grammar ends. With `stop_at_other_text`,
    a token that does not continue a complete text ends generation: the model is not made to choose between more of the
    grammar and the end if it would write something else.

    >>> GrammarConstraint(grammar='start: "yes" | "no"').triggers
    ()
    """

    grammar: str = ""
    triggers: tuple[tuple[bytes, str], ...] = ()  # trigger texts, each with its grammar
    stop_after_first: bool = False
    prefix: bytes = b""  # text of the grammar, or of a trigger, with which the prompt already ends
    stop_at_other_text: bool = False

    def __post_init__(self) -> None:
        if bool(self.grammar) == bool(self.triggers):
            raise InvalidArgument("constraint", "must have either a grammar or triggers")
        for grammar in (self.grammar, *(grammar for _, grammar in self.triggers)):
            if not isinstance(grammar, str):
                raise InvalidArgument("grammar", f"must be text, not {type(grammar).__name__}")
            if len(grammar) > MAX_GRAMMAR_CHARACTERS:
                raise InvalidGrammar(f"it has {len(grammar):,} characters, {MAX_GRAMMAR_CHARACTERS:,} are allowed")


def convert_gbnf(text: str) -> str:
    """Convert a grammar in llama.cpp's GBNF, with a rule `root`, to llguidance's Lark dialect.

    >>> print(convert_gbnf("root ::= [0-9]+").strip().splitlines()[-1])
    start: /[0-9]/+
    """
    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # the converter raises arbitrary exceptions
        raise InvalidGrammar(f"it is not valid GBNF: {error}") from None
    return lark


def describe_grammar_error(message: str) -> str:
    """Return an error message of llguidance without its internal state and the grammar.

    >>> describe_grammar_error("ParserTooComplex: 9 items\\n<state>\\nTokens: 1\\n</state><grammar>\\n…\\n</grammar>")
    'ParserTooComplex: 9 items'
    """
    reason = message.partition("\n<state>\n")[0].strip()
    return "no text continues it here" if reason == "NoExtensionBias" else reason


class TokenBytes(Protocol):
    """Tokens of a vocabulary as bytes, for compiling grammars."""

    @property
    def pieces(self) -> Sequence[bytes]: ...
    @property
    def control_tokens(self) -> frozenset[int]: ...
    @property
    def eog_tokens(self) -> frozenset[int]: ...
    def tokenize(self, text: bytes) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBudget:
    """At most `max_tokens` tokens between the texts `start_marker` and `end_marker`; then `closing_tokens` are forced.

    >>> ReasoningBudget(
    ...     max_tokens=100, start_marker=b"<think>", end_marker=b"</think>", closing_tokens=(7, 8), starts_open=True
    ... ).max_tokens
    100
    """

    max_tokens: int
    start_marker: bytes
    end_marker: bytes
    closing_tokens: tuple[int, ...]  # tokens that end the reasoning; their text contains `end_marker`
    starts_open: bool  # the prompt ends inside a reasoning section

    def __post_init__(self) -> None:
        check_integer("reasoning budget", self.max_tokens, 0)
        if not self.end_marker or not self.closing_tokens:
            raise InvalidArgument("reasoning budget", "needs an end marker and closing tokens")
