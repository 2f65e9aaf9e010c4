"""Write src/afterglow/cli/commands.json from the commands: `make docs`."""

from __future__ import annotations

import json

from afterglow.cli.commands import COMMANDS, load_command
from afterglow.cli.completion import INDEX_PATH, describe_command


def build_index() -> str:
    """Return the text of the index."""
    index = {name: describe_command(load_command(name)) for name in COMMANDS}
    return json.dumps(index, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    INDEX_PATH.write_text(build_index())
