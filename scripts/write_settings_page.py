"""Writes docs/settings.md from the declarations of the settings.

    make docs

A test fails if the page is not up to date.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from afterglow.api.options import LoadOptions, format_default, get_fields
from afterglow.cli.settings import MODEL_TABLE_FIELDS, SERVER_FIELDS, SETTINGS_FIELDS, TABLE_FIELDS

TARGET = Path(__file__).parent.parent / "docs" / "settings.md"
PAGE = """\
<!-- Written by scripts/write_settings_page.py (`make docs`). Do not edit. -->

# Settings

The commands read `settings.toml` from the user's configuration directory (on Linux `~/.config/afterglow/`).
`AFTERGLOW_SETTINGS=/path` selects another file. The precedence is the same for every setting:

1. flags (`--context 8192`)
2. environment variables (`AFTERGLOW_CONTEXT=8192`)
3. the file (`context = 8192`)
4. the defaults below

Flags and variables are spelled like the keys: `disk_cache_bytes` is `--disk-cache-bytes` and
`AFTERGLOW_DISK_CACHE_BYTES`. In variables, a list is written with commas (`a,b`) or as JSON (`["a", "b"]`). Sizes may
have a unit, e.g. `4GiB`. An unknown name is an error that suggests the nearest valid one, a wrong value is an error
that says what is valid; both name the flag, the variable or the key of the file, and nothing is started.

These variables are read before the settings: `AFTERGLOW_CACHE` (directory of everything that can be computed or
downloaded again), `AFTERGLOW_DATA` (directory of conversations, runs of agents, batches, created models and other
[files](files.md) that cannot), `AFTERGLOW_MODELS` (directory of pulled models), `AFTERGLOW_LIBLLAMA` (a custom
llama.cpp library).

## Model

`serve`, `chat` and `run` have these flags; `afterglow.load` has the same options in Python. `perplexity` has those up
to `yarn_beta_slow`. `run` and `perplexity` use one sequence and have no flag for it. For `serve`, `draft` also takes
`NAME=DRAFT` for one model, and `--draft` can be repeated.

{model}

### Tables of models

`[models.NAME]` describes one model for `serve`, which serves all of them if it has no arguments, or those that it
names. Beside the keys above, which override the common setting for this model wherever that is set, a table has:

{table}

```toml
[models.assistant]
model = "qwen3-8b.gguf"
context = 32768
pinned = true

[models.vision]
model = "gemma3-4b.gguf"
keep_alive = "10m"
```

## Responses

{responses}

## Server

These keys belong to the table `[server]` of the file, and their variables start with `AFTERGLOW_SERVER_`. Flags of
lists are singular and can be repeated: `--api-key`, `--allow-host`, `--allow-origin`, `--media-host`.

{server}
"""


def build_page() -> str:
    """Return the text of the page."""
    model = ["model", *get_fields(LoadOptions)]
    responses = [name for name in SETTINGS_FIELDS if name not in (*model, *TABLE_FIELDS)]
    own = [name for name in MODEL_TABLE_FIELDS if name not in get_fields(LoadOptions)]
    return PAGE.format(
        model=build_table((name, SETTINGS_FIELDS[name]) for name in model),
        table=build_table((name, MODEL_TABLE_FIELDS[name]) for name in own),
        responses=build_table((name, SETTINGS_FIELDS[name]) for name in responses),
        server=build_table(SERVER_FIELDS.items()),
    )


def build_table(fields: Iterable[tuple[str, FieldInfo]]) -> str:
    """Return the rows of settings: key, type, default and description."""
    rows = [
        f"| `{name}` | {format_type(name, field.annotation)} | {format_default(name, field)} | {field.description} |"
        for name, field in fields
    ]
    return "\n".join(["| key | type | default | description |", "|---|---|---|---|", *rows])


def format_type(name: str, annotation: Any) -> str:
    """Return a type in words."""
    if name.endswith("_bytes"):
        return "size"
    if name in ("keep_alive", "file_retention"):
        return "duration"
    if name == "lora":
        return "list of names, each with or without a scale"
    if get_origin(annotation) is Annotated:
        return format_type(name, get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return ", ".join("false" if value is False else f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [format_type(name, kind) for kind in get_args(annotation) if kind is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if get_origin(annotation) is not None:
        inner = format_type(name, get_args(annotation)[0])
        return inner if get_origin(annotation).__name__ == "PathLike" else f"list of {inner}s"
    return {bool: "true or false", int: "integer", float: "number"}.get(annotation, "text")


if __name__ == "__main__":
    TARGET.write_text(build_page())
