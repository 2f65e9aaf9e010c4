"""Lark grammars as regular expressions, for texts inside the syntax of a tool call.

The text of a custom tool is written inside a JSON string, between tags or in quotes, each with escapes and an end of
its own. llguidance applies those to a regular expression (the `pattern` of a string), but not to a grammar. So a
grammar becomes one expression that matches the same texts, and every tool family can enforce it.

Rules are inlined. Left and right recursion become repetition. Other recursion, such as brackets in brackets, is not
regular: it is expanded `MAX_NESTING` levels deep, so that every text that the expression matches is one of the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from afterglow.errors import InvalidGrammar

MAX_NESTING = 6
MAX_EXPRESSION_CHARACTERS = 200_000
MAX_COUNT_DIGITS = 9
TOKEN_PATTERN = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*)|(?P<space>[ \t\r]+)|(?P<newline>\n)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<name>_?[a-zA-Z](?:[a-zA-Z0-9_]|-(?!>))*)|(?P<number>[0-9]+)|(?P<keyword>%[a-z]+)
    |(?P<sign>->|\.\.|[:|()\[\]{},~*+?!.])""",
    re.VERBOSE,
)
HEX_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")
METACHARACTER = re.compile(r"[\\.+*?()|\[\]{}^$]")
COMMON_TERMINALS = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
}


