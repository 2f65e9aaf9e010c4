"""Input line: completion of commands and arguments, and the file of the history."""

from __future__ import annotations

import os
import pty
import signal
import stat
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory

from afterglow.cli import line_editor
from afterglow.cli.line_editor import CommandCompleter, open_history


def complete(text: str) -> list[str]:
    completer = CommandCompleter(
        {"model": lambda: ["llama", "smollm2", "smollm3"], "more": None, "load": None}, ["load"]
    )
    return [completion.text for completion in completer.get_completions(Document(text), CompleteEvent())]


@pytest.mark.parametrize(
    ("text", "completions"),
    [
        ("/mo", ["model ", "more"]),
        ("/x", []),
        ("/model smol", ["smollm2", "smollm3"]),
        ("/model ", ["llama", "smollm2", "smollm3"]),
        ("/more ", []),
        ("what is /mo", []),
        ("/mo\n", []),
    ],
)
def test_commands_and_arguments_are_completed(text: str, completions: list[str]) -> None:
    assert complete(text) == completions


TERMINATED_PROGRAM = """
import os, signal, sys
from prompt_toolkit.completion import DummyCompleter
from prompt_toolkit.history import InMemoryHistory
from rich.console import Console
from afterglow.cli import keyboard, line_editor

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)

class History(InMemoryHistory):  # which is loaded by a task of the line editor
    def load_history_strings(self):
        terminate()
        return []

with keyboard.exit_on_signals():
    editor = line_editor.LineEditor(Console(), History(), DummyCompleter())
    if sys.argv[1] == "before":
        prompt = editor._session.prompt
        editor._session.prompt = lambda *arguments, **options: (terminate(), prompt(*arguments, **options))
    editor.read("> ")
"""


@pytest.mark.parametrize("moment", ["before", "in a task"])
def test_a_terminated_line_editor_restores_the_terminal(moment: str) -> None:
    keyboard, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    with os.fdopen(keyboard, "rb"), os.fdopen(terminal, "wb") as device:
        child = subprocess.run(
            [sys.executable, "-c", TERMINATED_PROGRAM, moment],
            stdin=device,
            stdout=device,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            timeout=60,
        )
        assert (child.returncode, child.stderr.decode()) == (128 + signal.SIGTERM, "")
        assert termios.tcgetattr(terminal) == before


def test_paths_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    assert complete(f"/load {tmp_path}/ta") == ["lk.json"]


def test_the_history_is_private_and_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_editor, "MAX_HISTORY_BYTES", 1000)
    path = tmp_path / "chat" / "history"
    history = open_history(path)
    for number in range(100):
        history.store_string(f"line {number}")
    path.chmod(0o644)
    lines = list(open_history(path).load_history_strings())
    assert 10 < len(lines) < 90
    assert lines == [f"line {number}" for number in range(99, 99 - len(lines), -1)]  # the newest first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_history_that_cannot_be_written_is_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "chat").touch()
    assert isinstance(open_history(tmp_path / "chat" / "history"), InMemoryHistory)
    assert isinstance(open_history(None), InMemoryHistory)


def test_a_line_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    history = open_history(tmp_path / "history")
    (tmp_path / "history").unlink()
    (tmp_path / "history").mkdir()
    history.append_string("line")
    assert history.get_strings() == ["line"]
