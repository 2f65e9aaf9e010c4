"""`afterglow runs`: the runs of agents, and their audit."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from afterglow.agents.store import Row, RunStore
from afterglow.cli.agent import StoreOption, escape_lines, get_store_path
from afterglow.errors import InvalidArgument

app = typer.Typer(help="List, show, verify and export the runs of agents.", no_args_is_help=True)
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or a prefix of it.")]
SHOWN_CHARACTERS = 2_000  # of a row


def open_store(path: Path | None) -> RunStore:
    """Open the file of runs; it must exist."""
    file = get_store_path(path)
    if not file.exists():
        raise InvalidArgument("--store", f"{file} does not exist: no agent ran yet")
    return RunStore(file)


def find_run(store: RunStore, prefix: str) -> str:
    """Return the id of the run that begins with a text."""
    ids = [run.id for run in store.list_runs() if run.id.startswith(prefix)]
    if len(ids) != 1 and prefix not in ids:
        raise InvalidArgument(
            "RUN", f"{prefix!r} is a prefix of {len(ids)} runs; `afterglow runs list` shows their ids"
        )
    return prefix if prefix in ids else ids[0]


@app.command("list")
def list_runs(
    store: StoreOption = None, as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False
) -> None:
    """List the runs, the newest first. Children are listed with their parent."""
    with open_store(store) as runs:
        summaries = runs.list_runs()
    if as_json:
        fields = ("id", "parent", "task", "status", "created", "rows")
        return typer.echo(json.dumps([{name: getattr(run, name) for name in fields} for run in summaries]))
    for run in summaries:
        task = escape_lines(run.task).partition("\n")[0][:80]
        parent = f"  (child of {run.parent})" if run.parent else ""
        typer.echo(f"{run.id}  {run.status:9}  {run.rows:5} rows  {task}{parent}")


@app.command("show")
def show_run(run: RunArgument, store: StoreOption = None) -> None:
    """Show the rows of a run: messages, decisions, calls and results, with their times."""
    with open_store(store) as runs:
        for row in runs.read(find_run(runs, run)):
            typer.echo(format_row(row))


@app.command("verify")
def verify_runs(
    store: StoreOption = None,
    head: Annotated[str | None, typer.Option(help="Digest of a row that was noted earlier.")] = None,
) -> None:
    """Check that no row was changed, removed, inserted or moved. Prints the digest of the last row."""
    with open_store(store) as runs:
        report = runs.verify(head)
    if report.problem:
        typer.echo(f"TAMPERED: {report.problem}")
        raise typer.Exit(1)
    typer.echo(f"{report.rows} rows are intact; the last digest is {report.head}")


@app.command("export")
def export_run(run: RunArgument, store: StoreOption = None) -> None:
    """Print a run as JSON lines, one per row."""
    with open_store(store) as runs:
        for row in runs.read(find_run(runs, run)):
            typer.echo(json.dumps(row._asdict(), ensure_ascii=False))


def format_row(row: Row) -> str:
    """Return a row as text."""
    time = datetime.datetime.fromtimestamp(row.time).strftime("%H:%M:%S")
    text = escape_lines(describe_row(row.kind, row.body))
    return f"{time}  {row.kind:9}  {text[:SHOWN_CHARACTERS]}"


def describe_row(kind: str, body: dict[str, Any]) -> str:
    """Return what a row says, without its digest."""
    match kind:
        case "started":
            return str(body["task"])
        case "message":
            message = body["message"]
            calls = [
                f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", ())
            ]
            return f"{message['role']}: {' '.join(filter(None, [message.get('content') or '', *calls]))}"
        case "intent":
            return f"{body['call']['name']}({body['call']['arguments']})  because of {body['reason']}"
        case "result":
            return f"{body['status']}: {body['text']}"
        case _:
            return json.dumps(body, ensure_ascii=False)
