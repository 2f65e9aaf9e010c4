"""`afterglow run`: one response to one prompt. `afterglow perplexity`: perplexity of a text."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from afterglow import registry
from afterglow.api.model import Model
from afterglow.api.options import ChatGenerationOptions, GenerationOptions, select_options
from afterglow.api.outputs import Completion
from afterglow.chat.messages import Message, build_user_message
from afterglow.chat.output.response import ChatResponse
from afterglow.chat.template.renderer import prestart_child
from afterglow.cli import options
from afterglow.cli.display import PlainDisplay, format_statistics, show_response
from afterglow.cli.loop_guard import LoopGuard, exit_on_loop, guard_deltas
from afterglow.cli.open_model import open_model
from afterglow.cli.settings import load_command_settings
from afterglow.cli.standard_input import check_utf8, is_terminal, read_standard_input
from afterglow.errors import InvalidArgument, ModelNotFound

CHAT_ONLY_PARAMETERS = (
    "schema",
    "system",
    "reasoning",
    "chat_template",
    "projector",
    "strip_media",
    "image",
    "audio",
    "stats",
)
PROMPT_ONLY_PARAMETERS = ("raw", "schema", "stats", "as_json")
# One request runs at a time, so that one sequence of the KV cache is enough.
RUN_SETTINGS = [*options.GENERATION_OPTIONS, "private", "loop_guard", *options.ONE_SEQUENCE_OPTIONS]


@options.accept_settings(RUN_SETTINGS)
def run(
    command: typer.Context,
    words: options.PromptWordsArgument = None,
    model: options.ModelOption = None,
    raw: options.RawOption = False,
    schema: options.SchemaOption = None,
    image: options.ImageOption = None,
    audio: options.AudioOption = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics to standard error.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, finish reason and usage.")
    ] = False,
) -> None:
    """Print the response to one prompt.

    Piped input comes before the prompt: cat file | afterglow run "Summarise this". The first word may be a model, as in
    `ollama run`: afterglow run MODEL "PROMPT". A model without a prompt starts a chat in a terminal.
    """
    command.params["model"], prompt = parse_words(words or [], model)
    text = read_prompt(prompt)
    if text is None:
        return start_chat(command, image, audio)
    settings = load_command_settings(command)
    if raw:
        reject_flags(command, CHAT_ONLY_PARAMETERS, "cannot be used with --raw")
    else:
        prestart_child()  # it starts while the model is loaded
    generation_options = settings.generation_options
    if schema is not None:
        generation_options["response_format"] = read_response_format(schema)
    with open_model(settings, sequences=1) as loaded, exit_on_loop():
        if raw:
            guard = LoopGuard(enabled=settings.loop_guard)
            return continue_text(loaded, text, generation_options, settings.model if as_json else None, guard)
        messages = [Message(role="system", content=settings.system)] if settings.system else []
        messages.append(build_user_message(text, image or (), audio or ()))
        stream = loaded.chat(messages, stream=True, **generation_options)
        deltas = guard_deltas(stream.deltas(), enabled=settings.loop_guard)
        if as_json:
            for _ in deltas:
                pass
        else:
            show_response(deltas, PlainDisplay())
        response = stream.response
        if as_json:
            print_json(settings.model, response)
        if stats:
            print(format_statistics(response), file=sys.stderr)
        if schema is not None:
            check_complete(response)


# --- prompt


def parse_words(words: Sequence[str], model: str | None) -> tuple[str | None, str]:
    """Return the model, if one is named, and the prompt. The first of several words is a model.

    >>> parse_words(["Why?"], None), parse_words(["smollm2", "Why?"], None), parse_words(["smollm2"], "other")
    ((None, 'Why?'), ('smollm2', 'Why?'), ('other', 'smollm2'))
    """
    if model is not None or not words:
        return model, " ".join(words)
    first, *rest = words
    if is_model(first):
        return first, " ".join(rest)
    if not rest:
        return None, first
    try:
        registry.resolve(first)
    except ModelNotFound as error:
        raise ModelNotFound(first, f"{error.advice}. Put a prompt of several words into quotes") from None
    return first, " ".join(rest)


def is_model(word: str) -> bool:
    """Whether a word is the name of a model, known or on this machine, or the path of a GGUF file."""
    entry = registry.parse_name(word)
    if entry is not None and (entry.name in registry.CATALOG or ":" in word):  # `and/or` is a word
        return True
    if any(map(str.isspace, word)) and not word.endswith(".gguf"):
        return False
    try:
        return registry.resolve(word).suffix == ".gguf" or not Path(word).exists()
    except ModelNotFound:
        return word.endswith(".gguf")


def read_prompt(prompt: str) -> str | None:
    """Return the prompt after the piped input; `-` is the piped input alone. None without either."""
    check_utf8("PROMPT", prompt)
    piped = read_standard_input() if not is_terminal() or prompt == "-" else ""
    if prompt in ("", "-"):
        return piped if piped.strip() else None
    return f"{piped.rstrip()}\n\n{prompt}" if piped.strip() else prompt


def start_chat(command: typer.Context, image: list[Path] | None, audio: list[Path] | None) -> None:
    """Start a chat, as `ollama run MODEL` does; without a model or a terminal, say that the prompt is missing."""
    reject_flags(command, PROMPT_ONLY_PARAMETERS, "needs a prompt")
    model = command.params["model"]
    if model is None or not is_terminal():
        reason = 'is missing: afterglow run "PROMPT", or pipe it in; `afterglow chat` starts a chat'
        raise InvalidArgument("PROMPT", reason)
    del command.params["stats"]  # the flag of `run`, not the setting of `chat`
    # The chat takes as long to import as a response to start.
    importlib.import_module("afterglow.cli.chat").chat(command, model=model, image=image, audio=audio)


def reject_flags(command: typer.Context, names: Sequence[str], reason: str) -> None:
    """Raise `InvalidArgument` for flags that would have no effect."""
    for name in names:
        if command.params[name] not in (None, False, [], ()):
            raise InvalidArgument(f"--{name.removeprefix('as_').replace('_', '-')}", reason)


def read_response_format(path: Path) -> dict[str, object]:
    """Read a JSON schema file as a response format."""
    try:
        schema = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument("schema", f"{path} cannot be read: {error}") from None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# --- output


def continue_text(
    model: Model, text: str, generation_options: ChatGenerationOptions, json_name: str | None, guard: LoopGuard
) -> None:
    """Print the completion of `text`, without the chat template; with a model name, as JSON."""
    completion_options = select_options(GenerationOptions, generation_options)
    completion_options["overflow"] = "refuse"  # the setting is for conversations
    completion_options["sampling"] = model.sampling_defaults.sampling
    if json_name is not None:
        return print_json(json_name, model.complete(text, **completion_options))
    for piece in model.stream(text, **completion_options):
        print(piece, end="", flush=True)
        guard.add(piece)
    print()


def print_json(model: str, response: ChatResponse | Completion) -> None:
    """Print a response as one JSON object, with the name of the model."""
    body: dict[str, Any] = {"model": model, "text": response.text}
    if isinstance(response, ChatResponse) and response.reasoning:
        body["reasoning"] = response.reasoning
    body |= {"finish_reason": response.finish_reason, "usage": asdict(response.usage)}
    if response.truncation is not None:
        body["truncation"] = asdict(response.truncation)
    print(json.dumps(body, ensure_ascii=False))


def check_complete(response: ChatResponse) -> None:
    """Exit with status 1 if the response ended before it satisfied its schema."""
    if response.finish_reason != "stop":
        tokens = f"{response.usage.generated_tokens:,} tokens"
        message = f"the response does not satisfy the schema: it stopped at the token limit, after {tokens}"
        typer.echo(f"afterglow: {message}. Use a larger --max-tokens, or --context if the context is full.", err=True)
        raise typer.Exit(1)


@options.accept_settings([name for name in options.CONTEXT_OPTIONS if name != "sequences"])
def perplexity(
    command: typer.Context,
    file: Annotated[Path, typer.Argument(help="Text file. `-` reads standard input.")],
    model: options.ModelOption = None,
) -> None:
    """Print the perplexity of a text: 1 is certainty, the vocabulary size is chance."""
    try:
        text = read_standard_input() if str(file) == "-" else file.read_text()
    except (OSError, ValueError) as error:
        raise InvalidArgument("file", f"{file} cannot be read: {error}") from None
    with open_model(load_command_settings(command), sequences=1) as loaded:
        score = loaded.logprobs(text)
    windows = "1 window" if score.windows == 1 else f"{score.windows} windows"
    print(f"{score.perplexity:.4f} over {len(score.tokens):,} tokens in {windows}")
