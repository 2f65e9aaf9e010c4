"""The patch format of coding agents: its grammar in Lark, as a client sends it, and a parser that judges patches."""

from __future__ import annotations

PATCH_GRAMMAR = r"""
// Files to add, delete and update, between two lines.
start: "*** Begin Patch" LF section+ "*** End Patch" LF?

?section: add | delete | update
add: "*** Add File: " PATH LF added+
delete: "*** Delete File: " PATH LF
update: "*** Update File: " PATH LF move? hunk+ end_of_file?
move: "*** Move to: " PATH LF
hunk: "@@" (" " PATH)? LF changed+
end_of_file: "*** End of File" LF
added: "+" TEXT LF                      -> line
changed: ("+" | "-" | " ") TEXT LF      -> line

PATH: /[^\n\r]+/
TEXT: /[^\n\r]*/
%import common.LF
"""
BEGIN, END, END_OF_FILE = "*** Begin Patch", "*** End Patch", "*** End of File"
ADD, DELETE, UPDATE, MOVE = "*** Add File: ", "*** Delete File: ", "*** Update File: ", "*** Move to: "


class InvalidPatch(ValueError):
    """A text is not a patch."""


def parse_patch(text: str) -> list[tuple[str, str]]:
    """Return what a patch does: the operation and the path of each section. Raises `InvalidPatch`."""
    lines = text.removesuffix("\n").split("\n")
    if len(lines) < 3 or lines[0] != BEGIN or lines[-1] != END:
        raise InvalidPatch(f"it must begin with {BEGIN!r} and end with {END!r}: {text!r}")
    sections: list[tuple[str, str]] = []
    rest = lines[1:-1]
    while rest:
        operation = next((head for head in (ADD, DELETE, UPDATE) if rest[0].startswith(head)), None)
        if operation is None or not (path := rest.pop(0)[len(operation) :]):
            raise InvalidPatch(f"a section must begin with its file, not {rest[:1]}")
        sections.append((operation.split()[1].lower(), path))
        if operation == ADD:
            rest = _skip_lines(rest, "+")
        elif operation == UPDATE:
            rest = _skip_hunks(rest)
    return sections


def _skip_hunks(rest: list[str]) -> list[str]:
    if rest and rest[0].startswith(MOVE) and not rest.pop(0)[len(MOVE) :]:
        raise InvalidPatch("a move must have a path")
    if not rest or not rest[0].startswith("@@"):
        raise InvalidPatch(f"an update must have a hunk, not {rest[:1]}")
    while rest and rest[0].startswith("@@"):
        header = rest.pop(0)
        if header != "@@" and not (header.startswith("@@ ") and len(header) > 3):
            raise InvalidPatch(f"a hunk must begin with '@@' or '@@ context', not {header!r}")
        rest = _skip_lines(rest, "+- ")
    return rest[1:] if rest and rest[0] == END_OF_FILE else rest


def _skip_lines(rest: list[str], signs: str) -> list[str]:
    count = 0
    while count < len(rest) and rest[count][:1] in tuple(signs):
        count += 1
    if not count:
        raise InvalidPatch(f"a line with one of {signs!r} must follow, not {rest[:1]}")
    return rest[count:]
