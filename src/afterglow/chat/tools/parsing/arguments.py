"""Streams arguments that a model writes one by one as the text of one JSON object."""

from __future__ import annotations

from afterglow.chat.tools.parsing.json_values import escape_json_text, to_json_string
from afterglow.chat.tools.parsing.parser import ToolParser


class ArgumentsBuilder:
    """Emits the JSON arguments of one call, member by member."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._keys: set[str] = set()
        self._text_open = False

    def begin_argument(self, name: str) -> bool:
        """Begin a member; return False for a duplicate key (the first value is used)."""
        if name in self._keys:
            return False
        self._parser.emit_arguments((", " if self._keys else "{") + to_json_string(name) + ": ")
        self._keys.add(name)
        return True

    def add_json(self, text: str) -> None:
        """Emit the member's value as JSON, or the fragment of a truncated value."""
        self._parser.emit_arguments(text)

    def add_text(self, piece: str) -> None:
        """Emit a piece of the member's string value."""
        self._parser.emit_arguments(escape_json_text(piece) if self._text_open else '"' + escape_json_text(piece))
        self._text_open = True

    def end_text(self, *, complete: bool) -> None:
        """End the string value; leave it open if it was truncated."""
        if not self._text_open:
            self._parser.emit_arguments('"')
        if complete:
            self._parser.emit_arguments('"')
        self._text_open = False

    def finish(self) -> None:
        """End the object."""
        self._parser.emit_arguments("}" if self._keys else "{}")
