"""Runs `afterglow` commands: as a child process, or in a pseudo-terminal with real keys."""

from __future__ import annotations

import os
import subprocess
import sys

import pexpect
import pyte

from afterglow.testing import models

GREEDY = {"AFTERGLOW_TEMPERATURE": "0"}  # repeatable responses
AFTERGLOW = [sys.executable, "-m", "afterglow.cli.main"]


def run_command(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a child process and wait for its end."""
    return subprocess.run(
        [*AFTERGLOW, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **GREEDY, **environment},
    )


class ChatTerminal:
    """`afterglow chat` in a pseudo-terminal of 40 lines, with the contents of its screen."""

    def __init__(self, *arguments: str, term: str = "xterm", model: str = "") -> None:
        model = model or str(models.get_path("successor-attention"))
        command = [*AFTERGLOW[1:], "chat", model, "--max-tokens", "12"]
        environment = {**os.environ, **GREEDY, "TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.child = pexpect.spawn(
            AFTERGLOW[0], [*command, *arguments], env=environment, encoding="utf-8", timeout=120, dimensions=(40, 120)
        )
        self.screen = pyte.Screen(120, 40)
        self._stream = pyte.Stream(self.screen)
        self.wait_for_prompt()

    def update(self, seconds: float) -> bool:
        """Draw new output on the screen. Return False if none came within the time."""
        try:
            self._stream.feed(self.child.read_nonblocking(4096, seconds))
        except pexpect.TIMEOUT:
            return False
        return True

    def wait_for_prompt(self) -> str:
        """Wait for the input prompt and return the screen."""
        for _ in range(300):
            if not self.update(0.25) and self.lines and self.lines[-1] == ">":
                return "\n".join(self.lines)
        raise AssertionError(f"no input prompt: {self.lines}")

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
