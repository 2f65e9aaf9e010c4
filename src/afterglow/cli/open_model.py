"""Loads the model of a command: downloads it if needed, and shows progress."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from afterglow import registry
from afterglow.api.load import load
from afterglow.api.model import Model
from afterglow.api.options import LoadOptions
from afterglow.cli.models import pull_with_progress
from afterglow.cli.settings import Settings
from afterglow.errors import ModelNotFound


def open_model(settings: Settings, console: Console, **overrides: Unpack[LoadOptions]) -> Model:
    """Load the model that the settings name. Shows progress on `console`. `overrides` replace its settings."""
    load_options: LoadOptions = {**settings.load_options, **overrides, "replicas": 1}  # they serve several clients
    resolve_or_pull(settings.model)
    columns = TextColumn("{task.description}", markup=False), BarColumn()
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"loading {settings.model}", total=1.0)

        def update_bar(fraction: float) -> bool:
            bar.update(task, completed=fraction)
            return True

        return load(
            settings.model,
            sampling_defaults=settings.sampling_defaults,
            progress=update_bar,
            **load_options,
        )


def resolve_or_pull(name: str) -> Path:
    """Return the path of a model. Downloads a catalog model that is not installed."""
    try:
        return registry.resolve(name)
    except ModelNotFound:
        if registry.parse_name(name) is None:
            raise
    return pull_with_progress(name)
