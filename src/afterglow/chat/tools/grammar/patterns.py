"""Patterns of JSON Schema as regular expressions of the whole text, as the terminals of a grammar need them."""

from __future__ import annotations

import re

from afterglow.chat.constraints.lark_regex import escape_regex

PATTERN_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|^$]", re.DOTALL)  # escape, class or sign
ESCAPE = re.compile(r"\\.", re.DOTALL)
# In JSON Schema, these contain only ASCII characters; in a terminal, all of Unicode.
ASCII_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
ANYTHING = "(?s:.*)"


def complete_pattern(pattern: str) -> str | None:
    """Return the expression of the texts in which a pattern is found; None if it has anchors inside.

    >>> complete_pattern("^a[0-9]|b$")
    'a[0-9](?s:.*)|(?s:.*)b'
    """
    alternatives = [_complete_alternative(alternative) for alternative in _split_alternatives(pattern)]
    if None in alternatives:
        return None
    expression = "|".join(filter(None, alternatives)) + ("|" if "" in alternatives else "")
    return ESCAPE.sub(lambda escape: ASCII_CLASSES.get(escape[0], escape[0]), expression)


def build_choice_expression(texts: list[str]) -> str:
    """Return the expression of these texts.

    >>> build_choice_expression(["a.b", "c"])
    '(?:a\\\\.b|c)'
    """
    return f"(?:{'|'.join(map(escape_regex, texts))})"


def _split_alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a pattern outside of groups."""
    alternatives, start, depth = [], 0, 0
    for piece in PATTERN_PIECE.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(piece[0], 0)
        if piece[0] == "|" and depth == 0:
            alternatives.append(pattern[start : piece.start()])
            start = piece.end()
    return [*alternatives, pattern[start:]]


def _complete_alternative(alternative: str) -> str | None:
    anchors = [piece.start() for piece in PATTERN_PIECE.finditer(alternative) if piece[0] in "^$"]
    has_start = alternative.startswith("^")
    has_end = bool(anchors) and alternative[anchors[-1] :] == "$"
    if len(anchors) > has_start + has_end:
        return None
    body = alternative[has_start : len(alternative) - has_end]
    return f"{'' if has_start else ANYTHING}{body}{'' if has_end else ANYTHING}"
