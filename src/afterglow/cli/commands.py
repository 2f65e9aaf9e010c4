"""The commands of `afterglow`. The module of a command is imported when the command runs."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from typing import Annotated, Any, cast

import typer
import typer.core
import typer.main

from afterglow.cli.completion import read_index
from afterglow.version import __version__

HELP_SETTINGS = {"help_option_names": ["-h", "--help"]}
# Function or application of each command. The index of their flags is written by `make docs`.
COMMANDS = {
    "chat": "afterglow.cli.chat:chat",
    "run": "afterglow.cli.run:run",
    "agent": "afterglow.cli.agent:agent",
    "runs": "afterglow.cli.runs:app",
    "mcp": "afterglow.cli.agent:mcp",
    "serve": "afterglow.cli.serve:app",
    "batch": "afterglow.cli.batch:batch",
    "launch": "afterglow.cli.launch:launch",
    "ps": "afterglow.cli.ps:ps",
    "models": "afterglow.cli.models:app",
    "pull": "afterglow.cli.models:pull_model",
    "list": "afterglow.cli.models:list_models",
    "show": "afterglow.cli.models:show_model",
    "rm": "afterglow.cli.models:remove_models",
    "fit": "afterglow.cli.fit:fit",
    "cache": "afterglow.cli.cache:app",
    "explain": "afterglow.cli.explain:explain",
    "perplexity": "afterglow.cli.run:perplexity",
    "doctor": "afterglow.cli.doctor:doctor",
}
ALIASES = {"ls": "list", "remove": "rm"}
# Commands of Ollama that do not exist here, and what to use instead.
REPLACEMENTS = {
    "stop": "Ctrl-C or SIGTERM stops `afterglow serve`, which unloads its models",
    "create": "system prompt, sampling and context are settings: see `afterglow chat --help` and docs/settings.md",
    "cp": "`afterglow serve NAME=MODEL` serves a model under another name",
    "push": "models are only pulled; upload the file of `afterglow models path NAME` yourself",
}


def load_command(name: str) -> Any:
    """Import the module of a command and return the command.

    >>> load_command("doctor").name
    'doctor'
    """
    module, _, attribute = COMMANDS[name].partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if not isinstance(target, typer.Typer):
        application = typer.Typer(add_completion=False)
        # Everything after the client of `launch` belongs to the client, options included.
        settings = {"allow_interspersed_args": False, "ignore_unknown_options": False} if name == "launch" else None
        application.command(name, context_settings=settings)(target)
        target = application
    command = typer.main.get_command(target)
    gc.freeze()  # modules live until the process ends: collections need not visit them
    gc.enable()
    return command


class LazyGroup(typer.core.TyperGroup):
    """Commands whose modules are imported when they run. The list of commands is from the index."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = cast(Any, dict.fromkeys(COMMANDS))  # for suggestions of similar names

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command that has only a help text, for the list of commands."""
        name = ALIASES.get(cmd_name, cmd_name)
        return typer.core.TyperCommand(name, help=read_index()[name]["help"]) if name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of a command, the command and its arguments."""
        if args[0] in REPLACEMENTS:
            ctx.fail(f"There is no command {args[0]!r}: {REPLACEMENTS[args[0]]}.")
        name, command, rest = super().resolve_command(ctx, args)
        name = ALIASES.get(str(name), str(name))
        return name, load_command(name) if command is not None else None, rest


app = typer.Typer(
    name="afterglow",
    cls=LazyGroup,
    help="Run language models locally. No token is computed twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP_SETTINGS,
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"afterglow {__version__}")
        raise typer.Exit


@app.callback()
def configure_logging(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the log of llama.cpp to standard error.")] = False,
) -> None:
    if verbose:
        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
