"""`afterglow chat`: interactive chat in the terminal, or one answer for piped input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from afterglow.agents.conversation import Conversation
from afterglow.agents.mcp_client import load_mcp_servers
from afterglow.agents.resources import CALL_SECONDS
from afterglow.agents.sync_tools import SyncTools
from afterglow.agents.terminal_questions import terminal
from afterglow.chat.tools.tool import Tool
from afterglow.cli import options
from afterglow.cli.agent import AllowOption, DenyOption, McpOption, build_permissions
from afterglow.cli.display import format_limit, show_response
from afterglow.cli.fit import format_summary
from afterglow.cli.keyboard import exit_on_signals
from afterglow.cli.loop_guard import exit_on_loop, guard_deltas
from afterglow.cli.markdown_display import choose_display
from afterglow.cli.media import MediaFile
from afterglow.cli.open_model import open_model
from afterglow.cli.repl import Repl
from afterglow.cli.sessions import ID_PATTERN, ConversationStore, SavedConversation
from afterglow.cli.settings import Settings, load_command_settings
from afterglow.cli.standard_input import is_terminal, read_standard_input
from afterglow.errors import InvalidArgument
from afterglow.paths import get_data_directory


@options.accept_settings(
    [*options.GENERATION_OPTIONS, "overflow", "markdown", "stats", "private", "loop_guard", *options.MODEL_OPTIONS]
)
def chat(
    command: typer.Context,
    model: options.ModelArgument = None,
    id: Annotated[str | None, typer.Argument(hidden=True)] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the last conversation, with its model. `--resume ID` continues another one."
        ),
    ] = False,
    image: options.ImageOption = None,
    audio: options.AudioOption = None,
    mcp: McpOption = None,
    allow: AllowOption = None,
    deny: DenyOption = None,
) -> None:
    """Chat with a model. Ctrl-C stops a response, Ctrl-D exits, /help lists the commands.

    Conversations are saved; --private turns that off. Piped input is one user message:
    echo "Why is the sky blue?" | afterglow chat
    """
    settings = load_command_settings(command)
    directory = None if settings.private else get_data_directory("chat")
    is_first_run = directory is not None and not directory.exists()
    saved = find_saved_conversation(command, directory, resume=resume)
    if saved is not None:
        settings = load_command_settings(command)
    console = Console(stderr=not sys.stdout.isatty())
    question = None if is_terminal() else read_standard_input().strip()
    permissions = build_permissions(allow or (), deny or ())
    servers = load_mcp_servers(mcp) if mcp else []
    with exit_on_signals(), SyncTools(servers, permissions, terminal, call_seconds=CALL_SECONDS) as toolbox:
        run_chat(command, settings, console, saved, question, toolbox.tools, image or (), audio or (), is_first_run)


def run_chat(
    command: typer.Context,
    settings: Settings,
    console: Console,
    saved: SavedConversation | None,
    question: str | None,
    tools: Sequence[Tool],
    image: Sequence[Path],
    audio: Sequence[Path],
    is_first_run: bool,
) -> None:
    """Answer piped input, or chat until the user exits."""
    directory = None if settings.private else get_data_directory("chat")
    if question is not None:
        return answer_once(settings, console, question, saved, image, audio, tools)
    files: list[MediaFile] = [("image", path) for path in image]
    files += [("audio", path) for path in audio]
    flags = {name for name, value in command.params.items() if value is not None}
    with (
        open_model(settings, console) as loaded,
        Repl(loaded, settings, console, flags=flags, directory=directory, initial_files=files, tools=tools) as repl,
    ):
        if loaded.fit is not None:
            console.print(format_summary(loaded.fit), style="dim", highlight=False, markup=False)
        console.print(f"[bold]{settings.model}[/]  [dim]/help lists the commands, Ctrl-D exits[/]", highlight=False)
        if is_first_run:
            text = f"conversations are saved in {directory}; --private turns that off"
            console.print(text, style="dim", highlight=False, markup=False)
        if saved is not None:
            repl.resume(saved.id)
        repl.run()


def find_saved_conversation(
    command: typer.Context, directory: Path | None, *, resume: bool
) -> SavedConversation | None:
    """Return the conversation to resume, and make its model the default of the command.

    An id after `--resume` is an argument of the command, like the model.
    """
    names = [name for name in (command.params["model"], command.params.get("id")) if name is not None]
    if not resume:
        if len(names) > 1:
            raise InvalidArgument("ID", "can only be given with --resume")
        return None
    if directory is None:
        raise InvalidArgument("--resume", "cannot be used with --private")
    ids = [name for name in names if ID_PATTERN.fullmatch(name)]
    models = [name for name in names if name not in ids]
    if len(ids) > 1 or len(models) > 1:
        raise InvalidArgument("--resume", f"expects one ID and one model, not {' and '.join(names)}")
    store = ConversationStore(directory / "conversations")
    saved = store.load(ids[0]) if ids else store.load_last()
    command.params["model"] = models[0] if models else saved.model
    return saved


def answer_once(
    settings: Settings,
    console: Console,
    question: str,
    saved: SavedConversation | None,
    images: Sequence[Path],
    audio: Sequence[Path],
    tools: Sequence[Tool] = (),
) -> None:
    """Print the response to piped input."""
    if not question:
        return
    with open_model(settings, console) as model:
        conversation = Conversation(model, system=settings.system, tools=tools, **settings.generation_options)
        if saved is not None:
            conversation.messages = saved.messages
        deltas = conversation.stream_deltas(question, images=images, audio=audio)
        with exit_on_loop():
            guarded = guard_deltas(deltas, enabled=settings.loop_guard)
            show_response(guarded, choose_display(console, markdown=settings.markdown))
        response = conversation.last_response
        if response is not None and (limit := format_limit(response, model.context_length)) is not None:
            console.print(limit, style="dim", highlight=False, markup=False)
