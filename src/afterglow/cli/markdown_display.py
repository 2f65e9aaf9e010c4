"""Terminal output of responses as markdown, for the chat."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.cli.display import Display, PlainDisplay

REDRAW_SECONDS = 0.05  # between two drawings of what is being written
REASONING_STYLE = "dim italic"
CODE_THEME = "ansi_dark"  # the colors of the terminal, without a background: copied code has no spaces around it
MAX_HIGHLIGHT_LINES = 200  # of code before a line: highlighting must not become slower with the length of the code
FENCE_PATTERN = re.compile(r"(?P<indentation>\s*)(?P<marker>`{3,}|~{3,})\s*(?P<language>[\w+#.-]*)[^`]*$")
LIST_ITEM_PATTERN = re.compile(r"([-*+]|\d{1,9}[.)])\s+\S")
HEADING_PATTERN = re.compile(r"#{1,6}\s+\S")


class MarkdownDisplay:
    """Markdown for terminals. A finished block, list item or line of code is printed once and never changed.

    Only what is being written is redrawn, and at most as much of it as fits on the screen. So a response of any length
    scrolls, and everything that was printed stays in the scrollback of the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn_at = 0.0
        self._reasoning = ""  # its last line
        self._block = ""  # complete lines of the block that is being written
        self._line = ""  # the incomplete line
        self._code: CodeBlock | None = None
        self._needs_gap = False  # a blank line before the next block
        self._in_list = False

    def __enter__(self) -> MarkdownDisplay:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.update(Text(""))
        self._live.stop()
        self._print_reasoning()
        if self._line:
            self._take_line(self._line)
        self._print_block()

    def write(self, part: OutputPart) -> None:
        """Print what is finished with this part and redraw the rest."""
        match part:
            case ReasoningDelta(text):
                self._write_reasoning(text)
            case TextDelta(text):
                self._write_text(text)
            case ToolCallDelta(_, arguments, _, name):
                self._write_text((f"\n\n`{name}` " if name else "") + arguments)

    def show_progress(self, done: int, total: int) -> None:
        """Show the progress of the prefill."""
        self._live.update(Text(f"prefill {100 * done // max(total, 1)} %", style="dim"), refresh=True)

    # --- drawing

    def _draw(self, content: RenderableType) -> None:
        """Draw what is being written, but not more often than the eye can follow."""
        now = time.monotonic()
        is_due = now - self._drawn_at >= REDRAW_SECONDS
        self._live.update(Excerpt(content, max(1, self._console.height - 1)), refresh=is_due)
        self._drawn_at = now if is_due else self._drawn_at

    def _print(self, content: RenderableType, *, soft_wrap: bool = False) -> None:
        self._live.update(Text(""))
        self._console.print(content, soft_wrap=soft_wrap)

    def _write_reasoning(self, text: str) -> None:
        complete, newline, self._reasoning = (self._reasoning + text).rpartition("\n")
        if newline:
            self._print(Text(complete, style=REASONING_STYLE))
        self._draw(Text(self._reasoning, style=REASONING_STYLE))

    def _print_reasoning(self) -> None:
        if self._reasoning:
            self._print(Text(self._reasoning, style=REASONING_STYLE))
            self._reasoning = ""

    def _write_text(self, text: str) -> None:
        self._print_reasoning()
        *complete_lines, self._line = (self._line + text).split("\n")
        for line in complete_lines:
            self._take_line(line)
        if self._code is not None:
            self._draw(self._code.highlight(self._line))
        elif not FENCE_PATTERN.match(self._line):
            self._draw(Markdown(self._block + self._line))

    # --- blocks

    def _take_line(self, line: str) -> None:
        """Add a complete line to the code or to the block, and print what it finishes."""
        if self._code is not None:
            if self._code.is_closed_by(line):
                self._code, self._needs_gap = None, True
            else:
                self._print(self._code.add_line(line), soft_wrap=True)  # so that copied code has no line breaks
        elif fence := FENCE_PATTERN.match(line):
            follows_text = bool(self._block)
            self._print_block()
            self._needs_gap = self._needs_gap or follows_text
            self._print_gap()
            self._code = CodeBlock(fence)
        elif not line.strip():
            self._take_blank_line()
        else:
            self._take_text_line(line)

    def _take_blank_line(self) -> None:
        """End a paragraph. A list item may go on after a blank line."""
        if self._block:
            self._block += "\n"
        if not self._in_list:
            self._print_block()

    def _take_text_line(self, line: str) -> None:
        starts_item = LIST_ITEM_PATTERN.match(line) is not None
        is_indented = line[0] in " \t"
        follows_blank = not self._block or self._block.endswith("\n\n")
        if starts_item or HEADING_PATTERN.match(line) or (follows_blank and not is_indented):
            self._print_block()
            self._in_list = starts_item
        if not self._block and self._in_list:  # text of a list item after code: without indentation it stays text
            line = line.lstrip()
        self._block += line + "\n"
        if HEADING_PATTERN.match(line):
            self._print_block()
            self._needs_gap = True

    def _print_block(self) -> None:
        block, self._block = self._block, ""
        if block.strip():
            needs_gap_after = block.endswith("\n\n")
            self._print_gap()
            self._print(Excerpt(Markdown(block)))
            self._needs_gap = needs_gap_after

    def _print_gap(self) -> None:
        if self._needs_gap:
            self._print(Text(""))
        self._needs_gap = False


