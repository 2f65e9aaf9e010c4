"""Parser of calls written as JSON objects: `{"name": …, "arguments": …}`."""

from __future__ import annotations

import json
import string
from typing import Any

from afterglow.chat.tools.parsing.json_values import repair_surrogates
from afterglow.chat.tools.parsing.parser import ToolParser
from afterglow.chat.tools.parsing.scanner import CharPosition, ParseSteps, TextScanner, TextSink

CHARS_OUTSIDE_STRINGS = frozenset('{}[]:,"+-. \t\r\n' + string.ascii_letters + string.digits)
NAME_KEYS = ("name", "tool_name")
ARGUMENTS_KEYS = ("arguments", "parameters")
CALL_KEYS = (*NAME_KEYS, *ARGUMENTS_KEYS, "type", "function", "id", "tool_call_id")


class JsonValueScanner:
    """Finds the end of a JSON value, one character at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_quotes = self._escaped = self._started = False

    def classify(self, char: str) -> CharPosition:
        if self._in_quotes:
            self._in_quotes = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return CharPosition.LAST if self._depth == 0 and not self._in_quotes else CharPosition.INSIDE
        at_top_level = self._depth == 0
        if char not in CHARS_OUTSIDE_STRINGS or (at_top_level and (char in ",:]}" or char.isspace())):
            return CharPosition.OUTSIDE
        if at_top_level and self._started and char in '"{[':
            return CharPosition.OUTSIDE
        self._started = True
        self._in_quotes = char == '"'
        self._depth += (char in "{[") - (char in "]}")
        return CharPosition.LAST if self._depth == 0 and char in "]}" else CharPosition.INSIDE

    @property
    def is_complete(self) -> bool:
        """Whether the value can end here."""
        return self._started and self._depth == 0 and not self._in_quotes


def stream_json_value(scanner: TextScanner, sink: TextSink) -> ParseSteps[bool]:
    """Stream one JSON value to `sink`; return whether it is complete."""
    state = JsonValueScanner()
    yield from scanner.stream_value(state.classify, sink)
    return state.is_complete


def read_json_value(scanner: TextScanner) -> ParseSteps[tuple[str, bool]]:
    """Return the text of one JSON value and whether it is complete."""
    pieces: list[str] = []
    complete = yield from stream_json_value(scanner, pieces.append)
    return "".join(pieces), complete


def load_json(text: str) -> Any:
    """Decode JSON text; None if it is invalid. A string has no surrogates."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return repair_surrogates(value) if isinstance(value, str) else value


class JsonCallParser:
    """Parses one call. With `require_known_tool`, only an object with a known name and arguments is a call."""

    def __init__(self, parser: ToolParser, *, require_known_tool: bool) -> None:
        self._parser, self._scanner, self._require_known_tool = parser, parser.scanner, require_known_tool
        self._name: str | None = None
        self._arguments_before_name: str | None = None
        self._started = False
        self.has_invalid_arguments = False  # the arguments are not valid JSON

    def parse(self) -> ParseSteps[bool]:
        """Parse an object; return whether it is a call. If not, the text read follows the scanner's mark."""
        complete = yield from self._parse_members()
        arguments = self._arguments_before_name
        if not self._started and self._name is not None and not (self._require_known_tool and arguments is None):
            self._begin_call()
            self._parser.emit_arguments(arguments if arguments is not None else "{}" if complete else "")
        return self._started

    def _begin_call(self) -> None:
        assert self._name is not None
        self._started = True
        self._parser.begin_call(self._name)

    def _parse_members(self) -> ParseSteps[bool]:
        if not (yield from self._scanner.skip_any("{")):
            return False
        while True:
            if (yield from self._scanner.skip_after_space("}")):
                return True
            if not (yield from self._parse_member()):
                return False
            yield from self._scanner.skip_after_space(",")

    def _parse_member(self) -> ParseSteps[bool]:
        """Parse one `"key": value`; return False if it is truncated or shows that the object is not a call."""
        scanner = self._scanner
        if (yield from scanner.peek()) != '"':
            return False
        key = load_json((yield from read_json_value(scanner))[0])
        yield from scanner.take_whitespace()
        # An untagged object with another member is an answer: it streams as text from here on.
        if (self._require_known_tool and key not in CALL_KEYS) or not (yield from scanner.skip_any(":")):
            return False
        yield from scanner.take_whitespace()
        first = yield from scanner.peek()
        if key in ARGUMENTS_KEYS:
            return (yield from self._parse_arguments(first))
        if key == "function" and first == "{":
            return (yield from self._parse_members())
        text, complete = yield from read_json_value(scanner)
        if key in NAME_KEYS or key == "function":
            name = load_json(text)
            if not isinstance(name, str) or not name or (self._require_known_tool and name not in self._parser.tools):
                return False
            self._name = name
        return complete

    def _parse_arguments(self, first: str) -> ParseSteps[bool]:
        if self._name is not None and first in ("{", "["):
            self._begin_call()
            complete = yield from stream_json_value(self._scanner, self._parser.emit_arguments)
            self.has_invalid_arguments = not complete
            return complete
        text, complete = yield from read_json_value(self._scanner)
        if self._name is None:
            self._arguments_before_name = unwrap_arguments(text)
        elif text or complete:
            self._begin_call()
            self._parser.emit_arguments(unwrap_arguments(text))
        return complete


def unwrap_arguments(text: str) -> str:
    """Return arguments as the text of an object: decode a string that contains one; null and "" become `{}`.

    >>> unwrap_arguments('"{}"'), unwrap_arguments("null"), unwrap_arguments('{"a": 1}')
    ('{}', '{}', '{"a": 1}')
    """
    if text in ("null", '""'):
        return "{}"
    value = load_json(text)
    return value if isinstance(value, str) and isinstance(load_json(value), dict) else text
