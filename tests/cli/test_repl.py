"""The chat as a person in a terminal has it: a pseudo-terminal and real keys."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pyte
import pytest

from afterglow.cli.display import find_complete_blocks_end
from afterglow.testing import models


class Terminal:
    """A program in a terminal of 40 lines, and what its screen shows."""

    def __init__(self, *arguments: str, term: str = "xterm", model: str = "") -> None:
        model = model or str(models.get_path("successor-attention"))
        command = ["-m", "afterglow.cli.main", "chat", model, "--max-tokens", "12"]
        environment = {**os.environ, "TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.child = pexpect.spawn(
            sys.executable, [*command, *arguments], env=environment, encoding="utf-8", timeout=30, dimensions=(40, 120)
        )
        self.screen = pyte.Screen(120, 40)
        self._drawn = pyte.Stream(self.screen)
        self.read()

    def update(self, seconds: float) -> bool:
        """Draw what comes next; False where nothing came."""
        try:
            self._drawn.feed(self.child.read_nonblocking(4096, seconds))
        except pexpect.TIMEOUT:
            return False
        return True

    def read(self) -> str:
        """What the screen shows once a question is awaited."""
        for _ in range(300):
            if not self.update(0.25) and self.lines and self.lines[-1] == ">":
                return "\n".join(self.lines)
        raise AssertionError(f"no question is awaited: {self.lines}")

    @property
    def lines(self) -> list[str]:
        shown = [line.rstrip() for line in self.screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def say(self, line: str) -> str:
        """What the screen shows after this line was said and answered."""
        self.screen.erase_in_display(2)
        self.screen.cursor_position()
        self.child.send(line + "\r")
        return self.read()

    def end(self) -> int:
        self.child.sendeof()
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    assert terminal.end() == 0


def test_a_question_is_answered_with_what_it_took(terminal: Terminal) -> None:
    shown = terminal.say("hello")
    assert re.search(
        r"\d+ of \d+ prompt tokens cached, first token after [\d.]+ s, 12 tokens at [\d.]+ tokens/s", shown
    )


def test_a_second_question_finds_the_first_in_memory(terminal: Terminal) -> None:
    first = terminal.say("hello")
    second = terminal.say("and now?")
    cached = [int(re.search(r"(\d+) of \d+ prompt", shown)[1]) for shown in (first, second)]
    assert cached[0] == 0
    assert cached[1] > 12


def test_the_statistics_can_be_hidden(terminal: Terminal) -> None:
    assert "hidden" in terminal.say("/stats")
    assert "tokens/s" not in terminal.say("hello")
    assert "shown" in terminal.say("/stats")


def test_an_answer_is_made_again_and_a_question_changed(terminal: Terminal) -> None:
    terminal.say("hello")
    again = terminal.say("/regenerate")
    assert "12 tokens at" in again
    edited = terminal.say("/edit goodbye")
    assert "12 tokens at" in edited
    history = terminal.say("/history")
    assert "user: goodbye" in history
    assert "hello" not in history


def test_a_fork_goes_its_own_way(terminal: Terminal) -> None:
    terminal.say("hello")
    assert "a copy with 3 messages" in terminal.say("/fork")
    terminal.say("only here")
    assert "only here" in terminal.say("/history")
    assert "back in the conversation with 3 messages" in terminal.say("/back")
    assert "only here" not in terminal.say("/history")
    assert "nothing to go back to" in terminal.say("/back")


def test_a_conversation_is_saved_and_read_again(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    terminal.say("hello")
    assert "saved 3 messages" in terminal.say(f"/save {file}")
    assert [message["role"] for message in json.loads(file.read_text())] == ["system", "user", "assistant"]
    assert "1 messages are left" in terminal.say("/rewind 1")
    assert "3 messages" in terminal.say(f"/load {file}")
    assert "cannot be written" in terminal.say("/save /nowhere/at/all")
    assert "not a saved conversation" in terminal.say("/load /nowhere/at/all")


def test_commands_that_do_not_exist_and_rewinds_too_far_are_said(terminal: Terminal) -> None:
    assert "there is no command /sing" in terminal.say("/sing")
    assert "/regenerate" in terminal.say("/help")
    assert "within the 1 messages" in terminal.say("/rewind 7")
    assert "write /rewind and a number" in terminal.say("/rewind often")
    assert "have no question yet" in terminal.say("/regenerate")
    assert "there is no question yet" in terminal.say("/edit x")


def test_a_question_may_have_several_lines(terminal: Terminal) -> None:
    terminal.child.send("one\x1b\rtwo\r")  # Alt-Enter
    terminal.read()
    history = terminal.say("/history")
    assert re.search(r"user: one\s+two", history)


def test_a_line_goes_on_after_a_backslash(terminal: Terminal) -> None:
    terminal.say("one\\")
    terminal.say("two")
    assert re.search(r"user: one\s+two", terminal.say("/history"))


def test_a_new_system_prompt_begins_anew(terminal: Terminal) -> None:
    terminal.say("hello")
    assert "a new conversation" in terminal.say("/system Be brief.")
    history = terminal.say("/history")
    assert "system: Be brief." in history
    assert "hello" not in history


def test_ctrl_c_stops_an_answer_and_not_the_conversation() -> None:
    terminal = Terminal("--max-tokens", "100000", "--context", "100000")
    terminal.child.send("hello\r")
    for _ in range(20):
        terminal.update(0.1)
    terminal.child.sendintr()
    assert "stopped" in terminal.read()
    assert "hello" not in terminal.say("/history")
    assert terminal.end() == 0


def test_a_terminal_that_can_do_nothing_is_enough() -> None:
    terminal = Terminal(term="dumb")
    assert "12 tokens at" in terminal.say("hello")
    terminal.child.send("/exit\n")
    terminal.child.expect(pexpect.EOF)


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("one", ""),
        ("one\n\ntwo", "one\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("a\n\n- b\n\nc", "a\n\n- b\n\n"),
    ],
)
def test_blocks_are_complete_where_no_more_text_can_change_them(text: str, complete: str) -> None:
    assert text[: find_complete_blocks_end(text)] == complete
