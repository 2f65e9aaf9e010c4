"""Standard input of the commands."""

from __future__ import annotations

import sys

from afterglow.errors import InvalidArgument


def is_terminal() -> bool:
    """Whether standard input is a terminal. It is None if it was closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_standard_input() -> str:
    """Return all of standard input, which must be UTF-8 text. Nothing if it is closed."""
    try:
        return check_utf8("standard input", sys.stdin.read() if sys.stdin is not None else "")
    except UnicodeDecodeError as error:
        raise InvalidArgument("standard input", f"must be UTF-8 text: {error}") from None


def check_utf8(name: str, text: str) -> str:
    """Return the text of an argument or a stream. In some locales, Python reads other bytes as unpaired surrogates.

    >>> check_utf8("PROMPT", "naïve")
    'naïve'
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(name, f"must be UTF-8 text: invalid byte at position {error.start}") from None
    return text
