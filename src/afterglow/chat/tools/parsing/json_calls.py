"""Calls written as JSON objects: `{"name": …, "arguments": …}`."""

from __future__ import annotations

import json
import string
from typing import Any

from afterglow.chat.tools.parsing.parser import ToolParser
from afterglow.chat.tools.parsing.scanner import CharPosition, ParseSteps, TextScanner, TextSink

CHARS_OUTSIDE_STRINGS = frozenset('{}[]:,"+-. \t\r\n' + string.ascii_letters + string.digits)
NAME_KEYS = ("name", "tool_name")
ARGUMENTS_KEYS = ("arguments", "parameters")
CALL_KEYS = (*NAME_KEYS, *ARGUMENTS_KEYS, "type", "function", "id", "tool_call_id")


class JsonValueScanner:
    """Finds the end of one JSON value, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_quotes = self._escaped = self._started = False

    def classify(self, char: str) -> CharPosition:
        if self._in_quotes:
            return self._classify_in_string(char)
        bare = self._depth == 0
        if char not in CHARS_OUTSIDE_STRINGS or (bare and (char in ",:]}" or char.isspace())):
            return CharPosition.OUTSIDE
        if bare and self._started and char in '"{[':
            return CharPosition.OUTSIDE
        self._started = True
        self._in_quotes = char == '"'
        self._depth += (char in "{[") - (char in "]}")
        return CharPosition.LAST if self._depth == 0 and char in "]}" else CharPosition.INSIDE

    def _classify_in_string(self, char: str) -> CharPosition:
        self._in_quotes = self._escaped or char != '"'
        self._escaped = char == "\\" and not self._escaped
        return CharPosition.LAST if self._depth == 0 and not self._in_quotes else CharPosition.INSIDE

    @property
    def is_complete(self) -> bool:
        """Whether the value could end here."""
        return self._started and self._depth == 0 and not self._in_quotes


def stream_json_value(scanner: TextScanner, sink: TextSink) -> ParseSteps[bool]:
    """Give one JSON value to `sink` as it comes; whether it was whole."""
    state = JsonValueScanner()
    yield from scanner.stream_value(state.classify, sink)
    return state.is_complete


def read_json_value(scanner: TextScanner) -> ParseSteps[tuple[str, bool]]:
    """One JSON value's text, and whether it was whole."""
    pieces: list[str] = []
    whole = yield from stream_json_value(scanner, pieces.append)
    return "".join(pieces), whole


def load_json(text: str) -> Any:
    """The value that JSON text means, or None where it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


class JsonCallParser:
    """Reads one call. `known` asks for a tool's name and arguments before anything is believed."""

    def __init__(self, parser: ToolParser, *, require_known_tool: bool) -> None:
        self._parser, self._scanner, self._require_known_tool = parser, parser.scanner, require_known_tool
        self._name: str | None = None
        self._arguments_before_name: str | None = None  # arguments that came before the name
        self._started = False
        self.has_invalid_arguments = False  # whether the arguments are not JSON

    def parse(self) -> ParseSteps[bool]:
        """Whether this was a call. What was read lies behind the scanner's mark."""
        whole = yield from self._parse_members()
        if (
            not self._started
            and self._name is not None
            and not (self._require_known_tool and self._arguments_before_name is None)
        ):
            self._begin_call()
            self._parser.emit_arguments(
                self._arguments_before_name if self._arguments_before_name is not None else "{}" if whole else ""
            )
        return self._started

    def _begin_call(self) -> None:
        assert self._name is not None
        self._started = True
        self._parser.begin_call(self._name)

    def _parse_members(self) -> ParseSteps[bool]:
        if not (yield from self._scanner.skip_any("{")):
            return False
        while True:
            yield from self._scanner.take_whitespace()
            if (yield from self._scanner.skip_any("}")):
                return True
            if not (yield from self._parse_member()):
                return False
            yield from self._scanner.take_whitespace()
            yield from self._scanner.skip_any(",")

    def _parse_member(self) -> ParseSteps[bool]:
        """One `"key": value`; whether it was whole, and nothing in it says that this is no call."""
        scanner = self._scanner
        if (yield from scanner.peek()) != '"':
            return False
        key = load_json((yield from read_json_value(scanner))[0])
        yield from scanner.take_whitespace()
        # A bare object with another member is an answer: it streams from here on.
        if (self._require_known_tool and key not in CALL_KEYS) or not (yield from scanner.skip_any(":")):
            return False
        yield from scanner.take_whitespace()
        first = yield from scanner.peek()
        if key in ARGUMENTS_KEYS:
            return (yield from self._parse_arguments(first))
        if key == "function" and first == "{":
            return (yield from self._parse_members())
        text, whole = yield from read_json_value(scanner)
        if key in NAME_KEYS or key == "function":
            name = load_json(text)
            if not isinstance(name, str) or not name or (self._require_known_tool and name not in self._parser.tools):
                return False
            self._name = name
        return whole

    def _parse_arguments(self, first: str) -> ParseSteps[bool]:
        if self._name is not None and first in ("{", "["):
            self._begin_call()
            whole = yield from stream_json_value(self._scanner, self._parser.emit_arguments)
            self.has_invalid_arguments = not whole
            return whole
        text, whole = yield from read_json_value(self._scanner)
        if self._name is None:
            self._arguments_before_name = unwrap_arguments(text)
        elif text or whole:
            self._begin_call()
            self._parser.emit_arguments(unwrap_arguments(text))
        return whole


def unwrap_arguments(text: str) -> str:
    """Arguments as an object's text: out of a string that holds one, `{}` for nothing.

    >>> unwrapped('"{}"'), unwrapped("null"), unwrapped('{"a": 1}')
    ('{}', '{}', '{"a": 1}')
    """
    if text in ("null", '""'):
        return "{}"
    inside = load_json(text)
    return inside if isinstance(inside, str) and isinstance(load_json(inside), dict) else text
