"""`afterglow chat`: talk to a model in the terminal, or pipe one question in and get the answer out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from afterglow import registry
from afterglow.cli.models import progress_shown
from afterglow.errors import ModelNotFound
from afterglow.loading import load
from afterglow.model import Model

Message = tuple[str, str]
SYSTEM = "You are a helpful assistant."
EXIT_WORDS = ("/exit", "/quit", "/bye")


def chat(
    model: Annotated[str, typer.Argument(help="A name from `afterglow models`, or a path.")] = registry.DEFAULT,
    system: Annotated[str, typer.Option(help="What the model should know before the conversation.")] = SYSTEM,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 512,
    context: Annotated[int, typer.Option(min=64, help="Tokens the whole conversation may take.")] = 4096,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: the processor's cores.")] = None,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D ends the conversation.

    With something piped in, it is taken as one question: echo "Why is the sky blue?" | afterglow chat
    """
    console = Console(stderr=True)
    path = local_path(model)
    with console.status(f"loading {model}"):
        loaded = load(path, context=context, threads=threads)
    messages: list[Message] = [("system", system)] if system else []
    with loaded:
        if sys.stdin.isatty():
            console.print(f"[bold]{model}[/]  [dim]Ctrl-C stops an answer, Ctrl-D ends[/]")
            converse(loaded, messages, max_tokens, console)
        elif question := sys.stdin.read().strip():
            write(answer(loaded, [*messages, ("user", question)], max_tokens))


def local_path(name: str) -> Path:
    """Where the model is; a known one that is not here yet is fetched first."""
    try:
        return registry.resolve(name)
    except ModelNotFound:
        if registry.parse(name) is None:
            raise
    with progress_shown(name) as progress:
        return registry.pull(name, progress)


def converse(model: Model, messages: list[Message], max_tokens: int, console: Console) -> None:
    """Ask and answer until the person ends it."""
    while (question := ask(console)) is not None:
        if not question:
            continue
        try:
            text = write(answer(model, [*messages, ("user", question)], max_tokens))
        except KeyboardInterrupt:
            console.print("\n[dim]stopped[/]")
            continue
        messages += [("user", question), ("assistant", text)]


def ask(console: Console) -> str | None:
    """The person's next line; None where they want to end."""
    try:
        line = console.input("[bold green]>[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if line in EXIT_WORDS else line


def answer(model: Model, messages: list[Message], max_tokens: int) -> Iterator[str]:
    return model.stream(model.chat_prompt(messages), max_tokens=max_tokens)


def write(parts: Iterator[str]) -> str:
    """Print the parts as they come; the whole text."""
    text = ""
    for part in parts:
        text += part
        print(part, end="", flush=True)
    print()
    return text
