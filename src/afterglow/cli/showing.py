"""Answers in a terminal: markdown as it streams, thoughts dimmed, tool calls named, and what it all took."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text as Styled

from afterglow.chat.parts import CallPart, Part, Reasoning, Text
from afterglow.chat.reply import Delta, Turn


class Page(Protocol):
    """What an answer is written on."""

    def __enter__(self) -> Page: ...
    def __exit__(self, *error: object) -> None: ...
    def write(self, part: Part) -> None: ...
    def progress(self, done: int, total: int) -> None: ...


class PlainPage:
    """For pipes, and terminals that cannot move the cursor: the text and nothing else."""

    def __init__(self) -> None:
        self._open = False  # a line is not ended yet

    def __enter__(self) -> PlainPage:
        return self

    def __exit__(self, *error: object) -> None:
        if self._open:
            print()

    def write(self, part: Part) -> None:
        """Write a part; thoughts are not for pipes."""
        match part:
            case Text(text):
                print(text, end="", flush=True)
                self._open = not text.endswith("\n")
            case CallPart(_, arguments, _, name):
                print(f"\n{name}: " if name else "", arguments, sep="", end="", flush=True)
                self._open = True
            case Reasoning():
                pass

    def progress(self, done: int, total: int) -> None:
        """Nothing to show."""


class MarkdownPage:
    """For terminals. Blocks that are complete are printed for good; only the last one is drawn again and again, so
    that an answer longer than the screen scrolls as it should."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._block = ""
        self._thought = ""

    def __enter__(self) -> MarkdownPage:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.update(Styled(""))
        self._live.stop()
        self._print_thought()
        if self._block.strip():
            self._console.print(Markdown(self._block))

    def write(self, part: Part) -> None:
        match part:
            case Reasoning(text):
                self._thought += text
                self._live.update(Styled(self._thought[-2000:], style="dim italic"), refresh=True)
            case Text(text):
                self._print_thought()
                self._block += text
                self._print_complete()
                self._live.update(Markdown(self._block), refresh=True)
            case CallPart(_, arguments, _, name):
                self._print_thought()
                self._block += (f"\n\n`{name}` " if name else "") + arguments
                self._live.update(Markdown(self._block), refresh=True)

    def progress(self, done: int, total: int) -> None:
        """How much of the prompt has been read."""
        self._live.update(Styled(f"reading {100 * done // max(total, 1)} %", style="dim"), refresh=True)

    def _print_thought(self) -> None:
        if self._thought:
            self._live.update(Styled(""))
            self._console.print(Styled(self._thought, style="dim italic"))
            self._thought = ""

    def _print_complete(self) -> None:
        cut = complete_blocks(self._block)
        if cut:
            self._live.update(Styled(""))
            self._console.print(Markdown(self._block[:cut]))
            self._block = self._block[cut:]


def complete_blocks(text: str) -> int:
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


def show(deltas: Iterable[Delta], page: Page) -> None:
    """Write an answer as it comes."""
    with page:
        for delta in deltas:
            if delta.progress is not None:
                page.progress(delta.progress.done, delta.progress.total)
            for part in delta.parts:
                page.write(part)


def page_for(console: Console, *, markdown: bool) -> Page:
    """Markdown where there is a terminal that can show it."""
    able = sys.stdout.isatty() and not console.is_dumb_terminal
    return MarkdownPage(console) if markdown and able else PlainPage()


def statistics(turn: Turn) -> str:
    """What an answer took, in one line."""
    usage = turn.usage
    speed = f"{usage.generated / usage.decode_time:.1f} tokens/s" if usage.decode_time > 0 else "-"
    wait = usage.queue_time + usage.prefill_time
    guesses = f", drafted {usage.drafted}, accepted {usage.accepted}" if usage.drafted else ""
    return (
        f"{usage.cached} of {usage.prompt} prompt tokens cached, first token after {wait:.2f} s, "
        f"{usage.generated} tokens at {speed}{guesses}"
    )
