"""Interactive chat: reads user messages and slash commands from the terminal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.markup import escape

from afterglow.api.conversation import Conversation
from afterglow.chat.output.response import Delta
from afterglow.cli.display import choose_display, format_statistics, format_truncation, show_response
from afterglow.cli.loop_guard import ResponseLoops, guard_deltas
from afterglow.cli.media import MediaFile, describe_media, extract_media_files, unquote_word
from afterglow.cli.settings import Settings
from afterglow.errors import AfterglowError, Cancelled
from afterglow.media.policy import Modality

HELP = """\
/regenerate      generate the last response again
/edit [TEXT]     replace the last user message and generate a response
/fork            continue in a copy of the conversation; /back returns to the original
/rewind N        keep only the first N messages
/history         list the messages
/save FILE       save the conversation to a file; /load FILE loads it
/system TEXT     start a new conversation with this system prompt
/image FILE      attach an image to the next message; dragging a file into the line does the same
/audio FILE      attach an audio file to the next message
/stats           show or hide statistics
/exit            exit (or Ctrl-D)
Alt-Enter inserts a newline; so does \\ at the end of a line. Ctrl-C stops a response."""


class Repl:
    """Read-eval-print loop of one conversation and its forks."""

    def __init__(
        self, conversation: Conversation, settings: Settings, console: Console, initial_files: Sequence[MediaFile] = ()
    ) -> None:
        self._conversation = conversation
        self._pending_files: list[MediaFile] = []  # attached to the next message
        self._initial_files = initial_files  # attached to the first message
        self._fork_parents: list[Conversation] = []
        self._console = console
        self._markdown = settings.markdown
        self._stats_shown = settings.stats
        self._loop_guard = settings.loop_guard
        self._read_line = self._make_line_reader()
        self._commands: dict[str, Callable[[str], None]] = {
            "regenerate": lambda _: self._show_response(self._conversation.stream_regeneration()),
            "edit": self._edit,
            "fork": self._fork,
            "back": self._return_from_fork,
            "rewind": self._rewind,
            "history": self._print_history,
            "save": self._save,
            "load": self._load,
            "system": self._restart_with_system,
            "image": functools.partial(self._attach_file, "image"),
            "audio": functools.partial(self._attach_file, "audio"),
            "stats": self._toggle_stats,
            "help": lambda _: self._console.print(HELP, markup=False, highlight=False),
        }

    def run(self) -> None:
        """Run until the user exits."""
        self._run_safely(lambda: self._attach_files(self._initial_files))
        while (line := self._read_input()) is not None:
            self._run_safely(functools.partial(self._handle_line, line))

    def _run_safely(self, action: Callable[[], None]) -> None:
        """Run an action and print its error, so that the conversation continues."""
        try:
            action()
        except ResponseLoops as loop:
            self._print_note(str(loop))
        except (KeyboardInterrupt, Cancelled):
            self._print_note("stopped; the message was discarded")
        except AfterglowError as error:
            self._console.print(f"[red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False)

    def _handle_line(self, line: str) -> None:
        """Run a command, or send a user message with the media files named in the line."""
        is_command = line.startswith("/") and line[1:].partition(" ")[0] in self._commands
        text, files = (line, []) if is_command else extract_media_files(line)
        if text.startswith("/"):
            name, _, rest = text[1:].partition(" ")
            if name not in self._commands:
                return self._print_note(f"unknown command /{name}; /help lists the commands")
            return self._commands[name](rest.strip())
        self._attach_files(files)
        if text:
            attached, self._pending_files = self._pending_files, []
            images, audio = ([path for kind, path in attached if kind == modality] for modality in ("image", "audio"))
            self._show_response(self._conversation.stream_deltas(text, images=images, audio=audio))

    # --- input

    def _make_line_reader(self) -> Callable[[], str]:
        """Return the function that reads a line, with editing and history if the terminal supports it."""
        if self._console.is_dumb_terminal or not sys.stdin.isatty():
            return lambda: self._console.input("> ")
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        session: PromptSession[str] = PromptSession(history=InMemoryHistory(), key_bindings=keys)
        return lambda: session.prompt("> ")

    def _read_input(self) -> str | None:
        """Read the next input, which may have several lines; None to exit."""
        lines = []
        while True:
            try:
                line = self._read_line()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return None
            if not line.endswith("\\"):
                break
            lines.append(line[:-1])
        text = "\n".join([*lines, line]).strip()
        return None if text in ("/exit", "/quit", "/bye") else text

    # --- responses

    def _show_response(self, deltas: Iterator[Delta]) -> None:
        deltas = guard_deltas(deltas, enabled=self._loop_guard)
        show_response(deltas, choose_display(self._console, markdown=self._markdown))
        response = self._conversation.last_response
        if response is None:
            return
        if response.truncation is not None:
            self._print_note(format_truncation(response.truncation))
        if self._stats_shown:
            self._print_note(format_statistics(response))

    def _print_note(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False)

    # --- commands

    def _edit(self, text: str) -> None:
        messages = self._conversation.messages
        user_messages = [index for index, message in enumerate(messages) if message.role == "user"]
        if not user_messages:
            return self._print_note("there is no user message yet")
        if not text:
            self._print_note(messages[user_messages[-1]].content)
            return self._print_note("usage: /edit TEXT")
        self._conversation.edit(user_messages[-1], text)
        self._show_response(self._conversation.stream_regeneration())

    def _fork(self, _: str) -> None:
        self._fork_parents.append(self._conversation)
        self._conversation = self._conversation.fork()
        self._print_note(f"forked a conversation of {len(self._conversation.messages)} messages; /back returns")

    def _return_from_fork(self, _: str) -> None:
        if not self._fork_parents:
            return self._print_note("there is no fork to return from")
        self._conversation = self._fork_parents.pop()
        self._print_note(f"returned to the conversation of {len(self._conversation.messages)} messages")

    def _rewind(self, text: str) -> None:
        if not text.lstrip("-").isdigit():
            return self._print_note("usage: /rewind N")
        self._conversation.rewind(int(text))
        self._print_note(f"{len(self._conversation.messages)} messages left")

    def _print_history(self, _: str) -> None:
        for index, message in enumerate(self._conversation.messages):
            media = "".join(f"[{attachment.kind}] " for attachment in message.attachments)
            self._print_note(f"{index} {message.role}: {media}{message.content}")

    def _save(self, name: str) -> None:
        if not name:
            return self._print_note("usage: /save FILE")
        try:
            self._conversation.save(Path(name).expanduser())
        except OSError as error:
            return self._print_note(f"{name} cannot be written: {error.strerror}")
        self._print_note(f"saved {len(self._conversation.messages)} messages to {name}")

    def _load(self, name: str) -> None:
        self._conversation.load(Path(name).expanduser())
        self._print_note(f"loaded {len(self._conversation.messages)} messages")

    def _attach_file(self, kind: Modality, name: str) -> None:
        if not name:
            return self._print_note(f"usage: /{kind} FILE")
        self._attach_files([(kind, Path(unquote_word(name)).expanduser())])

    def _attach_files(self, files: Sequence[MediaFile]) -> None:
        """Attach files to the next message and print one line for each."""
        for kind, path in files:
            self._print_note(describe_media(kind, path))
            self._pending_files.append((kind, path))

    def _restart_with_system(self, text: str) -> None:
        self._conversation = Conversation(self._conversation.model, system=text, **self._conversation.options)
        self._print_note("started a new conversation")

    def _toggle_stats(self, _: str) -> None:
        self._stats_shown = not self._stats_shown
        self._print_note(f"statistics are {'shown' if self._stats_shown else 'hidden'}")
