"""Arguments that are written one by one, put together as a JSON object while they come."""

from __future__ import annotations

from afterglow.chat.tools.parsing.json_values import escape_json_text, to_json_string
from afterglow.chat.tools.parsing.parser import ToolParser


class ArgumentsBuilder:
    """Writes the members of a call's arguments."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._keys: set[str] = set()
        self._text_open = False

    def begin_argument(self, name: str) -> bool:
        """Begin a member; false if it is there already (the first stays)."""
        if name in self._keys:
            return False
        self._parser.emit_arguments((", " if self._keys else "{") + to_json_string(name) + ": ")
        self._keys.add(name)
        return True

    def add_json(self, text: str) -> None:
        """The member's value as JSON, or what there is of one that broke off."""
        self._parser.emit_arguments(text)

    def add_text(self, piece: str) -> None:
        """A piece of the member's value, which is text."""
        self._parser.emit_arguments(escape_json_text(piece) if self._text_open else '"' + escape_json_text(piece))
        self._text_open = True

    def end_text(self, *, complete: bool) -> None:
        """The text is complete, or broke off."""
        if not self._text_open:
            self._parser.emit_arguments('"')
        if complete:
            self._parser.emit_arguments('"')
        self._text_open = False

    def finish(self) -> None:
        """The arguments are complete."""
        self._parser.emit_arguments("}" if self._keys else "{}")
