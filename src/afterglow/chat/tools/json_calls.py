"""Calls written as JSON objects: `{"name": …, "arguments": …}`."""

from __future__ import annotations

import json
import string
from typing import Any

from afterglow.chat.tools.parser import Parser
from afterglow.chat.tools.scanner import Scanner, Sink, Steps, Verdict

OUTSIDE_STRINGS = frozenset('{}[]:,"+-. \t\r\n' + string.ascii_letters + string.digits)
NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
MEMBERS = (*NAMES, *ARGUMENTS, "type", "function", "id", "tool_call_id")


class JsonValue:
    """Finds the end of one JSON value, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = self._begun = False

    def judge(self, char: str) -> Verdict:
        if self._quoted:
            return self._in_string(char)
        bare = self._depth == 0
        if char not in OUTSIDE_STRINGS or (bare and (char in ",:]}" or char.isspace())):
            return Verdict.OUTSIDE
        if bare and self._begun and char in '"{[':
            return Verdict.OUTSIDE
        self._begun = True
        self._quoted = char == '"'
        self._depth += (char in "{[") - (char in "]}")
        return Verdict.LAST if self._depth == 0 and char in "]}" else Verdict.INSIDE

    def _in_string(self, char: str) -> Verdict:
        self._quoted = self._escaped or char != '"'
        self._escaped = char == "\\" and not self._escaped
        return Verdict.LAST if self._depth == 0 and not self._quoted else Verdict.INSIDE

    @property
    def whole(self) -> bool:
        """Whether the value could end here."""
        return self._begun and self._depth == 0 and not self._quoted


def value(scanner: Scanner, sink: Sink) -> Steps[bool]:
    """Give one JSON value to `sink` as it comes; whether it was whole."""
    state = JsonValue()
    yield from scanner.scan(state.judge, sink)
    return state.whole


def collected(scanner: Scanner) -> Steps[tuple[str, bool]]:
    """One JSON value's text, and whether it was whole."""
    pieces: list[str] = []
    whole = yield from value(scanner, pieces.append)
    return "".join(pieces), whole


def loaded(text: str) -> Any:
    """The value that JSON text means, or None where it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


class JsonCall:
    """Reads one call. `known` asks for a tool's name and arguments before anything is believed."""

    def __init__(self, parser: Parser, *, known: bool) -> None:
        self._parser, self._scanner, self._known = parser, parser.scanner, known
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name
        self._begun = False
        self.broken = False  # whether the arguments are not JSON

    def read(self) -> Steps[bool]:
        """Whether this was a call. What was read lies behind the scanner's mark."""
        whole = yield from self._members()
        if not self._begun and self._name is not None and not (self._known and self._early is None):
            self._begin()
            self._parser.argue(self._early if self._early is not None else "{}" if whole else "")
        return self._begun

    def _begin(self) -> None:
        assert self._name is not None
        self._begun = True
        self._parser.begin(self._name)

    def _members(self) -> Steps[bool]:
        if not (yield from self._scanner.skip("{")):
            return False
        while True:
            yield from self._scanner.spaces()
            if (yield from self._scanner.skip("}")):
                return True
            if not (yield from self._member()):
                return False
            yield from self._scanner.spaces()
            yield from self._scanner.skip(",")

    def _member(self) -> Steps[bool]:
        """One `"key": value`; whether it was whole, and nothing in it says that this is no call."""
        scanner = self._scanner
        if (yield from scanner.peek()) != '"':
            return False
        key = loaded((yield from collected(scanner))[0])
        yield from scanner.spaces()
        # A bare object with another member is an answer: it streams from here on.
        if (self._known and key not in MEMBERS) or not (yield from scanner.skip(":")):
            return False
        yield from scanner.spaces()
        first = yield from scanner.peek()
        if key in ARGUMENTS:
            return (yield from self._arguments(first))
        if key == "function" and first == "{":
            return (yield from self._members())
        text, whole = yield from collected(scanner)
        if key in NAMES or key == "function":
            name = loaded(text)
            if not isinstance(name, str) or not name or (self._known and name not in self._parser.tools):
                return False
            self._name = name
        return whole

    def _arguments(self, first: str) -> Steps[bool]:
        if self._name is not None and first in ("{", "["):
            self._begin()
            whole = yield from value(self._scanner, self._parser.argue)
            self.broken = not whole
            return whole
        text, whole = yield from collected(self._scanner)
        if self._name is None:
            self._early = unwrapped(text)
        elif text or whole:
            self._begin()
            self._parser.argue(unwrapped(text))
        return whole


def unwrapped(text: str) -> str:
    """Arguments as an object's text: out of a string that holds one, `{}` for nothing.

    >>> unwrapped('"{}"'), unwrapped("null"), unwrapped('{"a": 1}')
    ('{}', '{}', '{"a": 1}')
    """
    if text in ("null", '""'):
        return "{}"
    inside = loaded(text)
    return inside if isinstance(inside, str) and isinstance(loaded(inside), dict) else text