class CodeBlock:
    """Code between two fences, highlighted line by line.

    >>> code = CodeBlock(FENCE_PATTERN.match("```python"))
    >>> code.add_line("x = 1").plain
    'x = 1'
    >>> code.is_closed_by("```")
    True
    """

    def __init__(self, fence: re.Match[str]) -> None:
        self._indentation, self._marker = len(fence["indentation"]), fence["marker"]
        self._syntax = Syntax("", fence["language"] or "text", theme=CODE_THEME)
        self._lines: list[str] = []

    def is_closed_by(self, line: str) -> bool:
        """Return whether a line is the closing fence: at least as many of the same characters, and nothing else."""
        text = line.strip()
        return len(text) >= len(self._marker) and set(text) == set(self._marker)

    def add_line(self, line: str) -> Text:
        """Add a complete line and return it highlighted."""
        highlighted = self.highlight(line)
        self._lines = [*self._lines, self._unindent(line)][-MAX_HIGHLIGHT_LINES:]
        return highlighted

    def highlight(self, line: str) -> Text:
        """Highlight a line after the lines so far, which may have opened a string or a comment."""
        lines = [*self._lines, self._unindent(line)]
        highlighted = self._syntax.highlight("\n".join(lines)).split("\n", allow_blank=True)
        return highlighted[len(lines) - 1] if len(lines) <= len(highlighted) else Text(lines[-1])

    def _unindent(self, line: str) -> str:
        """Remove the indentation of the fence."""
        prefix = line[: self._indentation]
        return line[self._indentation :] if not prefix.strip() else line.lstrip()


@dataclass(frozen=True)
class Excerpt:
    """Content without blank lines around it, and at most its last `max_lines` lines."""

    content: RenderableType
    max_lines: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.content, options.update(height=None), pad=False)
        filled = [index for index, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
        lines = lines[filled[0] : filled[-1] + 1] if filled else []
        for line in lines[-self.max_lines :] if self.max_lines else lines:
            yield from line
            yield Segment.line()


def choose_display(console: Console, *, markdown: bool) -> Display:
    """Return a markdown display if enabled and the terminal supports it, else a plain one."""
    supports_markdown = sys.stdout.isatty() and not console.is_dumb_terminal
    return MarkdownDisplay(console) if markdown and supports_markdown else PlainDisplay()
