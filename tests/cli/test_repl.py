"""Interactive chat in a pseudo-terminal with real keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from support.commands import ChatTerminal

pytestmark = pytest.mark.native


@pytest.fixture
def terminal() -> Iterator[ChatTerminal]:
    terminal = ChatTerminal()
    yield terminal
    assert terminal.exit() == 0


def test_a_response_is_followed_by_statistics(terminal: ChatTerminal) -> None:
    screen = terminal.send_line_unwrapped("hello")
    assert re.search(
        r"\d+ of \d+ prompt tokens cached, first token after [\d.]+ s, 12 tokens at [\d.]+ tokens/s", screen
    )


def test_the_second_message_has_a_prefix_hit(terminal: ChatTerminal) -> None:
    first = terminal.send_line("hello")
    second = terminal.send_line("and now?")
    cached = [int(re.search(r"(\d+) of \d+ prompt", screen)[1]) for screen in (first, second)]
    assert cached[0] == 0
    assert cached[1] > 12


def test_statistics_can_be_hidden(terminal: ChatTerminal) -> None:
    assert "hidden" in terminal.send_line("/stats")
    assert "tokens/s" not in terminal.send_line("hello")
    assert "shown" in terminal.send_line("/stats")


def test_regenerate_and_edit_generate_a_new_response(terminal: ChatTerminal) -> None:
    terminal.send_line("hello")
    assert "12 tokens at" in terminal.send_line("/regenerate")
    assert "12 tokens at" in terminal.send_line("/edit goodbye")
    history = terminal.send_line("/history")
    assert "user: goodbye" in history
    assert "hello" not in history


def test_a_fork_does_not_change_the_original(terminal: ChatTerminal) -> None:
    terminal.send_line("hello")
    assert "forked a conversation of 3 messages" in terminal.send_line("/fork")
    terminal.send_line("only here")
    assert "only here" in terminal.send_line("/history")
    assert "returned to the conversation of 3 messages" in terminal.send_line("/back")
    assert "only here" not in terminal.send_line("/history")
    assert "no fork to return from" in terminal.send_line("/back")


def test_a_conversation_is_saved_and_loaded(terminal: ChatTerminal, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    terminal.send_line("hello")
    assert "saved 3 messages" in terminal.send_line(f"/save {file}")
    assert [message["role"] for message in json.loads(file.read_text())] == ["system", "user", "assistant"]
    assert "1 messages left" in terminal.send_line("/rewind 1")
    assert "loaded 3 messages" in terminal.send_line(f"/load {file}")
    assert "cannot be written" in terminal.send_line("/save /nowhere/at/all")
    assert "not a saved conversation" in terminal.send_line("/load /nowhere/at/all")


def test_unknown_commands_and_invalid_arguments_are_reported(terminal: ChatTerminal) -> None:
    assert "unknown command /sing" in terminal.send_line("/sing")
    assert "/regenerate" in terminal.send_line("/help")
    assert "within the 1 messages" in terminal.send_line("/rewind 7")
    assert "usage: /rewind N" in terminal.send_line("/rewind often")
    assert "have no question yet" in terminal.send_line("/regenerate")
    assert "there is no user message yet" in terminal.send_line("/edit x")


def test_alt_enter_inserts_a_newline(terminal: ChatTerminal) -> None:
    terminal.child.send("one\x1b\rtwo\r")
    terminal.wait_for_prompt()
    history = terminal.send_line("/history")
    assert re.search(r"user: one\s+two", history)


def test_a_line_continues_after_a_backslash(terminal: ChatTerminal) -> None:
    terminal.send_line("one\\")
    terminal.send_line("two")
    assert re.search(r"user: one\s+two", terminal.send_line("/history"))


def test_a_new_system_prompt_starts_a_new_conversation(terminal: ChatTerminal) -> None:
    terminal.send_line("hello")
    assert "a new conversation" in terminal.send_line("/system Be brief.")
    history = terminal.send_line("/history")
    assert "system: Be brief." in history
    assert "hello" not in history


def test_ctrl_c_stops_a_response_but_not_the_conversation() -> None:
    terminal = ChatTerminal("--max-tokens", "100000", "--context", "100000")
    terminal.child.send("hello\r")
    for _ in range(20):
        terminal.update(0.1)
    terminal.child.sendintr()
    assert "stopped" in terminal.wait_for_prompt()
    assert "hello" not in terminal.send_line("/history")
    assert terminal.exit() == 0


def test_a_dumb_terminal_is_supported() -> None:
    terminal = ChatTerminal(term="dumb")
    assert "12 tokens at" in terminal.send_line("hello")
    terminal.child.send("/exit\n")
    terminal.child.expect(pexpect.EOF)


def test_the_chat_continues_after_the_context_is_full() -> None:
    terminal = ChatTerminal("--context", "256")
    screens = [terminal.send_line_unwrapped(f"{number} {'x' * 60}") for number in range(4)]
    assert "the context is full" not in screens[0]
    assert "the context is full: the prompt leaves out" in screens[-1]
    assert "12 tokens at" in screens[-1]
    assert terminal.exit() == 0


def test_the_chat_can_refuse_a_conversation_over_the_context() -> None:
    terminal = ChatTerminal("--context", "256", "--overflow", "refuse")
    screens = [terminal.send_line_unwrapped(f"{number} {'x' * 60}") for number in range(4)]
    assert "PromptTooLong" in screens[-1]
    assert terminal.exit() == 0
