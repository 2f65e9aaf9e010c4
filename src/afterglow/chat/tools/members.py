"""Arguments that are written one by one, put together as a JSON object while they come."""

from __future__ import annotations

from afterglow.chat.tools.parser import Parser
from afterglow.chat.tools.values import escaped, quoted


class Members:
    """Writes the members of a call's arguments."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._keys: set[str] = set()
        self._open = False

    def key(self, name: str) -> bool:
        """Begin a member; false if it is there already (the first stays)."""
        if name in self._keys:
            return False
        self._parser.argue((", " if self._keys else "{") + quoted(name) + ": ")
        self._keys.add(name)
        return True

    def value(self, text: str) -> None:
        """The member's value as JSON, or what there is of one that broke off."""
        self._parser.argue(text)

    def text(self, piece: str) -> None:
        """A piece of the member's value, which is text."""
        self._parser.argue(escaped(piece) if self._open else '"' + escaped(piece))
        self._open = True

    def end_text(self, *, whole: bool) -> None:
        """The text is complete, or broke off."""
        if not self._open:
            self._parser.argue('"')
        if whole:
            self._parser.argue('"')
        self._open = False

    def end(self) -> None:
        """The arguments are complete."""
        self._parser.argue("}" if self._keys else "{}")
