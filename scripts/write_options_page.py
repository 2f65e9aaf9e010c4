"""Writes docs/reference/options.md from the declarations of the options of Python calls.

    make docs

A test fails if the page is not up to date.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from pydantic.fields import FieldInfo

from afterglow.api.options import GenerationOptions, LoadOptions, PromptOptions, format_default, get_fields
from afterglow.llama.sampling import Sampling

TARGET = Path(__file__).parent.parent / "docs" / "reference" / "options.md"
PAGE = """\
<!-- Written by scripts/write_options_page.py (`make docs`). Do not edit. -->

# Options

Keyword arguments of the Python API. A misspelled or invalid option raises `InvalidArgument` with the nearest name;
type checkers know them as `LoadOptions`, `GenerationOptions` and `PromptOptions`. The commands have the options of
`load` as flags and settings: [settings.md](../settings.md).

## `afterglow.load`

{load}

## `Model.complete`, `Model.stream`

{generation}

## `Model.chat`, `Conversation`

All of the options above, and:

{prompt}

## `Sampling`

Fields of `Sampling`, the value of the option `sampling`. The order in which the samplers are applied:
[samplers.md](../low-level/samplers.md).

{sampling}
"""


def build_page() -> str:
    """Return the text of the page."""
    return PAGE.format(
        load=build_table(get_fields(LoadOptions).items()),
        generation=build_table(get_fields(GenerationOptions).items()),
        prompt=build_table(get_fields(PromptOptions).items()),
        sampling=build_sampling_table(),
    )


def build_table(fields: Iterable[tuple[str, FieldInfo]]) -> str:
    """Return the rows of options: name, default and description."""
    rows = [f"| `{name}` | {format_default(name, field)} | {field.description} |" for name, field in fields]
    return "\n".join(["| option | default | description |", "|---|---|---|", *rows])


def build_sampling_table() -> str:
    """Return the rows of the sampling parameters: name and default."""
    defaults = Sampling()
    rows = [f"| `{field.name}` | `{getattr(defaults, field.name)!r}` |" for field in dataclasses.fields(Sampling)]
    return "\n".join(["| field | default |", "|---|---|", *rows])


if __name__ == "__main__":
    TARGET.write_text(build_page())
