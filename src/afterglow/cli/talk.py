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

from afterglow.chat.reply import Delta
from afterglow.cli.media import WORDS, Named, by_kind, described, files_in, unquoted
from afterglow.cli.settings import Settings
from afterglow.cli.showing import page_for, show, statistics
from afterglow.conversation import Conversation
from afterglow.errors import AfterglowError, Cancelled
from afterglow.media.policy import Kind

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


class Talk:
    """Reads lines until the person ends it."""

    def __init__(
        self, conversation: Conversation, settings: Settings, console: Console, given: Sequence[Named] = ()
    ) -> None:
        self._conversation = conversation
        self._ready: list[Named] = []  # pictures and sounds that go with the next question
        self._given = given  # before the first one
        self._earlier: list[Conversation] = []  # those that were forked
        self._console = console
        self._markdown = settings.markdown
        self._stats = settings.stats
        self._line = self._reader()
        self._commands: dict[str, Callable[[str], None]] = {
            "regenerate": self._regenerate,
            "edit": self._edit,
            "fork": self._fork,
            "back": self._back,
            "rewind": self._rewind,
            "history": self._history,
            "save": self._save,
            "load": self._load,
            "system": self._system,
            "image": functools.partial(self._file, "image"),
            "audio": functools.partial(self._file, "audio"),
            "stats": self._toggle_stats,
            "help": lambda _: self._console.print(HELP, markup=False, highlight=False),
        }

    def run(self) -> None:
        """Until the person ends it."""
        self._try(lambda: self._show(self._given))
        while (line := self._ask()) is not None:
            self._try(functools.partial(self._take, line))

    def _try(self, work: Callable[[], None]) -> None:
        """Do something; what goes wrong is said, and the conversation goes on."""
        try:
            work()
        except (KeyboardInterrupt, Cancelled):
            self._note("stopped; the question was not kept")
        except AfterglowError as error:
            self._console.print(f"[red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False)

    def _take(self, line: str) -> None:
        """A question with the pictures and sounds that were dragged into it, or a command."""
        known = line[1:].partition(" ")[0] in self._commands if line.startswith("/") else False
        question, dragged = (line, []) if known else files_in(line)
        if question.startswith("/"):
            return self._command(question[1:])
        self._show(dragged)
        if question:
            ready, self._ready = self._ready, []
            self._answer(self._conversation.deltas(question, **by_kind(ready)))

    # --- lines

    def _reader(self) -> Callable[[], str]:
        """How lines are read: with editing and history where the terminal can."""
        if self._console.is_dumb_terminal or not sys.stdin.isatty():
            return lambda: self._console.input("> ")
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        session: PromptSession[str] = PromptSession(history=InMemoryHistory(), key_bindings=keys)
        return lambda: session.prompt("> ")

    def _ask(self) -> str | None:
        """What the person says next; None where they want to end."""
        lines = []
        while True:
            try:
                line = self._line()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return None
            if not line.endswith("\\"):
                break
            lines.append(line[:-1])
        text = "\n".join([*lines, line]).strip()
        return None if text in ("/exit", "/quit", "/bye") else text

    # --- answers

    def _answer(self, deltas: Iterator[Delta]) -> None:
        show(deltas, page_for(self._console, markdown=self._markdown))
        if self._stats and self._conversation.last is not None:
            self._note(statistics(self._conversation.last))

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False)

    # --- commands

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name not in self._commands:
            self._note(f"there is no command /{name}; /help lists them")
            return
        self._commands[name](rest.strip())

    def _regenerate(self, _: str) -> None:
        self._answer(self._conversation.regenerate_deltas())

    def _edit(self, text: str) -> None:
        questions = [index for index, one in enumerate(self._conversation.messages) if one.role == "user"]
        if not questions:
            return self._note("there is no question yet")
        if not text:
            self._note(self._conversation.messages[questions[-1]].content)
            return self._note("write /edit and the new question")
        self._conversation.edit(questions[-1], text)
        self._answer(self._conversation.regenerate_deltas())

    def _fork(self, _: str) -> None:
        self._earlier.append(self._conversation)
        self._conversation = self._conversation.fork()
        self._note(f"a copy with {len(self._conversation.messages)} messages; /back returns")

    def _back(self, _: str) -> None:
        if not self._earlier:
            return self._note("there is nothing to go back to")
        self._conversation = self._earlier.pop()
        self._note(f"back in the conversation with {len(self._conversation.messages)} messages")

    def _rewind(self, text: str) -> None:
        if not text.lstrip("-").isdigit():
            return self._note("write /rewind and a number of messages")
        self._conversation.rewind(int(text))
        self._note(f"{len(self._conversation.messages)} messages are left")

    def _history(self, _: str) -> None:
        for index, message in enumerate(self._conversation.messages):
            seen = "".join(f"[{WORDS[one.kind]}] " for one in message.attachments)
            self._note(f"{index} {message.role}: {seen}{message.content}")

    def _save(self, name: str) -> None:
        if not name:
            return self._note("write /save and a file")
        try:
            self._conversation.save(Path(name).expanduser())
        except OSError as error:
            return self._note(f"{name} cannot be written: {error.strerror}")
        self._note(f"saved {len(self._conversation.messages)} messages to {name}")

    def _load(self, name: str) -> None:
        self._conversation.load(Path(name).expanduser())
        self._note(f"{len(self._conversation.messages)} messages")

    def _file(self, kind: Kind, name: str) -> None:
        if not name:
            return self._note(f"write /{kind} and a file")
        self._show([(kind, Path(unquoted(name)).expanduser())])

    def _show(self, named: Sequence[Named]) -> None:
        """Have pictures and sounds ready for the next question, each said in one line."""
        for kind, path in named:
            self._note(described(kind, path))
            self._ready.append((kind, path))

    def _system(self, text: str) -> None:
        model, options = self._conversation.model, self._conversation.options
        self._conversation = Conversation(model, system=text, **options)
        self._note("a new conversation")

    def _toggle_stats(self, _: str) -> None:
        self._stats = not self._stats
        self._note(f"statistics are {'shown' if self._stats else 'hidden'}")
