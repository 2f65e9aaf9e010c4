"""Input line of the chat: editing keys, history across sessions and tab completion."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle
from rich.console import Console

from afterglow.cli.keyboard import defer_signals

MAX_HISTORY_BYTES = 1 << 20
Candidates = Callable[[], Iterable[str]]


class LineEditor:
    """Reads lines from the terminal, with editing if the terminal supports it."""

    def __init__(self, console: Console, history: History, completer: Completer) -> None:
        self._console = console
        self._session: PromptSession[str] | None = None
        if sys.stdin.isatty() and not console.is_dumb_terminal:
            self._session = PromptSession(
                history=history,
                completer=completer,
                complete_while_typing=False,
                complete_style=CompleteStyle.READLINE_LIKE,
                key_bindings=create_key_bindings(),
                reserve_space_for_menu=0,
            )

    def read(self, prompt: str) -> str:
        """Read a line. Ctrl-D raises `EOFError`. Ctrl-C clears the line; if it is empty, it raises
        `KeyboardInterrupt`."""
        if self._session is None:
            return self._console.input(prompt)
        application = self._session.app

        def exit_application() -> None:
            if application.is_running and not application.is_done:
                application.exit(exception=EOFError)

        def exit_from_signal() -> None:
            if application.loop is not None:
                application.loop.call_soon_threadsafe(exit_application)

        # An exception in one of its tasks would leave a task behind that makes the terminal raw when it is deleted.
        with defer_signals(exit_from_signal) as signals:
            return self._session.prompt(prompt, pre_run=lambda: exit_application() if signals else None)


def create_key_bindings() -> KeyBindings:
    """Return the keys that differ from the default: Alt-Enter inserts a newline, Ctrl-C clears the line."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


# --- history


class PrivateFileHistory(FileHistory):
    """History in a file that only the user can read. A line that cannot be written is only kept in memory."""

    def store_string(self, string: str) -> None:
        """Append a line to the file."""
        with contextlib.suppress(OSError):
            super().store_string(string)


def open_history(path: Path | None) -> History:
    """Open the history file; without one, or if it cannot be written, keep the history in memory."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "rb+") as file:
            os.fchmod(file.fileno(), 0o600)
            if os.path.getsize(path) > MAX_HISTORY_BYTES:
                recent = drop_old_lines(file.read())
                file.seek(0)
                file.truncate()
                file.write(recent)
    except OSError:
        return InMemoryHistory()
    return PrivateFileHistory(path)


def drop_old_lines(content: bytes) -> bytes:
    """Return the second half of a history file. Its entries start with a blank line.

    >>> drop_old_lines(b"\\n# 1\\n+one\\n\\n# 2\\n+two\\n\\n# 3\\n+three\\n")
    b'\\n# 3\\n+three\\n'
    """
    _, separator, recent = content[len(content) // 2 :].partition(b"\n\n#")
    return b"\n#" + recent if separator else b""


# --- completion


class CommandCompleter(Completer):
    """Completes slash commands and their arguments.

    Args:
        commands: Names of the commands, each with a function that returns the candidates for its argument. None: it has
            no argument.
        path_commands: Names of the commands whose argument is a path.
    """

    def __init__(self, commands: Mapping[str, Candidates | None], path_commands: Iterable[str]) -> None:
        self._commands = commands
        self._path_commands = frozenset(path_commands)
        self._path_completer = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Yield the completions at the cursor."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, argument = text[1:].partition(" ")
        if not space:
            for command, candidates in self._commands.items():
                if command.startswith(name):
                    has_argument = candidates is not None or command in self._path_commands
                    yield Completion(command + " " * has_argument, start_position=-len(name), display=f"/{command}")
        elif name in self._path_commands:
            yield from self._path_completer.get_completions(Document(argument, len(argument)), complete_event)
        elif (candidates := self._commands.get(name)) is not None:
            for candidate in candidates():
                if candidate.startswith(argument):
                    yield Completion(candidate, start_position=-len(argument))
