"""Shell completion from an index of all commands and flags, without importing the commands.

Responds to the scripts that `afterglow --install-completion` writes for bash, zsh and fish.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

INDEX_PATH = Path(__file__).with_name("commands.json")  # written by scripts/write_command_index.py
VARIABLE = "_AFTERGLOW_COMPLETE"  # set by the scripts
ROOT_FLAGS = ("--help", "--version", "--verbose", "--install-completion", "--show-completion")
MODEL_PARAMETERS = frozenset({"model", "models", "name", "names", "words", "draft"})

Description: TypeAlias = dict[str, Any]
CompletionItem: TypeAlias = tuple[str, str]  # value and help


# --- index


def read_index() -> dict[str, Description]:
    """Read the description of each command by name."""
    index: dict[str, Description] = json.loads(INDEX_PATH.read_text(encoding="utf-8"))
    return index


def describe_command(command: Any) -> Description:
    """Describe a command of typer, with its flags, arguments and subcommands, for the index."""
    description: Description = {"help": (command.help or "").strip().split("\n\n")[0].replace("\n", " ")}
    if subcommands := getattr(command, "commands", {}):
        description["commands"] = {name: describe_command(inner) for name, inner in subcommands.items()}
    description["parameters"] = [describe_parameter(parameter) for parameter in command.params]
    return description


def describe_parameter(parameter: Any) -> Description:
    """Describe a flag or an argument. `values` are its fixed values, or "models"."""
    metavar = getattr(parameter, "metavar", None) or ""
    values = "models" if parameter.name in MODEL_PARAMETERS else metavar.split("|") if "|" in metavar else None
    is_flag = parameter.param_type_name == "option"
    return {
        **({"flags": [*parameter.opts, *parameter.secondary_opts], "help": parameter.help or ""} if is_flag else {}),
        **({"switch": True} if getattr(parameter, "is_flag", False) else {}),
        **({"repeatable": True} if getattr(parameter, "multiple", False) or parameter.nargs == -1 else {}),
        **({"values": values} if values else {}),
    }


# --- completion


def print_completions() -> bool:
    """Print the completions that a script asks for. Return False if this process is not a completion."""
    shell = os.environ.get(VARIABLE, "").removeprefix("complete_")
    if shell == "bash":
        words = split_words(os.environ["COMP_WORDS"])
        position = int(os.environ["COMP_CWORD"])
        incomplete = words[position] if position < len(words) else ""
        print("\n".join(value for value, _ in find_completions(words[1:position], incomplete)))
    elif shell in ("zsh", "fish"):
        text = os.environ.get("_TYPER_COMPLETE_ARGS", "")
        words = split_words(text)[1:]
        incomplete = words.pop() if words and not text.endswith(" ") else ""
        completions = find_completions(words, incomplete)
        if shell == "zsh":
            print(format_for_zsh(completions))
        elif os.environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
            sys.exit(0 if completions else 1)  # without completions, fish completes files
        else:
            print("\n".join(f"{value}\t{' '.join(text.split())}" for value, text in completions))
    return shell in ("bash", "zsh", "fish")


def split_words(line: str) -> list[str]:
    """Split a command line. A quotation that is not closed yet is split at spaces."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def format_for_zsh(completions: Sequence[CompletionItem]) -> str:
    """Return the call of zsh's `_arguments` for these completions."""

    def quote(text: str) -> str:
        for character, replacement in (('"', '""'), ("'", "''"), ("$", "\\$"), ("`", "\\`"), (":", r"\\:")):
            text = text.replace(character, replacement)
        return f'"{text}"'

    if not completions:
        return "_files"
    items = "\n".join(f"{quote(value)}:{quote(' '.join(text.split()))}" for value, text in completions)
    return f"_arguments '*: :(({items}))'"


def find_completions(words: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """Return what may follow the words of a command line: commands, flags, values of a flag, or models.

    >>> find_completions(["run"], "--temp")[0][0]
    '--temperature'
    """
    node: Description = {"commands": read_index(), "parameters": [{"flags": ROOT_FLAGS, "help": "", "switch": True}]}
    value_of: Description | None = None  # the flag whose value comes next
    positionals = 0
    for word in words:
        if value_of is not None:
            value_of = None
        elif word.startswith("-") and word != "-":
            value_of = find_flag(node, word)
        elif word in node.get("commands", {}):
            node, positionals = node["commands"][word], 0
        else:
            positionals += 1
    if value_of is not None:
        found = [(value, "") for value in list_values(value_of)]
    elif incomplete.startswith("-"):
        flags = [parameter for parameter in node["parameters"] if "flags" in parameter]
        found = [(flag, parameter["help"]) for parameter in flags for flag in parameter["flags"]]
    else:
        found = [(name, command["help"]) for name, command in node.get("commands", {}).items()]
        arguments = [parameter for parameter in node["parameters"] if "flags" not in parameter]
        if arguments and (positionals < len(arguments) or arguments[-1].get("repeatable")):
            found += [(value, "") for value in list_values(arguments[min(positionals, len(arguments) - 1)])]
    return [(value, text) for value, text in found if value.startswith(incomplete)]


def find_flag(node: Description, word: str) -> Description | None:
    """Return the flag if its value is the next word."""
    for parameter in node["parameters"]:
        if word in parameter.get("flags", ()) and not parameter.get("switch"):
            flag: Description = parameter
            return flag
    return None


def list_values(parameter: Description) -> list[str]:
    """List the values of a flag or an argument; none if they are files or free text."""
    values = parameter.get("values", [])
    return list_model_names() if values == "models" else list(values)


def list_model_names() -> list[str]:
    """Return the names of the known models and of the models on this machine."""
    registry = importlib.import_module("afterglow.registry")
    models = [*registry.list_installed(), *registry.discover_models()]
    return list(dict.fromkeys([*registry.CATALOG, *(model.name for model in models)]))
