"""`afterglow agent`: works on one task with tools. `afterglow mcp`: the model as an MCP server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from afterglow.agents.agent import Agent
from afterglow.agents.events import (
    AgentEvent,
    Calling,
    Compacted,
    Decided,
    Finished,
    Forked,
    Outcome,
    Result,
    Said,
    Thought,
)
from afterglow.agents.limits import Limits
from afterglow.agents.mcp_client import load_mcp_servers
from afterglow.agents.mcp_server import build_mcp_server
from afterglow.agents.permissions import EFFECTS, Decision, Permissions
from afterglow.agents.run import Run
from afterglow.agents.terminal_questions import escape_controls, terminal
from afterglow.api.options import ChatGenerationOptions
from afterglow.cli import options
from afterglow.cli.display import format_truncation
from afterglow.cli.keyboard import exit_on_signals
from afterglow.cli.open_model import open_model
from afterglow.cli.settings import Settings, load_command_settings
from afterglow.errors import InvalidArgument
from afterglow.paths import get_data_directory

SHOWN_CHARACTERS = 500  # of a result
MCP_OPTIONS = [name for name in options.GENERATION_OPTIONS if name != "system"]
McpOption = Annotated[
    Path | None, typer.Option("--mcp", help="JSON file with `mcpServers`, whose tools the model may call.")
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow", help="Effect (read, write, external), tool or pattern to allow. Repeatable."),
]
DenyOption = Annotated[
    list[str] | None,
    typer.Option("--deny", help="Effect, tool or pattern to deny. All other calls are asked about. Repeatable."),
]
StoreOption = Annotated[
    Path | None, typer.Option("--store", help="SQLite file of the runs. Default: in the user's data directory.")
]


@options.accept_settings([*options.GENERATION_OPTIONS, "private", *options.MODEL_OPTIONS])
def agent(
    command: typer.Context,
    task: Annotated[str, typer.Argument(help="The task. With --resume, a further message of the user.")] = "",
    model: options.ModelOption = None,
    mcp: McpOption = None,
    allow: AllowOption = None,
    deny: DenyOption = None,
    resume: Annotated[str | None, typer.Option("--resume", help="Continue a run by its id.")] = None,
    answer: Annotated[
        list[str] | None, typer.Option("--answer", help="CALL=allow or CALL=deny for a call that waits. Repeatable.")
    ] = None,
    roles: Annotated[Path | None, typer.Option(help="Directory of Markdown files with roles of children.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Maximum number of model messages.", min=1)] = None,
    seconds: Annotated[float | None, typer.Option(help="Maximum duration in seconds.", min=0)] = None,
    store: StoreOption = None,
) -> None:
    """Work on a task with the tools of MCP servers.

    The answer goes to standard output, calls and results to standard error. At a terminal you are asked about calls
    that are neither allowed nor denied. Otherwise the run waits: afterglow agent --resume ID --answer CALL=allow

    A run that stopped at a limit continues with a message and a higher limit: --resume ID --rounds 60 "Go on."

    Runs are stored, with all messages; --private turns that off.
    """
    if not task and resume is None:
        raise InvalidArgument("TASK", "is missing")
    if answer and resume is None:
        raise InvalidArgument("--answer", "needs --resume with the id of the run that waits")
    answers = parse_answers(answer or ())
    settings = load_command_settings(command)
    path = None if settings.private and store is None else get_store_path(store)
    if resume is not None and path is None:
        raise InvalidArgument("--resume", "cannot be used with --private, unless --store names the file of the run")
    console = Console(stderr=True)
    given = {name: value for name, value in (("rounds", rounds), ("seconds", seconds)) if value is not None}
    with exit_on_signals(), open_model(settings, console) as loaded:  # the servers of tools end with the command
        worker = Agent(
            loaded,
            settings.system,
            tools=load_mcp_servers(mcp) if mcp else (),
            permissions=build_permissions(allow or (), deny or ()),
            limits=Limits(**given),  # type: ignore[arg-type]
            ask=terminal,
            store=path,
            roles=roles or (),
            **get_generation_options(settings),
        )
        if resume is None:
            run = worker.start(task)
        else:
            run = worker.resume(resume, answers)
            run.spec = replace(run.spec, limits=replace(run.spec.limits, **given))  # type: ignore[arg-type]
            if task:
                run.say(task)
        outcome = asyncio.run(show_run(run, console))
    report_end(outcome, console, is_stored=path is not None)


def get_generation_options(settings: Settings) -> ChatGenerationOptions:
    """Return the options of every message. Agents have their own `overflow`, unless the user set it."""
    options = settings.generation_options
    if "overflow" not in settings.model_fields_set:
        del options["overflow"]
    return options


def report_end(outcome: Outcome, console: Console, *, is_stored: bool) -> None:
    """Say why a run did not end with an answer, and how to continue it if it is stored; exit with 1 then."""
    if outcome:
        return
    print_note(console, f"{outcome.status}: {outcome.reason}")
    if is_stored:
        answers = " ".join(f"--answer {question.call.id}=allow" for question in outcome.waiting)
        print_note(console, f"afterglow agent --resume {outcome.run_id} {answers}".rstrip())
    raise typer.Exit(1)


async def show_run(run: Run, console: Console) -> Outcome:
    """Run to the end and print the events."""
    outcome: Outcome | None = None
    async with run.agent:
        async for event in run:
            show_event(event, console)
            if isinstance(event, Finished):
                outcome = event.outcome
    assert outcome is not None
    return outcome


def show_event(event: AgentEvent, console: Console) -> None:
    """Print one event: text of the model to standard output, everything else to standard error."""
    match event:
        case Said(text):
            sys.stdout.write(text)
            sys.stdout.flush()
        case Thought(text):
            console.print(escape_lines(text), style="dim italic", end="", highlight=False, markup=False)
        case Calling(call):
            print_note(console, f"→ {call.name}({escape_controls(call.arguments)})")
        case Decided(_, "deny", reason):
            print_note(console, f"  denied: {escape_lines(reason)}")
        case Result(_, text, status):
            shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
            print_note(console, f"← {status}: {escape_lines(shown)}")
        case Compacted(truncation):
            print_note(console, format_truncation(truncation))
        case Forked(children):
            print_note(console, f"  {len(children)} children")
        case Finished():
            sys.stdout.write("\n")
            sys.stdout.flush()
        case _:
            pass


def print_note(console: Console, text: str) -> None:
    """Print a dim line to standard error."""
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def escape_lines(text: str) -> str:
    """Return a text whose only control characters are ends of lines."""
    return "\n".join(map(escape_controls, text.split("\n")))


def build_permissions(allow: Sequence[str], deny: Sequence[str]) -> Permissions:
    """Return permissions from flags: effects by their name, everything else as rules. The rest is asked.

    >>> build_permissions(["read"], ["git.push*"]).rules
    {'git.push*': 'deny'}
    """
    effects: dict[str, Decision] = dict.fromkeys(EFFECTS, "ask")
    rules: dict[str, Decision] = {}
    words: list[tuple[str, Decision]] = [*((word, "allow") for word in allow), *((word, "deny") for word in deny)]
    for word, decision in words:
        (effects if word in EFFECTS else rules)[word] = decision
    return Permissions(**effects, rules=rules)


def parse_answers(values: Sequence[str]) -> dict[str, Decision]:
    """Parse `CALL=allow` and `CALL=deny`."""
    answers: dict[str, Any] = {}
    for value in values:
        call, separator, decision = value.rpartition("=")
        if not separator or decision not in ("allow", "deny"):
            raise InvalidArgument("--answer", f"must be CALL=allow or CALL=deny, not {value!r}")
        answers[call] = decision
    return answers


def get_store_path(path: Path | None) -> Path:
    """Return the file of runs."""
    return path or get_data_directory("agents") / "runs.db"


@options.accept_settings([*MCP_OPTIONS, "private", *options.MODEL_OPTIONS])
def mcp(command: typer.Context, model: options.ModelArgument = None) -> None:
    """Offer a model to other agents as an MCP server on standard input and output: ask, explain and fork.

    The context that an agent gives is the system prompt.
    """
    settings = load_command_settings(command)
    with open_model(settings) as loaded:
        build_mcp_server(loaded, **get_generation_options(settings)).run()
