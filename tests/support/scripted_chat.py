"""`afterglow` with a model that writes given answers: `python scripted_chat.py FILE chat MODEL`.

The file is a JSON object: `answers`, and `seconds`, a pause before each token. Only the sampling is replaced.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from rich.console import Console

from afterglow.api.model import Model
from afterglow.chat.output.response import Delta
from afterglow.cli import chat, repl
from afterglow.cli.display import Display, show_response
from afterglow.cli.main import main
from afterglow.cli.open_model import open_model
from afterglow.cli.settings import Settings
from afterglow.testing.script import script_answers


def run() -> None:
    """Run the command line with the script of the first argument."""
    script = json.loads(Path(sys.argv.pop(1)).read_text())

    def pause(deltas: Iterable[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            time.sleep(script["seconds"])
            yield delta

    def show_slowly(deltas: Iterable[Delta], display: Display) -> None:
        show_response(pause(deltas), display)

    with ExitStack() as stack:

        def open_scripted_model(settings: Settings, console: Console) -> Model:
            model = open_model(settings, console)
            stack.enter_context(script_answers(model, script["answers"]))
            return model

        for module in (chat, repl):
            stack.enter_context(mock.patch.object(module, "open_model", open_scripted_model, create=True))
        stack.enter_context(mock.patch.object(repl, "show_response", show_slowly))
        main()


if __name__ == "__main__":
    run()
