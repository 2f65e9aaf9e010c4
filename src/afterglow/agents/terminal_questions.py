"""Asks a person at the terminal about a call."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from afterglow.agents.events import Question
from afterglow.agents.permissions import Decision

termios: Any = None if sys.platform == "win32" else importlib.import_module("termios")


def terminal(question: Question) -> Decision | None:
    """Show the exact call and read an answer: yes, no, or later. Without a terminal there is no answer.

    >>> terminal.__name__
    'terminal'
    """
    if not sys.stdin.isatty():
        return None
    arguments = escape_controls(question.call.arguments)
    print(f"\n{question.call.name}({arguments})  [{question.effect}; {question.reason}]", file=sys.stderr)
    while True:
        print("allow? [y]es, [n]o, [l]ater: ", end="", file=sys.stderr, flush=True)
        with read_lines():
            line = sys.stdin.readline()
        match line.strip().lower()[:1]:
            case "y":
                return "allow"
            case "n":
                return "deny"
            case "l" | "" if not line or line.strip():
                return None


def escape_controls(text: str) -> str:
    """Return a text without characters that could move the cursor or hide a part of a call.

    >>> escape_controls("rm\\x1b[2K -rf\\u202e")
    'rm\\\\x1b[2K -rf\\\\u202e'
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


@contextlib.contextmanager
def read_lines() -> Iterator[None]:
    """Let the terminal echo and edit a line, also while the chat holds typed keys back."""
    if termios is None:
        yield
        return
    try:
        before = termios.tcgetattr(sys.stdin.fileno())
    except (termios.error, OSError, ValueError):
        yield
        return
    mode = termios.tcgetattr(sys.stdin.fileno())
    mode[0] |= termios.ICRNL
    mode[3] |= termios.ECHO | termios.ICANON
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, mode)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)
