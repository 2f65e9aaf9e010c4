"""`afterglow batch`: runs the requests of a file without a server, and continues after an interruption."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from afterglow.cli import options
from afterglow.cli.open_model import resolve_or_pull
from afterglow.cli.serve import build_model_registry, resolve_model_argument
from afterglow.cli.settings import Settings, load_command_settings
from afterglow.errors import InvalidArgument
from afterglow.server.app import build_routed_app
from afterglow.server.batches.execution import BatchExecution
from afterglow.server.batches.store import BatchStore, LineResult, StoredBatch
from afterglow.server.state import ServerState

PROGRESS_SECONDS = 10.0  # between two lines of progress if standard error is no terminal
UNLIMITED_SECONDS = 100 * 365 * 24 * 3600.0  # completion window: a batch of the command line does not expire


@options.accept_settings([*options.SAMPLING_OPTIONS, "private", *options.MODEL_OPTIONS])
def batch(
    command: typer.Context,
    input_path: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="File with one request per line.")],
    output_path: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="File for the results, in the same order.")],
    model: options.ModelArgument = None,
) -> None:
    """Run the requests of a file in OpenAI's batch format, each common prefix once.

    An interrupted batch continues when the same command runs again: finished lines are in OUT.jsonl.partial. Results
    have the order of the input. Exit status 1: some lines failed; OUT.jsonl has their errors.
    """
    if str(output_path) == "-":
        raise InvalidArgument("OUT.jsonl", "must be a file: an interrupted batch continues what is beside it")
    settings = load_command_settings(command)
    console = Console(stderr=True, highlight=False)
    partial = output_path.with_name(f"{output_path.name}.partial")
    name, source = resolve_model_argument(model or settings.model, settings)
    metadata = {"input": compute_digest(input_path), "model": hashlib.sha256(source.encode()).hexdigest()}
    resolve_or_pull(source)  # before the store has the name of the model
    store = BatchStore(partial)
    with contextlib.closing(store), claim_batch(store, input_path, output_path, metadata) as stored:
        run_batch(store, stored, {name: source}, settings, console)
        write_output(store, stored, output_path)
        counts = store.count_results(stored)
    shutil.rmtree(partial)
    print_summary(console, counts)
    if counts["failed"]:
        raise typer.Exit(1)


@contextlib.contextmanager
def claim_batch(
    store: BatchStore, input_path: Path, output_path: Path, metadata: dict[str, str]
) -> Iterator[StoredBatch]:
    """Claim the batch of an output file: the one that was interrupted, or a new one.

    Raises `InvalidArgument` if the output file, or what was begun of it, is not of this input.
    """
    if not store.exists and output_path.exists():
        raise InvalidArgument("OUT.jsonl", f"{output_path} exists: remove it or name another file")
    begun = store.list_unfinished() if store.exists else []
    if begun and begun[0].metadata != metadata:
        which = "input" if begun[0].metadata is None or begun[0].metadata["input"] != metadata["input"] else "model"
        reason = f"{store.directory} has the results of another {which}: remove it or name another file"
        raise InvalidArgument("OUT.jsonl", reason)
    batch = begun[0] if begun else add_batch(store, input_path, metadata)
    with store.claim(batch.id) as is_claimed:
        if not is_claimed:
            raise InvalidArgument("OUT.jsonl", f"another process is writing {output_path}")
        yield batch


def compute_digest(path: Path) -> str:
    """Return the SHA-256 digest of a file. Raises `InvalidArgument` if it has no lines or cannot be read."""
    try:
        with open(path, "rb") as file:
            if not any(line.strip() for line in file):
                raise InvalidArgument("IN.jsonl", f"{path} has no lines")
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidArgument("IN.jsonl", f"{path} cannot be read: {error.strerror}") from None


def add_batch(store: BatchStore, input_path: Path, metadata: dict[str, str]) -> StoredBatch:
    """Store a copy of the input, which may change while the batch is interrupted, and a batch of it."""
    try:
        with open(input_path, "rb") as source:
            file = store.add_file(source, salt="", filename=input_path.name, purpose="batch")
    except OSError as error:
        raise InvalidArgument("OUT.jsonl", f"{store.directory} cannot be written: {error.strerror}") from None
    return store.add_batch(
        salt="",
        endpoint="",
        input_file_id=file.id,
        completion_window="",
        window_seconds=UNLIMITED_SECONDS,
        metadata=metadata,
    )


def run_batch(
    store: BatchStore, batch: StoredBatch, models: dict[str, str], settings: Settings, console: Console
) -> None:
    """Run the lines that have no result yet, with progress. Blocking."""
    progress = BatchProgress(console)

    async def run() -> None:
        with ServerState(build_model_registry(models, settings), settings.server) as state:
            app = build_routed_app(state)
            execution = BatchExecution(app, state, store, batch, on_result=progress.add)
            if await execution.prepare():
                counts = store.count_results(batch)
                progress.start(counts["total"], counts["completed"] + counts["failed"])
                await execution.run()

    with progress:
        try:
            asyncio.run(run())
        except KeyboardInterrupt:
            counts = store.count_results(batch)
            done = f"{counts['completed'] + counts['failed']:,} of {counts['total']:,} lines are done"
            console.print(f"interrupted: {done}; run the same command again to continue", soft_wrap=True)
            raise


def write_output(store: BatchStore, batch: StoredBatch, path: Path) -> None:
    """Write all results in the order of the input. The file appears when it is complete."""
    partial = store.directory / "output"
    with open(partial, "wb") as file:
        for document in store.list_results(batch.id):
            file.write(document.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


# --- progress


class RateColumn(ProgressColumn):
    """Lines per second."""

    def render(self, task: Task) -> Text:
        """Return the rate of the last seconds."""
        return Text("" if task.speed is None else f"{task.speed:.2f} lines/s")


class BatchProgress:
    """Progress of a batch: a bar with rate and time left, or a line now and then if there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn())
        self._bar = Bar(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("loading", total=None)
        self._started = self._printed = time.monotonic()
        self._total = self._done = self._done_before = 0

    def __enter__(self) -> BatchProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def start(self, total: int, done: int) -> None:
        """Start counting, with what an earlier run has done."""
        self._started = self._printed = time.monotonic()
        self._total, self._done, self._done_before = total, done, done
        self._bar.update(self._task, description="running", total=total, completed=done)

    def add(self, result: LineResult) -> None:
        """Count a result."""
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._printed >= PROGRESS_SECONDS:
            self._printed = now
            rate = (self._done - self._done_before) / (now - self._started)
            seconds_left = (self._total - self._done) / rate
            numbers = f"{self._done:,} of {self._total:,} lines, {rate:.2f} lines/s, {seconds_left:.0f} s left"
            self._console.print(numbers, soft_wrap=True)


def print_summary(console: Console, counts: dict[str, int]) -> None:
    """Print what became of the lines, and how many tokens they took."""
    lines = f"{counts['completed']:,} of {counts['total']:,} lines completed, {counts['failed']:,} failed"
    tokens = f"{counts['input_tokens']:,} prompt tokens, {counts['cached_tokens']:,} of them cached"
    console.print(f"{lines}; {tokens}, {counts['output_tokens']:,} generated", soft_wrap=True)
