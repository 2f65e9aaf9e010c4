"""Interactive chat: reads user messages and slash commands from the terminal."""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from afterglow import registry
from afterglow.agents.conversation import Conversation
from afterglow.api.model import Model
from afterglow.chat.messages import Message, build_user_message
from afterglow.chat.output.parts import OutputPart, join_parts
from afterglow.chat.output.response import Delta
from afterglow.chat.tools.tool import Tool
from afterglow.cli.display import format_limit, format_statistics, format_truncation, show_response
from afterglow.cli.error_messages import describe_error
from afterglow.cli.keyboard import InterruptGuard, hold_keys
from afterglow.cli.line_editor import Candidates, CommandCompleter, LineEditor, open_history
from afterglow.cli.loop_guard import guard_deltas
from afterglow.cli.markdown_display import choose_display
from afterglow.cli.media import MediaFile, describe_media, extract_media_files, unquote_word
from afterglow.cli.open_model import open_model, resolve_or_pull
from afterglow.cli.parameters import PARAMETERS, ChatParameters
from afterglow.cli.sessions import ConversationStore, create_id
from afterglow.cli.settings import Settings
from afterglow.closeable import Closeable
from afterglow.errors import AfterglowError, Cancelled, InvalidArgument
from afterglow.media.policy import Modality

