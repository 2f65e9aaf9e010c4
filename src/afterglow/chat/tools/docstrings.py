"""What a docstring says about a function and its parameters, in the three common styles, as well as it can be found."""

from __future__ import annotations

import re

GOOGLE_SECTION = re.compile(r"^(Args|Arguments|Parameters):\s*$")
GOOGLE_PARAMETER = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
NUMPY_SECTION = re.compile(r"^Parameters\s*\n-{3,}\s*$", re.MULTILINE)
NUMPY_PARAMETER = re.compile(r"^\*{0,2}(\w+)\s*(?::.*)?$")
SPHINX_PARAMETER = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")
SECTION_START = re.compile(r"^(?:[A-Z]\w*(?: \w+)?:\s*$|:\w+)")
UNDERLINE = re.compile(r"^-{3,}\s*$")


def parse_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """The description, and what is said about each parameter.

    >>> described("Add.\\n\\nArgs:\\n    a: The first.")
    ('Add.', {'a': 'The first.'})
    """
    lines = docstring.splitlines()
    end = next((index for index in range(len(lines)) if _is_section_start(lines, index)), len(lines))
    notes = _parse_google(lines) | _parse_numpy(lines) | _parse_sphinx(lines)
    return "\n".join(lines[:end]).strip(), {name: " ".join(note.split()) for name, note in notes.items()}


def _is_section_start(lines: list[str], index: int) -> bool:
    underlined = index + 1 < len(lines) and UNDERLINE.match(lines[index + 1])
    return bool(SECTION_START.match(lines[index]) or underlined)


def _parse_google(lines: list[str]) -> dict[str, str]:
    start = next((index + 1 for index, line in enumerate(lines) if GOOGLE_SECTION.match(line)), len(lines))
    block = []
    for line in lines[start:]:
        if line.strip() and not line[0].isspace():
            break
        block.append(line)
    indents = [len(line) - len(line.lstrip()) for line in block if line.strip()]
    return _collect_descriptions(block, GOOGLE_PARAMETER, indents[0] if indents else 0)


def _parse_numpy(lines: list[str]) -> dict[str, str]:
    start = next(
        (index + 2 for index in range(len(lines) - 1) if NUMPY_SECTION.match("\n".join(lines[index : index + 2]))),
        len(lines),
    )
    end = next((index for index in range(start, len(lines)) if _is_section_start(lines, index)), len(lines))
    return _collect_descriptions(lines[start:end], NUMPY_PARAMETER, 0)


def _parse_sphinx(lines: list[str]) -> dict[str, str]:
    return _collect_descriptions(
        [line for line in lines if not line.startswith(":") or SPHINX_PARAMETER.match(line)], SPHINX_PARAMETER, 0
    )


def _collect_descriptions(lines: list[str], parameter: re.Pattern[str], indent: int) -> dict[str, str]:
    """Each parameter's note: its first line, and the deeper lines that follow it."""
    notes: dict[str, str] = {}
    name = None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        found = parameter.match(line) if depth == indent else None
        if found:
            name = found[1]
            notes[name] = found[2] if parameter.groups > 1 else ""
        elif name is not None and line.strip() and depth > indent:
            notes[name] += " " + line
        elif line.strip():
            name = None
    return notes
