"""Answers in a terminal: markdown as it streams, thoughts dimmed, tool calls named, and what it all took."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text as Styled

from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.response import ChatResponse, Delta


class Display(Protocol):
    """What an answer is written on."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *error: object) -> None: ...
    def write(self, part: OutputPart) -> None: ...
    def show_progress(self, done: int, total: int) -> None: ...


class PlainDisplay:
    """For pipes, and terminals that cannot move the cursor: the text and nothing else."""

    def __init__(self) -> None:
        self._line_open = False  # a line is not ended yet

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        if self._line_open:
            print()

    def write(self, part: OutputPart) -> None:
        """Write a part; thoughts are not for pipes."""
        match part:
            case TextDelta(text):
                print(text, end="", flush=True)
                self._line_open = not text.endswith("\n")
            case ToolCallDelta(_, arguments, _, name):
                print(f"\n{name}: " if name else "", arguments, sep="", end="", flush=True)
                self._line_open = True
            case ReasoningDelta():
                pass

    def show_progress(self, done: int, total: int) -> None:
        """Nothing to show."""


class MarkdownDisplay:
    """For terminals. Blocks that are complete are printed for good; only the last one is drawn again and again, so
    that an answer longer than the screen scrolls as it should."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._block = ""
        self._reasoning = ""

    def __enter__(self) -> MarkdownDisplay:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.update(Styled(""))
        self._live.stop()
        self._print_reasoning()
        if self._block.strip():
            self._console.print(Markdown(self._block))

    def write(self, part: OutputPart) -> None:
        match part:
            case ReasoningDelta(text):
                self._reasoning += text
                self._live.update(Styled(self._reasoning[-2000:], style="dim italic"), refresh=True)
            case TextDelta(text):
                self._print_reasoning()
                self._block += text
                self._print_complete_blocks()
                self._live.update(Markdown(self._block), refresh=True)
            case ToolCallDelta(_, arguments, _, name):
                self._print_reasoning()
                self._block += (f"\n\n`{name}` " if name else "") + arguments
                self._live.update(Markdown(self._block), refresh=True)

    def show_progress(self, done: int, total: int) -> None:
        """How much of the prompt has been read."""
        self._live.update(Styled(f"reading {100 * done // max(total, 1)} %", style="dim"), refresh=True)

    def _print_reasoning(self) -> None:
        if self._reasoning:
            self._live.update(Styled(""))
            self._console.print(Styled(self._reasoning, style="dim italic"))
            self._reasoning = ""

    def _print_complete_blocks(self) -> None:
        cut = find_complete_blocks_end(self._block)
        if cut:
            self._live.update(Styled(""))
            self._console.print(Markdown(self._block[:cut]))
            self._block = self._block[cut:]


def find_complete_blocks_end(text: str) -> int:
    """The length of the beginning of a markdown text that no more text can change: up to the last blank line that is
    not inside a code fence.

    >>> complete_blocks("one\\n\\ntwo")
    5
    """
    end, position, fenced = 0, 0, False
    for line in text.splitlines(keepends=True):
        position += len(line)
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        if not line.strip() and line.endswith("\n") and not fenced:
            end = position
    return end


def show_response(deltas: Iterable[Delta], display: Display) -> None:
    """Write an answer as it comes."""
    with display:
        for delta in deltas:
            if delta.progress is not None:
                display.show_progress(delta.progress.computed_entries, delta.progress.prompt_entries)
            for part in delta.parts:
                display.write(part)


def choose_display(console: Console, *, markdown: bool) -> Display:
    """Markdown where there is a terminal that can show it."""
    able = sys.stdout.isatty() and not console.is_dumb_terminal
    return MarkdownDisplay(console) if markdown and able else PlainDisplay()


def format_statistics(response: ChatResponse) -> str:
    """What an answer took, in one line."""
    usage = response.usage
    speed = f"{usage.generated_tokens / usage.decode_seconds:.1f} tokens/s" if usage.decode_seconds > 0 else "-"
    wait = usage.queue_seconds + usage.prefill_seconds
    guesses = f", drafted {usage.draft_tokens}, accepted {usage.accepted_tokens}" if usage.draft_tokens else ""
    return (
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached, first token after {wait:.2f} s, "
        f"{usage.generated_tokens} tokens at {speed}{guesses}"
    )
