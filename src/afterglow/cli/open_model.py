"""Loads the model of a command: downloads it if needed, and shows progress."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from afterglow import registry
from afterglow.api.load import load
from afterglow.api.model import Model
from afterglow.api.options import LoadOptions
from afterglow.cli.settings import Settings
from afterglow.errors import ModelNotFound

if TYPE_CHECKING:
    from rich.console import Console

BAR_DELAY_SECONDS = 0.5  # a quick load neither shows a bar nor waits for its import


def open_model(settings: Settings, console: Console | None = None, **overrides: Unpack[LoadOptions]) -> Model:
    """Load the model that the settings name. `overrides` replace its settings.

    Shows the progress of a long load on `console`, by default standard error, if it is a terminal.
    """
    load_options: LoadOptions = {**settings.load_options, **overrides, "replicas": 1}  # they serve several clients
    resolve_or_pull(settings.model)
    with contextlib.ExitStack() as stack:
        return load(
            settings.model,
            sampling_defaults=settings.sampling_defaults,
            progress=create_progress_callback(f"loading {settings.model}", console, stack),
            **load_options,
        )


def create_progress_callback(
    description: str, console: Console | None, stack: contextlib.ExitStack
) -> Callable[[float], bool]:
    """Return a callback that shows a bar once the load has taken `BAR_DELAY_SECONDS`. `stack` removes the bar."""
    start = time.monotonic()
    is_terminal = sys.stderr.isatty() if console is None else console.is_terminal
    update_bar: Callable[[float], None] | None = None

    def report(fraction: float) -> bool:
        nonlocal update_bar
        if is_terminal and update_bar is None and time.monotonic() - start > BAR_DELAY_SECONDS:
            update_bar = show_bar(description, console, stack)
        if update_bar is not None:
            update_bar(fraction)
        return True

    return report


def show_bar(description: str, console: Console | None, stack: contextlib.ExitStack) -> Callable[[float], None]:
    """Show a progress bar until `stack` is closed, and return a function that updates it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn()
    bar = stack.enter_context(Progress(*columns, console=console or Console(stderr=True), transient=True))
    task = bar.add_task(description, total=1.0)
    return lambda fraction: bar.update(task, completed=fraction)


def resolve_or_pull(name: str) -> Path:
    """Return the path of a model. Downloads a catalog model that is not installed."""
    try:
        return registry.resolve(name)
    except ModelNotFound:
        if registry.parse_name(name) is None:
            raise
    from afterglow.cli.models import pull_with_progress

    return pull_with_progress(name)
