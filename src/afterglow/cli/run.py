"""`afterglow run`: one prompt, one answer; and `afterglow perplexity`: how likely a text is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from afterglow.cli import chat
from afterglow.cli.opening import open_model
from afterglow.cli.settings import settings
from afterglow.cli.showing import page_for, show, statistics
from afterglow.conversation import Conversation
from afterglow.errors import InvalidArgument


def run(
    prompt: Annotated[str, typer.Argument(help="What to ask. `-` reads standard input.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="A name or a path.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    schema: Annotated[Path | None, typer.Option(help="A JSON schema that the answer must satisfy.")] = None,
    system: chat.System = None,
    max_tokens: chat.MaxTokens = None,
    temperature: chat.Temperature = None,
    seed: chat.Seed = None,
    reasoning: chat.Reasoning = None,
    context: chat.Context = None,
    threads: chat.Threads = None,
    gpu_layers: chat.GpuLayers = None,
    chat_template: chat.Template = None,
    projector: chat.Projector = None,
    strip_media: chat.StripMedia = None,
    image: chat.Images = None,
    audio: chat.Audio = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say on standard error what it took.")] = False,
) -> None:
    """Answer one prompt on standard output, and end."""
    chosen = settings(
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        reasoning=reasoning,
        context=context,
        threads=threads,
        gpu_layers=gpu_layers,
        chat_template=chat_template,
        projector=projector,
        strip_media=strip_media,
    )
    console = Console(stderr=True)
    text = sys.stdin.read() if prompt == "-" else prompt
    options = chat.answer_options(chosen)
    if raw and (image or audio):
        raise InvalidArgument("--image" if image else "--audio", "needs the chat template: leave --raw out")
    if schema is not None:
        options["response_format"] = schema_format(schema)
    with open_model(chosen, console) as loaded:
        if raw:
            options = {name: value for name, value in options.items() if name not in ("reasoning", "response_format")}
            for piece in loaded.stream(text, **options):
                print(piece, end="", flush=True)
            print()
            return
        conversation = Conversation(loaded, system=chosen.system, **options)
        show(conversation.deltas(text, images=image or (), audio=audio or ()), page_for(Console(), markdown=False))
        if stats and conversation.last is not None:
            console.print(statistics(conversation.last), highlight=False, soft_wrap=True)


def schema_format(path: Path) -> dict[str, object]:
    """A file with a JSON schema, as a response format."""
    try:
        schema = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument("schema", f"{path} cannot be read: {error}") from None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def perplexity(
    file: Annotated[Path, typer.Argument(help="A text file; `-` reads standard input.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="A name or a path.")] = None,
    context: chat.Context = None,
    threads: chat.Threads = None,
    gpu_layers: chat.GpuLayers = None,
) -> None:
    """Say how well the model predicts a text: 1 is certainty, the vocabulary's size is a blind guess."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, ValueError) as error:
        raise InvalidArgument("file", f"{file} cannot be read: {error}") from None
    chosen = settings(model=model, context=context, threads=threads, gpu_layers=gpu_layers)
    with open_model(chosen, Console(stderr=True)) as loaded:
        score = loaded.logprobs(text)
    print(f"{score.perplexity:.4f} over {len(score.tokens):,} tokens in {score.windows} windows")
