"""Text inputs of tools: conversion between the text and the arguments `{"input": "…"}` that models write."""

from __future__ import annotations

import json
import re
from typing import Any

from afterglow.chat.tools.tool import TEXT_PARAMETER

TEXT_START = re.compile(rf'\s*\{{\s*"{TEXT_PARAMETER}"\s*:\s*"')
# Whole characters of a JSON string: an escaped surrogate pair is one character.
WHOLE_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)


def wrap_text_input(text: str) -> str:
    """Return the arguments of a call with this text.

    >>> wrap_text_input("ls")
    '{"input": "ls"}'
    """
    return json.dumps({TEXT_PARAMETER: text}, ensure_ascii=False)


def unwrap_text_input(arguments: str) -> str:
    """Return the text in the arguments of a call. Arguments of another form, which only unconstrained models write, are
    the text of their only member, or the text as it is.

    >>> unwrap_text_input('{"input": "ls"}'), unwrap_text_input("ls")
    ('ls', 'ls')
    """
    try:
        values: Any = json.loads(arguments, strict=False)
    except ValueError:
        return arguments
    if isinstance(values, dict):
        text = values.get(TEXT_PARAMETER, next(iter(values.values())) if len(values) == 1 else None)
    else:
        text = values
    return text if isinstance(text, str) else arguments


class TextInputReader:
    """Unwraps arguments that arrive in pieces.

    >>> reader = TextInputReader()
    >>> [reader.feed('{"inp'), reader.feed('ut": "a\\\\'), reader.feed('nb"}'), reader.finish()]
    ['', 'a', '\\nb', '']
    """

    def __init__(self) -> None:
        self._pending = ""  # not decoded yet
        self._is_open = False  # inside the string
        self._is_closed = False

    def feed(self, arguments: str) -> str:
        """Add a piece of the arguments and return the text that it completes."""
        if self._is_closed:
            return ""
        self._pending += arguments
        if not self._is_open:
            start = TEXT_START.match(self._pending)
            if start is None:
                return ""
            self._is_open, self._pending = True, self._pending[start.end() :]
        whole = WHOLE_CHARACTERS.match(self._pending)
        assert whole is not None  # it matches the empty text
        self._pending = self._pending[whole.end() :]
        self._is_closed = self._pending.startswith('"')
        return _decode(whole[0])

    def finish(self) -> str:
        """Return the rest of the text: of arguments that end early, or have another form."""
        if self._is_closed or self._is_open:
            return ""
        self._is_closed = True
        return unwrap_text_input(self._pending)


def _decode(escaped: str) -> str:
    try:
        text: str = json.loads(f'"{escaped}"', strict=False)
    except ValueError:  # an escape that JSON does not have
        return escaped
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
