"""Loop guard of the terminal: stops a response that repeats the same text without end, as small models do."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import typer

from afterglow.chat.output.response import Delta

MIN_LOOP_TOKENS = 192  # shorter repetitions occur in tables, poems and lists of numbers
MIN_REPETITIONS = 4
MAX_PERIOD_TOKENS = 256
CHECK_EVERY_TOKENS = 16


class ResponseLoops(KeyboardInterrupt):
    """The response repeats itself. Handled like Ctrl-C: the reader keeps the partial response."""

    def __init__(self, period: int) -> None:
        super().__init__(period)
        self.period = period

    def __str__(self) -> str:
        return (
            f"stopped: the response repeats the same {self.period} tokens; a higher --temperature or --repeat-penalty "
            "helps, --no-loop-guard turns this check off"
        )


def find_loop(tokens: Sequence[int | str]) -> int:
    """Return the length of the text that the last tokens repeat; 0 if they do not loop.

    A loop is at least 4 repetitions of at most 256 tokens, and at least 192 tokens long.

    >>> find_loop([1, 2, 3] * 64), find_loop([1, 2, 3] * 63)
    (3, 0)
    """
    for period in range(1, MAX_PERIOD_TOKENS + 1):
        length = max(MIN_LOOP_TOKENS, MIN_REPETITIONS * period)
        if length > len(tokens):
            return 0
        if tokens[-period:] == tokens[-2 * period : -period] and tokens[-length:-period] == tokens[period - length :]:
            return period
    return 0


class LoopGuard:
    """Watches the tokens, or pieces of text, of one response."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._pieces: list[int | str] = []

    def add(self, piece: int | str) -> None:
        """Add the next token; raise `ResponseLoops` if the response repeats itself."""
        self._pieces.append(piece)
        is_due = self._enabled and len(self._pieces) % CHECK_EVERY_TOKENS == 0
        if is_due and (period := find_loop(self._pieces)):
            raise ResponseLoops(period)


def guard_deltas(deltas: Iterable[Delta], *, enabled: bool) -> Iterator[Delta]:
    """Yield the deltas of a response; raise `ResponseLoops` if it repeats itself."""
    guard = LoopGuard(enabled=enabled)
    for delta in deltas:
        yield delta
        if delta.token is not None:
            guard.add(delta.token.token)


@contextmanager
def exit_on_loop() -> Iterator[None]:
    """Print why a response was stopped, and exit with status 1."""
    try:
        yield
    except ResponseLoops as loop:
        print(f"afterglow: {loop}", file=sys.stderr)
        raise typer.Exit(1) from None