@dataclass(frozen=True, slots=True)
class Expression:
    """A regular expression."""

    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """A rule or a terminal by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Alternation:
    """Alternatives, each a sequence."""

    alternatives: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """A node from `minimum` to `maximum` times."""

    node: Node
    minimum: int
    maximum: int | None


Node: TypeAlias = Expression | Reference | Alternation | Repetition


def convert_lark(grammar: str) -> str:
    """Convert a grammar to a regular expression in the syntax of Rust. Raises `InvalidGrammar`.

    >>> convert_lark('start: item | start "," item\\nitem: /[0-9]+/')
    '(?:[0-9]+)(?:,(?:[0-9]+))*'
    """
    parser = LarkParser(grammar)
    parser.parse()
    for nesting in range(MAX_NESTING, -1, -1):
        try:
            return ExpressionBuilder(parser.definitions, parser.ignored, nesting).build()
        except ExpressionTooLong:
            continue
    raise InvalidGrammar(f"its expression has more than {MAX_EXPRESSION_CHARACTERS:,} characters")


class LarkParser:
    """Parses the definitions of a grammar. Aliases, priorities and the prefixes of rules do not change its texts."""

    def __init__(self, grammar: str) -> None:
        self.definitions: dict[str, Alternation] = {}
        self.ignored: list[Node] = []
        self._tokens = list(self._split(grammar))
        self._position = 0

    def parse(self) -> None:
        """Parse all statements. Every name must be defined."""
        while self._kind != "end":
            if self._skip_kind("newline"):
                continue
            if self._kind == "keyword":
                self._parse_directive(self._take())
            else:
                self._parse_definition()
            if self._kind not in ("newline", "end"):
                self._fail(f"{self._text!r} is not expected")
        if "start" not in self.definitions:
            raise InvalidGrammar("it has no rule `start`")

    def _split(self, grammar: str) -> Sequence[tuple[str, str, int]]:
        tokens: list[tuple[str, str, int]] = []
        position, depth, line = 0, 0, 1
        while position < len(grammar):
            match = TOKEN_PATTERN.match(grammar, position)
            if match is None:
                raise InvalidGrammar(f"line {line}: {grammar[position : position + 20]!r} is not supported")
            position, kind, text = match.end(), str(match.lastgroup), match[0]
            depth += (text in ("(", "[", "{")) - (text in (")", "]", "}")) if kind == "sign" else 0
            line += kind == "newline"
            if text == "|" and tokens and tokens[-1][0] == "newline":  # alternatives on lines of their own
                while tokens and tokens[-1][0] == "newline":
                    tokens.pop()
            if kind not in ("comment", "space") and not (kind == "newline" and depth > 0):
                tokens.append((kind, text, line))
        return [*tokens, ("end", "", line)]

    @property
    def _kind(self) -> str:
        return self._tokens[self._position][0]

    @property
    def _text(self) -> str:
        return self._tokens[self._position][1]

    def _take(self) -> str:
        text = self._text
        self._position += 1
        return text

    def _skip(self, text: str) -> bool:
        is_next = self._text == text and self._kind == "sign"
        self._position += is_next
        return is_next

    def _skip_kind(self, kind: str) -> bool:
        is_next = self._kind == kind
        self._position += is_next
        return is_next

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            self._fail(f"{text!r} is expected, not {self._text!r}")

    def _expect_kind(self, kind: str) -> str:
        if self._kind != kind:
            self._fail(f"a {kind} is expected, not {self._text!r}")
        return self._take()

    def _take_count(self) -> int:
        text = self._expect_kind("number")
        if len(text) > MAX_COUNT_DIGITS:
            self._fail(f"a count has more than {MAX_COUNT_DIGITS} digits")
        return int(text)

    def _fail(self, message: str) -> NoReturn:
        raise InvalidGrammar(f"line {self._tokens[self._position][2]}: {message}")

    def _parse_directive(self, keyword: str) -> None:
        if keyword == "%ignore":
            self.ignored.append(self._parse_alternation())
        elif keyword == "%import":
            self._parse_import()
        else:
            self._fail(f"{keyword} is not supported")

    def _parse_import(self) -> None:
        if self._expect_kind("name") != "common":
            self._fail("only `common` can be imported")
        if self._skip("("):
            names = [(name := self._expect_kind("name"), name)]
            while self._skip(","):
                names.append((name := self._expect_kind("name"), name))
            self._expect(")")
        else:
            self._expect(".")
            name = self._expect_kind("name")
            names = [(name, self._expect_kind("name") if self._skip("->") else name)]
        for name, alias in names:
            if name not in COMMON_TERMINALS:
                self._fail(f"common.{name} does not exist")
            self._define(alias, Alternation(((Expression(COMMON_TERMINALS[name]),),)))

    def _parse_definition(self) -> None:
        while self._skip("?") or self._skip("!"):
            pass
        name = self._expect_kind("name")
        if self._skip("."):
            self._expect_kind("number")
        if not self._skip(":"):
            self._fail(f"':' is expected after {name}: attributes and templates are not supported")
        while self._skip_kind("newline"):
            pass
        self._define(name, self._parse_alternation())

    def _define(self, name: str, alternation: Alternation) -> None:
        if name in self.definitions:
            self._fail(f"{name} is defined twice")
        self.definitions[name] = alternation

    def _parse_alternation(self) -> Alternation:
        alternatives = [self._parse_sequence()]
        while self._skip("|"):
            alternatives.append(self._parse_sequence())
        return Alternation(tuple(alternatives))

    def _parse_sequence(self) -> tuple[Node, ...]:
        nodes: list[Node] = []
        while self._kind in ("string", "regex", "name") or self._text in ("(", "["):
            nodes.append(self._parse_repetition(self._parse_atom()))
        if self._skip("->"):
            self._expect_kind("name")
        return tuple(nodes)

    def _parse_atom(self) -> Node:
        if self._kind == "string":
            return self._parse_string()
        if self._kind == "regex":
            return Expression(build_regex(self._take()))
        if self._kind == "name":
            return Reference(self._take())
        closing = ")" if self._take() == "(" else "]"
        alternation = self._parse_alternation()
        self._expect(closing)
        return alternation if closing == ")" else Repetition(alternation, 0, 1)

    def _parse_string(self) -> Node:
        text, ignores_case = self._decode_string(self._take())
        if not self._skip(".."):
            literal = escape_regex(text)
            return Expression(f"(?i:{literal})" if ignores_case else literal)
        end, _ = self._decode_string(self._expect_kind("string"))
        if len(text) != 1 or len(end) != 1 or text > end:
            self._fail("a range needs two characters in order")
        return Expression(f"[{_escape_in_class(text)}-{_escape_in_class(end)}]")

    def _decode_string(self, token: str) -> tuple[str, bool]:
        ignores_case = token.endswith("i")
        try:
            text: str = json.loads(HEX_ESCAPE.sub(r"\\u00\1", token.removesuffix("i")), strict=False)
        except ValueError:
            self._fail(f"{token} has an escape that is not supported")
        return text, ignores_case

    def _parse_repetition(self, node: Node) -> Node:
        for sign, bounds in (("?", (0, 1)), ("*", (0, None)), ("+", (1, None))):
            if self._skip(sign):
                return Repetition(node, *bounds)
        if self._skip("~"):
            minimum = self._take_count()
            return Repetition(node, minimum, self._take_count() if self._skip("..") else minimum)
        if self._skip("{"):
            minimum = self._take_count() if self._kind == "number" else 0
            maximum: int | None = minimum
            if self._skip(","):
                maximum = self._take_count() if self._kind == "number" else None
            self._expect("}")
            return Repetition(node, minimum, maximum)
        return node


class ExpressionTooLong(Exception):
    """The expression exceeds `MAX_EXPRESSION_CHARACTERS`."""


class ExpressionBuilder:
    """Inlines the rules of a grammar. A rule contains itself at most `nesting` times."""

    def __init__(self, definitions: dict[str, Alternation], ignored: Sequence[Node], nesting: int) -> None:
        self._definitions = {name: unroll_recursion(name, alternation) for name, alternation in definitions.items()}
        self._nesting = nesting
        self._stack: list[str] = []
        self._between = ""  # what may follow each terminal of a rule
        self._in_terminal = True
        if ignored:
            self._between = f"(?:{'|'.join(self._require(self._build_node(node)) for node in ignored)})*"
        self._in_terminal = False

    def build(self) -> str:
        """Return the expression of `start`."""
        return self._between + self._require(self._build_node(Reference("start")))

    def _require(self, expression: str | None) -> str:
        if expression is None:
            raise InvalidGrammar("no text matches it")
        return expression

    def _build_node(self, node: Node) -> str | None:
        """Return the expression of a node; None if no text within the nesting limit matches it."""
        match node:
            case Expression(text):
                return text if self._in_terminal else self._separate(f"(?:{text})" if len(text) > 1 else text)
            case Reference(name):
                return self._build_reference(name)
            case Alternation(alternatives):
                return self._build_choice(alternatives)
            case Repetition():
                return self._build_repetition(node)

    def _separate(self, terminal: str) -> str:
        return f"{terminal}{self._between}"

    def _build_reference(self, name: str) -> str | None:
        if name not in self._definitions:
            raise InvalidGrammar(f"{name} is not defined")
        if self._stack.count(name) > self._nesting:
            return None
        was_in_terminal, is_terminal = self._in_terminal, name.lstrip("_")[0].isupper()
        self._stack.append(name)
        self._in_terminal = was_in_terminal or is_terminal
        expression = self._build_node(self._definitions[name])
        self._in_terminal = was_in_terminal
        self._stack.pop()
        if expression is not None and is_terminal and not was_in_terminal:
            return self._separate(f"(?:{expression})")
        return expression

    def _build_choice(self, alternatives: tuple[tuple[Node, ...], ...]) -> str | None:
        expressions: list[str] = []
        for alternative in alternatives:
            pieces = [self._build_node(node) for node in alternative]
            if all(piece is not None for piece in pieces):
                expressions.append("".join(filter(None, pieces)))
        if sum(map(len, expressions)) > MAX_EXPRESSION_CHARACTERS:
            raise ExpressionTooLong
        if len(expressions) <= 1:
            return expressions[0] if expressions else None
        return f"(?:{'|'.join(expressions)})"

    def _build_repetition(self, node: Repetition) -> str | None:
        expression = self._build_node(node.node)
        if expression is None:
            return "" if node.minimum == 0 else None
        match node.minimum, node.maximum:
            case 0, 1:
                sign = "?"
            case 0, None:
                sign = "*"
            case 1, None:
                sign = "+"
            case minimum, maximum:
                sign = f"{{{minimum},{'' if maximum is None else maximum}}}"
        return f"(?:{expression}){sign}"


def unroll_recursion(name: str, alternation: Alternation) -> Alternation:
    """Write alternatives of a rule that begin or end with the rule itself as repetition.

    `a: a x | y a | b` has the texts of `a: y* b x*`, and `a: a x a | b` those of `a: b (x b)*`.
    """
    itself = Reference(name)
    before: list[tuple[Node, ...]] = []
    after: list[tuple[Node, ...]] = []
    infix: list[tuple[Node, ...]] = []
    base: list[tuple[Node, ...]] = []
    for nodes in _split_optional_ends(alternation, itself):
        begins, ends = nodes[:1] == (itself,), len(nodes) > 1 and nodes[-1:] == (itself,)
        if begins and ends:
            infix.append(nodes[1:-1])
        elif begins:
            after.append(nodes[1:])
        elif ends:
            before.append(nodes[:-1])
        else:
            base.append(nodes)
    if not (before or after or infix):
        return alternation
    operand: tuple[Node, ...] = (Alternation(tuple(base)),)
    operand = (Repetition(Alternation(tuple(before)), 0, None), *operand) if before else operand
    after += [(*nodes, *operand) for nodes in infix]
    return Alternation(((*operand, *((Repetition(Alternation(tuple(after)), 0, None),) if after else ())),))


def _split_optional_ends(alternation: Alternation, itself: Reference) -> list[tuple[Node, ...]]:
    """Return the alternatives, those that end with an optional part that ends with the rule as two."""
    alternatives: list[tuple[Node, ...]] = []
    for nodes in alternation.alternatives:
        match nodes[-1:]:
            case (Repetition(Alternation(parts), 0, 1),) if any(part[-1:] == (itself,) for part in parts):
                alternatives += [nodes[:-1], *((*nodes[:-1], *part) for part in parts)]
            case _:
                alternatives.append(nodes)
    return alternatives


def build_regex(token: str) -> str:
    """Return a regular expression of Lark, with its flags, as an expression.

    >>> build_regex("/a\\\\/b/i")
    '(?i:a/b)'
    """
    text, _, flags = token[1:].rpartition("/")
    text = text.replace("\\/", "/")
    if flags := "".join(sorted(set(flags) - {"u"})):
        return f"(?{flags}:{text})"
    return f"(?:{text})" if "|" in text else text


def escape_regex(text: str) -> str:
    """Return an expression that matches exactly this text.

    >>> escape_regex("a.b")
    'a\\\\.b'
    """
    return METACHARACTER.sub(r"\\\g<0>", text).replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _escape_in_class(char: str) -> str:
    return f"\\{char}" if char in "\\]^-[&~" else escape_regex(char) if char in "\n\r\t" else char
