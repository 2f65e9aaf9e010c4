"""Loop guard: a response that repeats itself is stopped in the terminal, and only there."""

from __future__ import annotations

import random

import pytest

from afterglow.cli.loop_guard import LoopGuard, ResponseLoops, find_loop
from afterglow.testing import models
from support.commands import ChatTerminal, run_in_process

MODEL = str(models.get_path("successor-attention"))  # repeats the 28 characters of its cycle without end


@pytest.mark.parametrize("period", [1, 2, 7, 48, 49, 100, 256])
def test_a_text_that_repeats_is_a_loop_after_any_beginning(period: int) -> None:
    numbers = random.Random(period)
    block = [numbers.randrange(50_000) for _ in range(period)]
    beginning = [numbers.randrange(50_000) for _ in range(300)]
    length = max(192, 4 * period)
    looping = [*beginning, *(block * 300)[:length]]
    assert find_loop(looping) == period
    assert find_loop([*looping[:300], *looping[301:]]) == 0  # one token less
    assert find_loop([*looping, -1]) == 0


def test_a_text_with_small_changes_is_not_a_loop() -> None:
    assert find_loop([token for number in range(200) for token in (1, 2, 3, 1000 + number)]) == 0
    assert find_loop([]) == 0


def test_the_guard_names_the_length_of_the_loop_and_can_be_off() -> None:
    guard = LoopGuard(enabled=True)
    for _ in range(95):
        guard.add("ha ")
        guard.add("ho ")
    guard.add("ha ")
    with pytest.raises(ResponseLoops, match=r"repeats the same 2 tokens; .* --no-loop-guard"):
        guard.add("ho ")
    guard = LoopGuard(enabled=False)
    for _ in range(1000):
        guard.add("ha ")


@pytest.mark.native
@pytest.mark.parametrize("arguments", [("run", "abc", "--model", MODEL), ("run", "abc", "--raw", "--model", MODEL)])
def test_run_stops_a_loop_with_a_message_and_status_1(arguments: tuple[str, ...]) -> None:
    result = run_in_process(*arguments, "--context", "1024")
    assert result.returncode == 1
    assert 192 <= len(result.stdout) < 300
    assert "stopped: the response repeats the same 28 tokens" in result.stderr
    result = run_in_process(*arguments, "--context", "1024", "--no-loop-guard")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout) > 600


@pytest.mark.native
def test_a_piped_chat_stops_a_loop() -> None:
    result = run_in_process("chat", MODEL, "--context", "1024", stdin="abc")
    assert (result.returncode, len(result.stdout) < 300) == (1, True)
    assert "repeats the same 28 tokens" in result.stderr


@pytest.mark.native
def test_the_chat_goes_on_after_a_loop() -> None:
    terminal = ChatTerminal("--max-tokens", "900", "--context", "1024")
    assert "stopped: the response repeats the same 28 tokens" in terminal.send_line_unwrapped("abc")
    assert "messages" in terminal.send_line("/rewind 0")
    assert terminal.exit() == 0
