"""Runs `afterglow` commands: as a child process, in this process, or in a pseudo-terminal with real keys."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pexpect
import pyte
import pytest

from afterglow.cli.main import main
from afterglow.testing import models

GREEDY = {"AFTERGLOW_TEMPERATURE": "0"}  # repeatable responses
AFTERGLOW = [sys.executable, "-m", "afterglow.cli.main"]
TIMEOUT_SECONDS = 120
SCRIPTED_CHAT = str(Path(__file__).with_name("scripted_chat.py"))


def run_command(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a child process and wait for its end."""
    return subprocess.run(
        [*AFTERGLOW, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        env={**os.environ, **GREEDY, **environment},
    )


def run_in_process(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which saves the start of a child process and its imports."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        for name, value in {**GREEDY, **environment}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["afterglow", *arguments])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            main()
        except SystemExit as exit:
            code = int(exit.code or 0)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


class ChatTerminal:
    """`afterglow chat` in a pseudo-terminal of 120 columns, with the contents of its screen."""

    def __init__(
        self,
        *arguments: str,
        term: str = "xterm",
        model: str | None = "",
        answers: Sequence[str] = (),
        seconds: float = 0.0,
        rows: int = 40,
        **environment: str,
    ) -> None:
        """Start the chat and wait for its prompt.

        `model`: its path; None if the arguments name it. `answers`: what the model writes, with a pause of `seconds`
        before each token; without them it counts through the alphabet and stops after 12 tokens.
        """
        command, script_path = AFTERGLOW[1:], None
        if answers:
            with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as script:
                json.dump({"answers": answers, "seconds": seconds}, script)
            script_path = script.name
            command = [SCRIPTED_CHAT, script_path]
        command.append("chat")
        if model is not None:
            command.append(model or str(models.get_path("successor-attention")))
        if not answers:
            command += ["--max-tokens", "12"]
        self.child = pexpect.spawn(
            AFTERGLOW[0],
            [*command, *arguments],
            env={**os.environ, **GREEDY, "TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
            encoding="utf-8",
            timeout=TIMEOUT_SECONDS,
            dimensions=(rows, 120),
        )
        self.output = ""  # everything that was written
        self.screen = pyte.HistoryScreen(120, rows, history=10_000)
        self._stream = pyte.Stream(self.screen)
        self.first_screen = self.wait_for_prompt()
        if script_path is not None:
            os.unlink(script_path)

    def update(self, seconds: float) -> bool:
        """Draw new output on the screen. Return False if none came within the time."""
        try:
            text = self.child.read_nonblocking(4096, seconds)
        except pexpect.TIMEOUT:
            return False
        self.output += text
        self._stream.feed(text)
        return True

    def wait_for(self, text: str) -> None:
        """Wait until a text is on the screen."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if text in "\n".join(self.lines):
                return
            self.update(0.25)
        raise AssertionError(f"no {text!r}: {self.lines}")

    def wait_for_prompt(self) -> str:
        """Wait for the input prompt and return the screen."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if not self.update(0.25) and self.lines and self.lines[-1] == ">":
                return "\n".join(self.lines)
        raise AssertionError(f"no input prompt: {self.lines}")

    @property
    def scrollback(self) -> list[str]:
        """Lines that left the screen at its top, the oldest first."""
        return ["".join(line[column].data for column in range(120)).rstrip() for line in self.screen.history.top]

    @property
    def lines(self) -> list[str]:
        """Lines of the screen, without empty ones at the end."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def send_line(self, line: str) -> str:
        """Clear the screen, send a line, and return the screen at the next prompt."""
        self.screen.erase_in_display(2)
        self.screen.cursor_position()
        self.child.send(line + "\r")
        return self.wait_for_prompt()

    def send_line_unwrapped(self, line: str) -> str:
        """Like `send_line`, but as one line: where the screen wraps depends on the width of numbers and paths."""
        return " ".join(self.send_line(line).split())

    def exit(self) -> int:
        """Send Ctrl-D and return the exit code."""
        self.child.sendeof()
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus
