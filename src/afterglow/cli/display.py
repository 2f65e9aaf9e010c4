"""Terminal output of responses: streamed markdown, dimmed reasoning, tool calls and statistics."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.output.response import ChatResponse, Delta
from afterglow.chat.prompt import Truncation


class Display(Protocol):
    """Output of one response."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *error: object) -> None: ...
    def write(self, part: OutputPart) -> None: ...
    def show_progress(self, done: int, total: int) -> None: ...


class PlainDisplay:
    """Plain text for pipes and dumb terminals."""

    def __init__(self) -> None:
        self._line_open = False  # the last line has no newline yet

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        if self._line_open:
            print()

    def write(self, part: OutputPart) -> None:
        """Print a part. Reasoning is not printed."""
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
        """Show nothing."""


class MarkdownDisplay:
    """Markdown for terminals. Complete blocks are printed once; only the last block is redrawn, so that a response
    longer than the screen scrolls correctly."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._block = ""
        self._reasoning = ""

    def __enter__(self) -> MarkdownDisplay:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.update(Text(""))
        self._live.stop()
        self._print_reasoning()
        if self._block.strip():
            self._console.print(Markdown(self._block))

    def write(self, part: OutputPart) -> None:
        match part:
            case ReasoningDelta(text):
                self._reasoning += text
                self._live.update(Text(self._reasoning[-2000:], style="dim italic"), refresh=True)
            case TextDelta(text):
                self._print_reasoning()
                self._block += text
                if end := find_complete_blocks_end(self._block):
                    self._live.update(Text(""))
                    self._console.print(Markdown(self._block[:end]))
                    self._block = self._block[end:]
                self._live.update(Markdown(self._block), refresh=True)
            case ToolCallDelta(_, arguments, _, name):
                self._print_reasoning()
                self._block += (f"\n\n`{name}` " if name else "") + arguments
                self._live.update(Markdown(self._block), refresh=True)

    def show_progress(self, done: int, total: int) -> None:
        """Show the progress of the prefill."""
        self._live.update(Text(f"prefill {100 * done // max(total, 1)} %", style="dim"), refresh=True)

    def _print_reasoning(self) -> None:
        if self._reasoning:
            self._live.update(Text(""))
            self._console.print(Text(self._reasoning, style="dim italic"))
            self._reasoning = ""


def find_complete_blocks_end(text: str) -> int:
    """Return the length of the markdown that further text cannot change: up to the last blank line outside code fences.

    >>> find_complete_blocks_end("one\\n\\ntwo")
    5
    """
    end, position, in_fence = 0, 0, False
    for line in text.splitlines(keepends=True):
        position += len(line)
        if line.lstrip().startswith(("```", "~~~")):
            in_fence = not in_fence
        if not line.strip() and line.endswith("\n") and not in_fence:
            end = position
    return end


def show_response(deltas: Iterable[Delta], display: Display) -> None:
    """Show a response as it streams."""
    with display:
        for delta in deltas:
            if delta.progress is not None:
                display.show_progress(delta.progress.computed_entries, delta.progress.prompt_entries)
            for part in delta.parts:
                display.write(part)


def choose_display(console: Console, *, markdown: bool) -> Display:
    """Return a markdown display if enabled and the terminal supports it, else a plain one."""
    supports_markdown = sys.stdout.isatty() and not console.is_dumb_terminal
    return MarkdownDisplay(console) if markdown and supports_markdown else PlainDisplay()


def format_statistics(response: ChatResponse) -> str:
    """Format the usage of a response as one line."""
    usage = response.usage
    speed = f"{usage.generated_tokens / usage.decode_seconds:.1f} tokens/s" if usage.decode_seconds > 0 else "-"
    first_token_seconds = usage.queue_seconds + usage.prefill_seconds
    drafts = f", drafted {usage.draft_tokens}, accepted {usage.accepted_tokens}" if usage.draft_tokens else ""
    return (
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached, "
        f"first token after {first_token_seconds:.2f} s, {usage.generated_tokens} tokens at {speed}{drafts}"
    )


def format_truncation(truncation: Truncation) -> str:
    """Format what was dropped from a prompt as one line."""
    return (
        f"the context is full: the prompt leaves out {truncation.dropped_messages} earlier messages "
        f"({truncation.dropped_tokens} tokens); --context sets its length"
    )
