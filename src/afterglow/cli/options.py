"""Arguments and flags of the commands. The flags of settings are generated from the declarations of the settings."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import typer.core
from pydantic.fields import FieldInfo

from afterglow.api.options import ContextOptions, LoadOptions, SamplingOptions, describe_option, get_fields
from afterglow.cli.settings import GENERATION_DEFAULTS, SERVER_FIELDS, SETTINGS_FIELDS, get_flag

# --- settings

CONTEXT_OPTIONS = tuple(get_fields(ContextOptions))
MODEL_OPTIONS = tuple(get_fields(LoadOptions))
ONE_SEQUENCE_OPTIONS = tuple(name for name in MODEL_OPTIONS if name != "sequences")
GENERATION_OPTIONS = ("system", *(name for name in GENERATION_DEFAULTS if name != "overflow"))
SAMPLING_OPTIONS = tuple(get_fields(SamplingOptions))
SERVER_OPTIONS = tuple(SERVER_FIELDS)


def accept_settings(names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the flags of settings to a command. `load_command_settings` reads their values."""
    flags = {name: _build_flag(name, (SETTINGS_FIELDS | SERVER_FIELDS)[name]) for name in names}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*positional: Any, **parameters: Any) -> None:
            function(*positional, **{name: value for name, value in parameters.items() if name not in flags})

        signature = inspect.signature(function, eval_str=True)
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in flags.items()
        ]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), *parameters]
        )
        return command

    return decorate


def _build_flag(name: str, field: FieldInfo) -> Any:
    """Return the annotation that declares the flag of a setting: type, limits and help."""
    is_union = get_origin(field.annotation) in (Union, types.UnionType)
    kinds = {*(get_args(field.annotation) if is_union else (field.annotation,))} - {type(None)}
    limits = {limit: getattr(item, limit) for item in field.metadata for limit in ("ge", "le") if hasattr(item, limit)}
    help_text, flag = describe_option(name, field), get_flag(name)
    if kinds == {bool}:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=help_text)]
    if name in ("draft", "adapters") or (isinstance(field.default, tuple) and name in SERVER_FIELDS):
        return Annotated[list[str] | None, typer.Option(flag, help=f"{help_text} Repeatable.")]
    if kinds in ({int}, {float}) and not name.endswith(("_bytes", "keep_alive")):  # those may have units
        kind = int if kinds == {int} else float
        option = typer.Option(flag, help=help_text, min=limits.get("ge"), max=limits.get("le"))
        return Annotated[kind | None, option]
    choices = "|".join(get_args(field.annotation)) if get_origin(field.annotation) is Literal else None
    return Annotated[str | None, typer.Option(flag, help=help_text, metavar=choices)]


# --- model

ModelArgument = Annotated[
    str | None, typer.Argument(help="Model name from `afterglow models`, or path.", show_default=False)
]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="Model name or path.")]
ModelsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Model names from `afterglow models`, or paths. NAME=MODEL serves a model under another name.",
        show_default=False,
    ),
]

OpenPageOption = Annotated[bool, typer.Option("--open", help="Open the web page in a browser.")]

RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Run the replicas on a Ray cluster: its address HOST:PORT, `auto` for that of this machine, or `local` to "
        "start one. Without an address: `auto` if there is one, else `local`. Needs the extra `ray`.",
    ),
]
RAY_ADDRESS = re.compile(r"auto|local|[^/=]+:\d+")  # every other word after `--ray` is a model


class ServeCommand(typer.core.TyperCommand):
    """Command with a flag `--ray` whose value is optional. Typer has no such flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command."""
        return super().parse_args(ctx, mark_missing_address(args))


def mark_missing_address(arguments: Sequence[str]) -> list[str]:
    """Give `--ray` an empty value where no address follows it.

    >>> mark_missing_address(["--ray", "smollm2"])
    ['--ray=', 'smollm2']
    >>> mark_missing_address(["smollm2", "--ray", "auto"])
    ['smollm2', '--ray', 'auto']
    >>> mark_missing_address([])
    []
    """
    following = [*arguments, ""][1:]
    return [
        "--ray=" if word == "--ray" and not RAY_ADDRESS.fullmatch(next_word) else word
        for word, next_word in zip(arguments, following, strict=True)
    ]


# --- request

PromptWordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] PROMPT",
        help="User message, after the name or path of a model if it is not the default one. `-`: only piped input.",
        show_default=False,
    ),
]
RawOption = Annotated[bool, typer.Option("--raw", help="Complete the text without the chat template.")]
SchemaOption = Annotated[Path | None, typer.Option(help="File with a JSON schema that the response must satisfy.")]
ImageOption = Annotated[
    list[Path] | None,
    typer.Option("--image", help="Image file for the first message. Repeatable.", show_default=False),
]
AudioOption = Annotated[
    list[Path] | None,
    typer.Option("--audio", help="Audio file for the first message. Repeatable.", show_default=False),
]
