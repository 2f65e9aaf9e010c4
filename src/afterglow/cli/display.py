"""Terminal output of responses: plain text, statistics and notes. Markdown is in `markdown_display`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

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


def show_response(deltas: Iterable[Delta], display: Display) -> None:
    """Show a response as it streams."""
    with display:
        for delta in deltas:
            if delta.progress is not None:
                display.show_progress(delta.progress.computed_entries, delta.progress.prompt_entries)
            for part in delta.parts:
                display.write(part)


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
    """Format what was dropped from a prompt, or summarized, as one line."""
    compaction = truncation.compaction
    if compaction is not None:
        count = compaction.summaries_written
        origin = "an earlier summary" if not count else "a new summary" if count == 1 else f"a summary in {count} parts"
        return (
            f"the context is full: {origin} replaces {compaction.summarized_messages} earlier messages "
            f"({compaction.tokens_before} tokens became {compaction.tokens_after}); --context sets its length"
        )
    reason = f"; no summary: {truncation.fallback}" if truncation.fallback else ""
    return (
        f"the context is full: the prompt leaves out {truncation.dropped_messages} earlier messages "
        f"({truncation.dropped_tokens} tokens){reason}; --context sets its length"
    )


def format_limit(response: ChatResponse, context: int) -> str | None:
    """Format the limit at which a response stopped as one line; None if it is complete."""
    if response.finish_reason != "length":
        return None
    usage = response.usage
    if usage.prompt_tokens + usage.generated_tokens < context:
        return f"stopped at the token limit of {usage.generated_tokens:,}; --max-tokens sets it"
    return f"stopped at the token limit: the context of {context:,} tokens is full; --context sets its length"
