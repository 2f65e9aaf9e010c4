"""The conversation in a terminal: lines that are questions, and lines that are commands."""

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
from afterglow.chat.response import Delta
from afterglow.cli.display import choose_display, format_statistics, show_response
from afterglow.cli.media import (
    MODALITY_LABELS,
    MediaFile,
    describe_media,
    extract_media_files,
    group_by_modality,
    unquote_word,
)
from afterglow.cli.settings import Settings
from afterglow.errors import AfterglowError, Cancelled
from afterglow.media.policy import Modality

HELP = """\
/regenerate      answer the last question again
/edit [TEXT]     change the last question and answer it
/fork            go on in a copy; /back returns to the one before
/rewind N        keep the first N messages
/history         the messages so far
/save FILE       write the conversation to a file; /load FILE reads one
/system TEXT     begin anew with another system prompt
/image FILE      show a picture with the next question; so does a file that is dragged into a line
/audio FILE      the same with a sound
/stats           show or hide what answers take
/exit            end (or Ctrl-D)
Alt-Enter begins a new line; so does a line that ends with \\. Ctrl-C stops an answer."""


class Repl:
    """Reads lines until the person ends it."""

    def __init__(
        self, conversation: Conversation, settings: Settings, console: Console, initial_files: Sequence[MediaFile] = ()
    ) -> None:
        self._conversation = conversation
        self._pending_files: list[MediaFile] = []  # pictures and sounds that go with the next question
        self._initial_files = initial_files  # before the first one
        self._fork_parents: list[Conversation] = []  # those that were forked
        self._console = console
        self._markdown = settings.markdown
        self._stats_shown = settings.stats
        self._read_line = self._make_line_reader()
        self._commands: dict[str, Callable[[str], None]] = {
            "regenerate": self._regenerate,
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
        """Until the person ends it."""
        self._run_safely(lambda: self._attach_files(self._initial_files))
        while (line := self._read_input()) is not None:
            self._run_safely(functools.partial(self._handle_line, line))

    def _run_safely(self, action: Callable[[], None]) -> None:
        """Do something; what goes wrong is said, and the conversation goes on."""
        try:
            action()
        except (KeyboardInterrupt, Cancelled):
            self._print_note("stopped; the question was not kept")
        except AfterglowError as error:
            self._console.print(f"[red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False)

    def _handle_line(self, line: str) -> None:
        """A question with the pictures and sounds that were dragged into it, or a command."""
        known = line[1:].partition(" ")[0] in self._commands if line.startswith("/") else False
        question, dragged = (line, []) if known else extract_media_files(line)
        if question.startswith("/"):
            return self._run_command(question[1:])
        self._attach_files(dragged)
        if question:
            ready, self._pending_files = self._pending_files, []
            self._show_response(self._conversation.stream_deltas(question, **group_by_modality(ready)))

    # --- lines

    def _make_line_reader(self) -> Callable[[], str]:
        """How lines are read: with editing and history where the terminal can."""
        if self._console.is_dumb_terminal or not sys.stdin.isatty():
            return lambda: self._console.input("> ")
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        session: PromptSession[str] = PromptSession(history=InMemoryHistory(), key_bindings=keys)
        return lambda: session.prompt("> ")

    def _read_input(self) -> str | None:
        """What the person says next; None where they want to end."""
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

    # --- answers

    def _show_response(self, deltas: Iterator[Delta]) -> None:
        show_response(deltas, choose_display(self._console, markdown=self._markdown))
        if self._stats_shown and self._conversation.last_response is not None:
            self._print_note(format_statistics(self._conversation.last_response))

    def _print_note(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False)

    # --- commands

    def _run_command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name not in self._commands:
            self._print_note(f"there is no command /{name}; /help lists them")
            return
        self._commands[name](rest.strip())

    def _regenerate(self, _: str) -> None:
        self._show_response(self._conversation.stream_regeneration())

    def _edit(self, text: str) -> None:
        questions = [index for index, one in enumerate(self._conversation.messages) if one.role == "user"]
        if not questions:
            return self._print_note("there is no question yet")
        if not text:
            self._print_note(self._conversation.messages[questions[-1]].content)
            return self._print_note("write /edit and the new question")
        self._conversation.edit(questions[-1], text)
        self._show_response(self._conversation.stream_regeneration())

    def _fork(self, _: str) -> None:
        self._fork_parents.append(self._conversation)
        self._conversation = self._conversation.fork()
        self._print_note(f"a copy with {len(self._conversation.messages)} messages; /back returns")

    def _return_from_fork(self, _: str) -> None:
        if not self._fork_parents:
            return self._print_note("there is nothing to go back to")
        self._conversation = self._fork_parents.pop()
        self._print_note(f"back in the conversation with {len(self._conversation.messages)} messages")

    def _rewind(self, text: str) -> None:
        if not text.lstrip("-").isdigit():
            return self._print_note("write /rewind and a number of messages")
        self._conversation.rewind(int(text))
        self._print_note(f"{len(self._conversation.messages)} messages are left")

    def _print_history(self, _: str) -> None:
        for index, message in enumerate(self._conversation.messages):
            seen = "".join(f"[{MODALITY_LABELS[one.kind]}] " for one in message.attachments)
            self._print_note(f"{index} {message.role}: {seen}{message.content}")

    def _save(self, name: str) -> None:
        if not name:
            return self._print_note("write /save and a file")
        try:
            self._conversation.save(Path(name).expanduser())
        except OSError as error:
            return self._print_note(f"{name} cannot be written: {error.strerror}")
        self._print_note(f"saved {len(self._conversation.messages)} messages to {name}")

    def _load(self, name: str) -> None:
        self._conversation.load(Path(name).expanduser())
        self._print_note(f"{len(self._conversation.messages)} messages")

    def _attach_file(self, kind: Modality, name: str) -> None:
        if not name:
            return self._print_note(f"write /{kind} and a file")
        self._attach_files([(kind, Path(unquote_word(name)).expanduser())])

    def _attach_files(self, files: Sequence[MediaFile]) -> None:
        """Have pictures and sounds ready for the next question, each said in one line."""
        for kind, path in files:
            self._print_note(describe_media(kind, path))
            self._pending_files.append((kind, path))

    def _restart_with_system(self, text: str) -> None:
        model, options = self._conversation.model, self._conversation.options
        self._conversation = Conversation(model, system=text, **options)
        self._print_note("a new conversation")

    def _toggle_stats(self, _: str) -> None:
        self._stats_shown = not self._stats_shown
        self._print_note(f"statistics are {'shown' if self._stats_shown else 'hidden'}")