EXIT_COMMANDS = ("exit", "quit", "bye")
LISTED_CONVERSATIONS = 10
MESSAGE_COUNT = re.compile(r"-?[0-9]{1,9}")
MULTILINE_QUOTE = '"""'
KEYS_HELP = """\
Ctrl-C stops a response or clears the line. Ctrl-D exits. Tab completes commands, models and files.
Alt-Enter inserts a newline; so does \\ at the end of a line. \"\"\" starts and ends a text of several lines."""


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A slash command: its function gets the text after the name."""

    run: Callable[[str], None]
    usage: str
    help: str
    candidates: Candidates | None = None  # for tab completion of the argument


class Repl(Closeable):
    """Read-eval-print loop of one conversation and its forks. It owns the model, which `/model` replaces.

    Args:
        model: The first model. Closed at the end.
        settings: Settings of the command.
        flags: Names of the settings that are given as flags.
        console: Terminal.
        directory: Where the history of input lines and the conversations are kept. None: nowhere.
        initial_files: Media files for the first message.
        tools: Functions that the model may call.
    """

    def __init__(
        self,
        model: Model,
        settings: Settings,
        console: Console,
        *,
        flags: Collection[str] = (),
        directory: Path | None = None,
        initial_files: Sequence[MediaFile] = (),
        tools: Sequence[Tool] = (),
    ) -> None:
        self._model = model
        self._tools = tools
        self._marks: dict[str, int] = {}  # numbers of messages, by name
        self._settings = settings
        self._console = console
        self._parameters = ChatParameters(settings, flags)
        self._store = None if directory is None else ConversationStore(directory / "conversations")
        self._pending_files: list[MediaFile] = []  # attached to the next message
        self._initial_files = initial_files
        self._fork_parents: list[tuple[str, Conversation]] = []
        self._stats_shown = settings.stats
        self._saved_messages: list[Message] = []
        self._start_conversation(self._build_system_messages(settings.system))
        self._commands = self._build_commands()
        paths = [name for name, command in self._commands.items() if command.usage.endswith("FILE")]
        candidates = {name: command.candidates for name, command in self._commands.items()}
        completer = CommandCompleter(candidates | dict.fromkeys(EXIT_COMMANDS[:1]), paths)
        history = open_history(None if directory is None else directory / "history")
        self._editor = LineEditor(console, history, completer)

    def _build_commands(self) -> dict[str, ChatCommand]:
        list_ids = None if self._store is None else self._store.list_ids
        return {
            "clear": ChatCommand(self._clear, "", "start a new conversation with the same system prompt"),
            "set": ChatCommand(
                self._set, "NAME VALUE", "set a parameter, e.g. temperature; /set lists them", lambda: PARAMETERS
            ),
            "system": ChatCommand(
                self._restart_with_system, "TEXT", "start a new conversation with this system prompt"
            ),
            "model": ChatCommand(
                self._switch_model, "NAME", "continue with another model; /model lists them", list_model_names
            ),
            "regenerate": ChatCommand(self._regenerate, "", "generate the last response again"),
            "edit": ChatCommand(self._edit, "TEXT", "replace the last user message and generate a response"),
            "copy": ChatCommand(self._copy, "", "copy the last response to the clipboard"),
            "fork": ChatCommand(self._fork, "", "continue in a copy of the conversation"),
            "back": ChatCommand(self._return_from_fork, "", "return from a fork to the original"),
            "mark": ChatCommand(
                self._mark, "NAME", "mark the end of the conversation, for /rewind; /mark lists the marks"
            ),
            "rewind": ChatCommand(
                self._rewind, "NAME", "return to a mark; a number keeps that many messages", lambda: self._marks
            ),
            "why": ChatCommand(self._explain, "", "explain what of the last prompt was cached, and why not more"),
            "history": ChatCommand(self._print_history, "", "list the messages"),
            "resume": ChatCommand(self._resume, "ID", "continue a saved conversation; /resume lists them", list_ids),
            "save": ChatCommand(self._save, "FILE", "save the conversation to a file"),
            "load": ChatCommand(self._load, "FILE", "load a conversation from a file"),
            "image": ChatCommand(
                functools.partial(self._attach_file, "image"),
                "FILE",
                "attach an image to the next message; dragging a file into the line does the same",
            ),
            "audio": ChatCommand(
                functools.partial(self._attach_file, "audio"), "FILE", "attach an audio file to the next message"
            ),
            "stats": ChatCommand(self._toggle_stats, "", "show or hide statistics"),
            "help": ChatCommand(self._print_help, "", "list the commands"),
        }

    def run(self) -> None:
        """Run until the user exits."""
        self._run_safely(lambda: self._attach_files(self._initial_files))
        while (line := self._read_input()) is not None:
            self._run_safely(functools.partial(self._handle_line, line))
            self._autosave()
        if self._store is not None and self._saved_messages:
            self._print_note(f"afterglow chat --resume {self._conversation_id}  continues this conversation")

    def resume(self, id: str) -> None:
        """Continue a saved conversation."""
        assert self._store is not None
        saved = self._store.load(id)
        self._start_conversation(saved.messages)
        self._conversation_id, self._saved_messages = saved.id, list(saved.messages)
        self._print_note(f"resumed a conversation of {len(saved.messages)} messages: {saved.title}")

    def close(self) -> None:
        self._model.close()

    def _run_safely(self, action: Callable[[], None]) -> None:
        """Run an action and print its error, so that the conversation continues."""
        try:
            action()
        except (KeyboardInterrupt, Cancelled):
            self._print_note("stopped")
        except AfterglowError as error:
            self._print_error(error)

    def _handle_line(self, line: str) -> None:
        """Run a command, or send a user message with the media files named in the line."""
        is_command = line.startswith("/") and line[1:].partition(" ")[0] in self._commands
        text, files = (line, []) if is_command else extract_media_files(line)
        if text.startswith("/"):
            name, _, rest = text[1:].partition(" ")
            if name not in self._commands:
                return self._print_note(f"unknown command /{name}; /help lists the commands")
            return self._commands[name].run(rest.strip())
        self._attach_files(files)
        if text:
            attached, self._pending_files = self._pending_files, []
            images, audio = ([path for kind, path in attached if kind == modality] for modality in ("image", "audio"))
            history = [*self._conversation.messages, build_user_message(text, images, audio)]
            self._update_options()
            self._respond(self._conversation.stream_deltas(text, images=images, audio=audio), history)

    # --- input

    def _read_input(self) -> str | None:
        """Read the next input, which may have several lines; None to exit."""
        lines: list[str] = []
        while True:
            try:
                lines.append(self._editor.read("> " if not lines else "... "))
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not lines:
                    self._print_note("Ctrl-D or /exit exits")
                lines.clear()
                continue
            if (text := join_lines(lines)) is not None:
                return None if text in {f"/{name}" for name in EXIT_COMMANDS} else text

    # --- responses

    def _regenerate(self, _: str) -> None:
        messages = self._conversation.messages
        length = max((index + 1 for index, message in enumerate(messages) if message.role == "user"), default=0)
        self._update_options()
        self._respond(self._conversation.stream_regeneration(), messages[:length])

    def _update_options(self) -> None:
        self._conversation.options = self._parameters.build_options(self._model)

    def _respond(self, deltas: Iterator[Delta], history: Sequence[Message]) -> None:
        """Show the response to a history. After Ctrl-C, the question and the response so far stay."""
        parts: list[OutputPart] = []
        self._conversation.last_response = None
        try:
            with hold_keys(), InterruptGuard() as guard:
                guarded = guard_deltas(guard.iterate(deltas), enabled=self._settings.loop_guard)
                recorded = record_parts(guarded, parts)
                show_response(recorded, choose_display(self._console, markdown=self._settings.markdown))
        except KeyboardInterrupt as interrupt:
            output = join_parts(parts)
            answer = Message(role="assistant", content=output.text, reasoning=output.reasoning or None)
            self._conversation.messages = [*history, answer] if output.text else list(history)
            return self._print_note(str(interrupt) or "stopped")
        self._print_response_notes()

    def _print_response_notes(self) -> None:
        response = self._conversation.last_response
        if response is None:
            return
        if response.truncation is not None:
            self._print_note(format_truncation(response.truncation))
        if (limit := format_limit(response, self._model.context_length)) is not None:
            self._print_note(limit)
        if self._stats_shown:
            self._print_note(format_statistics(response))

    def _print_note(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False)

    def _print_error(self, error: AfterglowError) -> None:
        text = describe_error(error, self._model.info.trained_context_length)
        self._console.print(text[:1].upper() + text[1:], style="red", highlight=False, markup=False)

    # --- conversations

    def _start_conversation(self, messages: Sequence[Message]) -> None:
        """Continue with these messages, as a new conversation."""
        self._conversation = Conversation(self._model, tools=self._tools, **self._parameters.build_options(self._model))
        self._conversation.messages = list(messages)
        self._conversation_id, self._saved_messages = create_id(), []

    def _build_system_messages(self, text: str) -> list[Message]:
        if len(text) > 1 and text[0] == text[-1] == '"':
            text = text[1:-1]
        return [Message(role="system", content=text)] if text else []

    def _get_system_messages(self) -> list[Message]:
        return [message for message in self._conversation.messages[:1] if message.role == "system"]

    def _clear(self, _: str) -> None:
        self._start_conversation(self._get_system_messages())
        self._print_note("started a new conversation")

    def _restart_with_system(self, text: str) -> None:
        self._start_conversation(self._build_system_messages(text))
        self._print_note("started a new conversation")

    def _edit(self, text: str) -> None:
        messages = self._conversation.messages
        user_messages = [index for index, message in enumerate(messages) if message.role == "user"]
        if not user_messages:
            return self._print_note("there is no user message yet")
        if not text:
            self._print_note(messages[user_messages[-1]].content)
            return self._print_note("usage: /edit TEXT")
        self._conversation.edit(user_messages[-1], text)
        self._regenerate("")

    def _fork(self, _: str) -> None:
        self._autosave()
        self._fork_parents.append((self._conversation_id, self._conversation))
        self._start_conversation(self._conversation.messages)
        self._print_note(f"forked a conversation of {len(self._conversation.messages)} messages; /back returns")

    def _return_from_fork(self, _: str) -> None:
        if not self._fork_parents:
            return self._print_note("there is no fork to return from")
        self._conversation_id, self._conversation = self._fork_parents.pop()
        self._conversation.model = self._model  # which `/model` may have replaced
        self._saved_messages = list(self._conversation.messages)
        self._print_note(f"returned to the conversation of {len(self._conversation.messages)} messages")

    def _mark(self, name: str) -> None:
        count = len(self._conversation.messages)
        if not name:
            return self._print_note(
                "\n".join(f"{mark}: {at} messages" for mark, at in self._marks.items()) or "no marks"
            )
        self._marks[name] = count
        self._print_note(f"marked {name} after {count} messages; /rewind {name} returns")

    def _rewind(self, text: str) -> None:
        count = self._marks.get(text)
        if count is None and not MESSAGE_COUNT.fullmatch(text):
            return self._print_note("usage: /rewind NAME or /rewind N")
        self._conversation.rewind(int(text) if count is None else count)
        self._marks = {name: at for name, at in self._marks.items() if at <= len(self._conversation.messages)}
        self._print_note(f"{len(self._conversation.messages)} messages left")

    def _explain(self, _: str) -> None:
        """Say what the last response cost, and what the next one would compute again."""
        response = self._conversation.last_response
        if response is None:
            return self._print_note("there is no response yet")
        usage = response.usage
        computed = usage.prompt_tokens - usage.cached_tokens
        self._print_note(
            f"the last prompt had {usage.prompt_tokens:,} tokens: {usage.cached_tokens:,} cached, {computed:,} computed"
        )
        for index, reason in usage.replay_misses:
            self._print_note(f"message {index} was tokenized again: {reason}")
        prompt = self._model.apply_chat_template(self._conversation.messages, tools=self._tools)
        found = self._model.explain(prompt)
        cached = f"{found.reused_entries:,} of {found.prompt_entries:,} tokens"
        self._print_note(f"of the conversation now, {cached} are cached: {found.cause}")

    def _print_history(self, _: str) -> None:
        for index, message in enumerate(self._conversation.messages):
            media = "".join(f"[{attachment.kind}] " for attachment in message.attachments)
            self._print_note(f"{index} {message.role}: {media}{message.content}")

    # --- files

    def _autosave(self) -> None:
        """Save the conversation if it changed. If that fails, say it once and go on without."""
        messages = self._conversation.messages
        if self._store is None or messages == self._saved_messages:
            return
        if not self._saved_messages and not any(message.role == "user" for message in messages):
            return
        try:
            self._store.save(self._conversation_id, get_saved_name(self._settings.model), messages)
        except OSError as error:
            self._print_note(f"the conversation cannot be saved in {self._store.directory}: {error.strerror}")
            self._store = None
        self._saved_messages = list(messages)

    def _resume(self, id: str) -> None:
        if self._store is None:
            return self._print_note("--private: conversations are not saved")
        if id:
            return self.resume(id)
        for saved in self._store.load_recent(LISTED_CONVERSATIONS):
            self._print_note(f"{saved.id}  {len(saved.messages)} messages  {saved.title}")

    def _save(self, name: str) -> None:
        if not name:
            return self._print_note("usage: /save FILE")
        try:
            self._conversation.save(expand_path(name))
        except OSError as error:
            return self._print_note(f"{name} cannot be written: {error.strerror}")
        self._print_note(f"saved {len(self._conversation.messages)} messages to {name}")

    def _load(self, name: str) -> None:
        path = expand_path(name)
        if name in list_model_names() and not path.exists():
            return self._print_note(f"{name} is a model: /model {name} continues with it")
        loaded = Conversation(self._model)
        loaded.load(path)
        self._start_conversation(loaded.messages)
        self._print_note(f"loaded {len(loaded.messages)} messages")

    def _attach_file(self, kind: Modality, name: str) -> None:
        if not name:
            return self._print_note(f"usage: /{kind} FILE")
        self._attach_files([(kind, expand_path(unquote_word(name)))])

    def _attach_files(self, files: Sequence[MediaFile]) -> None:
        """Attach files to the next message and print one line for each."""
        for kind, path in files:
            self._print_note(describe_media(kind, path))
            self._pending_files.append((kind, path))

    def _copy(self, _: str) -> None:
        """Copy with the escape sequence OSC 52, which also reaches the clipboard through ssh."""
        answers = [message.content for message in self._conversation.messages if message.role == "assistant"]
        if not answers:
            return self._print_note("there is no response yet")
        if self._console.is_dumb_terminal or not self._console.is_terminal:
            return self._print_note("this terminal has no clipboard; /save FILE writes the conversation to a file")
        encoded = base64.b64encode(answers[-1].encode("utf-8", "replace")).decode()
        self._console.file.write(f"\x1b]52;c;{encoded}\a")
        self._console.file.flush()
        self._print_note(f"sent {len(answers[-1]):,} characters to the clipboard of the terminal")

    # --- model and parameters

    def _switch_model(self, name: str) -> None:
        """Continue the conversation with another model. If it cannot be loaded, load the old one again."""
        if not name:
            return self._print_models()
        resolve_or_pull(name)
        previous = self._settings
        self._model.close()  # first: both may not fit into memory
        try:
            self._open_model(replace_model(previous, name))
        except BaseException:
            self._open_model(previous)
            raise
        self._print_note(f"continuing with {name}")

    def _print_models(self) -> None:
        self._print_note(f"this is {self._settings.model}; /model NAME continues with one of these:")
        local = list_local_models()
        for name in list_model_names():
            self._print_note(f"  {name}" if name in local else f"  {name}  (is downloaded first)")

    def _open_model(self, settings: Settings) -> None:
        self._model = self._conversation.model = open_model(settings, self._console)
        self._settings = settings

    def _set(self, text: str) -> None:
        name, _, value = text.removeprefix("parameter ").partition(" ")
        if not name:
            return self._print_parameters()
        if name == "system":
            messages = self._conversation.messages[len(self._get_system_messages()) :]
            self._conversation.messages = [*self._build_system_messages(value.strip()), *messages]
            return self._print_note("the system prompt is set")
        if value:
            self._parameters.set(name, value.strip())
        values = {row[0]: row[1:] for row in self._parameters.describe(self._model)}
        if name not in values:
            self._parameters.set(name, value)  # raises the error of an unknown name
        current, source = values[name]
        self._print_note(f"{name} is {current} ({source})")

    def _print_parameters(self) -> None:
        rows = [*self._parameters.describe(self._model)]
        system = "".join(message.content for message in self._get_system_messages())
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, value, source in rows:
            self._print_note(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}")
        self._print_note(f"{'system':{widths[0]}}  {system or 'none'}")

    def _toggle_stats(self, _: str) -> None:
        self._stats_shown = not self._stats_shown
        self._print_note(f"statistics are {'shown' if self._stats_shown else 'hidden'}")

    def _print_help(self, _: str) -> None:
        usages = {f"/{name} {command.usage}".strip(): command.help for name, command in self._commands.items()}
        usages["/exit"] = "exit (or Ctrl-D)"
        width = max(map(len, usages))
        lines = [f"{usage:{width}}  {text}" for usage, text in usages.items()]
        self._console.print("\n".join([*lines, KEYS_HELP]), markup=False, highlight=False)


def join_lines(lines: Sequence[str]) -> str | None:
    r"""Join the lines of one input; None if it continues: after a backslash, or inside triple quotes.

    >>> join_lines(["one\\"]), join_lines(["one\\", "two"]), join_lines(['\"\"\"one', 'two\"\"\"'])
    (None, 'one\ntwo', 'one\ntwo')
    """
    text = "\n".join(lines).strip()
    if text.startswith(MULTILINE_QUOTE):
        content = text.removeprefix(MULTILINE_QUOTE)
        return content.removesuffix(MULTILINE_QUOTE).strip() if content.endswith(MULTILINE_QUOTE) else None
    if lines[-1].endswith("\\"):
        return None
    return "\n".join([*(line.removesuffix("\\") for line in lines[:-1]), lines[-1]]).strip()


def expand_path(name: str) -> Path:
    """Return the path of a file that a command names. Raises `InvalidArgument` for the home of an unknown user.

    >>> expand_path("~nobody-here/talk.json")
    Traceback (most recent call last):
    ...
    afterglow.errors.InvalidArgument: `~nobody-here/talk.json` is in a home directory that does not exist
    """
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise InvalidArgument(name, "is in a home directory that does not exist") from None


def record_parts(deltas: Iterable[Delta], parts: list[OutputPart]) -> Iterator[Delta]:
    """Yield the deltas and append their parts to a list."""
    for delta in deltas:
        parts += delta.parts
        yield delta


def list_model_names() -> list[str]:
    """Return the names of all models that can be loaded without a path, those on this machine first."""
    return list(dict.fromkeys([*list_local_models(), *registry.CATALOG]))


def list_local_models() -> list[str]:
    """Return the names of the models on this machine."""
    return [model.name for model in (*registry.list_installed(), *registry.discover_models())]


def replace_model(settings: Settings, name: str) -> Settings:
    """Return the settings for another model, without the files that belong to the old one."""
    return settings.model_copy(
        update={"model": name, "draft": None, "projector": None, "chat_template": None, "adapters": {}}
    )


def get_saved_name(model: str) -> str:
    """Return the name of a model for a saved conversation: a path is made absolute."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_file() else model
