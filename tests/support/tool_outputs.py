"""What models of each family write, and what it means. Shared by the tests of readers and grammars."""

from __future__ import annotations

from support.tool_outputs_json import BEGIN, END, JSON, SECTION, fenced, kimi, named
from support.tool_outputs_text import TEXT, gemma, glm, quotes, xml
from support.tool_records import NOW, PARIS, TOOLS, Recorded, item, tag

RECORDED: list[Recorded] = [*JSON, *TEXT]
__all__ = [
    "BEGIN",
    "END",
    "NOW",
    "PARIS",
    "RECORDED",
    "SECTION",
    "TOOLS",
    "Recorded",
    "fenced",
    "gemma",
    "glm",
    "item",
    "kimi",
    "named",
    "quotes",
    "tag",
    "xml",
]
