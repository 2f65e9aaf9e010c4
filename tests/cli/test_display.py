"""Terminal output: every finished block and line of code is printed once, in order, and never changed."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from afterglow.chat.output.parts import ReasoningDelta, TextDelta
from afterglow.cli.markdown_display import FENCE_PATTERN, CodeBlock, MarkdownDisplay


def render(text: str, *, reasoning: str = "") -> list[str]:
    """Lines of a response that is written word by word, as they are at the end."""
    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    with MarkdownDisplay(console) as display:
        for piece in re.findall(r"\w+|\W", reasoning):
            display.write(ReasoningDelta(piece))
        for piece in re.findall(r"\w+|\W", text):
            display.write(TextDelta(piece))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().rstrip().splitlines()]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one", ["one"]),
        ("one\ntwo", ["one two"]),
        ("one\n\n\ntwo", ["one", "", "two"]),
        ("a **b** `c`", ["a b c"]),
        ("# Title\ntext", ["Title", "", "text"]),
        ("1. one\n2. two\n   - nested\n3. three", [" 1 one", " 2 two", "    • nested", " 3 three"]),
        ("- one\n\n- two\n\ntext", [" • one", "", " • two", "", "text"]),
        ("- one\n\n  more\n- two", [" • one", "   more", " • two"]),
        ("a\n```python\nx = 1\n\n  y\n```\nb", ["a", "", "x = 1", "", "  y", "", "b"]),
        ("```\nnot closed", ["not closed"]),
        ("````\n```\ninner\n```\n````\nafter", ["```", "inner", "```", "", "after"]),
        ("~~~\n```\n~~~", ["```"]),
        ("- item\n\n  ```sh\n  ls\n    -l\n  ```\n\n  text", [" • item", "", "ls", "  -l", "", "text"]),
        ("|a|b|\n|-|-|\n|1|2|\n\nafter", [" a  b", " ────", " 1  2", "", "after"]),
        ("`code` at the start", ["code at the start"]),
    ],
)
def test_markdown_is_printed_block_by_block(text: str, lines: list[str]) -> None:
    assert [line.strip() if line.strip() == "Title" else line for line in render(text)] == lines


def test_lines_of_code_are_neither_wrapped_nor_changed() -> None:
    long_line = "x = [" + ", ".join(map(str, range(60))) + "]  # **not bold**"
    assert "".join(render(f"```python\n{long_line}\n```")) == long_line


def test_reasoning_is_printed_before_the_answer() -> None:
    assert render("answer", reasoning="first\nsecond") == ["first", "second", "answer"]


def test_a_line_of_code_is_highlighted_after_the_lines_before_it() -> None:
    fence = FENCE_PATTERN.match("```python")
    assert fence is not None
    code = CodeBlock(fence)
    plain = code.highlight("x = 1")
    code.add_line('"""')
    assert code.highlight("x = 1").spans != plain.spans  # now it is inside a string
