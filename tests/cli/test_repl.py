"""Interactive chat in a pseudo-terminal with real keys."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pexpect
import psutil
import pytest

from afterglow.testing import models
from support.commands import AFTERGLOW, ChatTerminal, run_in_process

pytestmark = pytest.mark.native

MODEL = str(models.get_path("successor-attention"))
LONG_ANSWER = " ".join(f"slow{number}" for number in range(400))


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


def test_text_that_looks_like_a_number_is_not_a_count_of_messages(terminal: ChatTerminal) -> None:
    for text in ("--5", "²", "9" * 20):
        assert "usage: /rewind NAME or /rewind N" in terminal.send_line(f"/rewind {text}")
    assert "0 messages left" in terminal.send_line("/rewind -1")


def test_the_chat_continues_after_a_path_that_cannot_exist(terminal: ChatTerminal) -> None:
    for command in ("save", "load", "image", "audio"):
        screen = terminal.send_line_unwrapped(f"/{command} ~nouser123/x.json")
        assert "`~nouser123/x.json` is in a home directory that does not exist" in screen
        assert "File name too long" in terminal.send_line_unwrapped(f"/{command} {'x' * 300}")


def test_alt_enter_inserts_a_newline(terminal: ChatTerminal) -> None:
    terminal.child.send("one\x1b\rtwo\r")
    terminal.wait_for_prompt()
    history = terminal.send_line("/history")
    assert re.search(r"user: one\s+two", history)


def test_a_line_continues_after_a_backslash(terminal: ChatTerminal) -> None:
    terminal.send_line("one\\\rtwo")
    assert re.search(r"user: one\s+two", terminal.send_line("/history"))


def test_a_new_system_prompt_starts_a_new_conversation(terminal: ChatTerminal) -> None:
    terminal.send_line("hello")
    assert "a new conversation" in terminal.send_line("/system Be brief.")
    history = terminal.send_line("/history")
    assert "system: Be brief." in history
    assert "hello" not in history


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


def test_the_chat_can_summarize_a_conversation_over_the_context() -> None:
    terminal = ChatTerminal("--context", "1024", "--overflow", "compact")
    screens = [terminal.send_line_unwrapped(f"{number} {'x' * 150}") for number in range(6)]
    assert any(re.search(r"a new summary replaces \d+ earlier messages", screen) for screen in screens)
    assert re.search(r"(new|earlier) summary replaces \d+ earlier messages \(\d+ tokens became \d+\)", screens[-1])
    assert terminal.exit() == 0


# --- Ctrl-C and Ctrl-D


@pytest.fixture
def slow_terminal() -> Iterator[ChatTerminal]:
    """A chat whose first answer takes long."""
    terminal = ChatTerminal(answers=[LONG_ANSWER, "The second answer.", "The third answer."], seconds=0.02)
    yield terminal
    assert terminal.exit() == 0


def test_the_next_question_after_ctrl_c_is_answered(slow_terminal: ChatTerminal) -> None:
    slow_terminal.child.send("hello\r")
    slow_terminal.wait_for("slow0 slow1")
    slow_terminal.child.sendintr()
    assert "stopped" in slow_terminal.wait_for_prompt()
    assert "The second answer." in slow_terminal.send_line("and now?")


def test_ctrl_c_in_an_answer_keeps_the_question_and_the_partial_answer(slow_terminal: ChatTerminal) -> None:
    slow_terminal.child.send("hello\r")
    slow_terminal.wait_for("slow0 slow1")
    slow_terminal.child.sendintr()
    slow_terminal.wait_for_prompt()
    history = slow_terminal.send_line("/history")
    assert "1 user: hello" in history
    assert "2 assistant: slow0 slow1" in history
    assert "The second answer." in slow_terminal.send_line("/regenerate")
    assert "slow" not in slow_terminal.send_line("/history")


def test_ctrl_c_before_the_first_token_keeps_the_question(tmp_path: Path) -> None:
    terminal = ChatTerminal("--context", "100000", "--system", "word " * 15_000)
    terminal.child.send("hello\r")
    terminal.wait_for("prefill")
    terminal.child.sendintr()
    assert "stopped" in terminal.wait_for_prompt()
    assert "saved 2 messages" in terminal.send_line(f"/save {tmp_path / 'talk.json'}")
    assert json.loads((tmp_path / "talk.json").read_text())[1]["content"] == "hello"
    assert terminal.exit() == 0


def test_ctrl_c_at_the_prompt_clears_the_line(terminal: ChatTerminal) -> None:
    terminal.child.send("wrong words")
    terminal.wait_for("> wrong words")
    terminal.child.send("\x03")
    terminal.wait_for_prompt()
    terminal.child.send("/stats\r")
    terminal.wait_for("statistics are hidden")
    terminal.wait_for_prompt()
    assert "wrong" not in terminal.send_line("/history")


def test_ctrl_c_on_an_empty_line_says_how_to_exit(terminal: ChatTerminal) -> None:
    terminal.child.send("\x03")
    terminal.wait_for("Ctrl-D or /exit exits")
    terminal.wait_for_prompt()
    terminal.child.send("one\\\r")
    terminal.wait_for("...")
    terminal.child.send("\x03")
    assert "hidden" in terminal.send_line("/stats")  # the first line of the input is gone


def test_ctrl_c_at_the_prompt_of_a_dumb_terminal_does_not_exit() -> None:
    terminal = ChatTerminal(term="dumb")
    terminal.child.send("wrong words")
    terminal.child.sendintr()
    terminal.child.send("/stats\n")
    terminal.child.expect("statistics are hidden")
    terminal.child.send("/exit\n")
    terminal.child.expect(pexpect.EOF)


def test_ctrl_d_ends_only_on_an_empty_line() -> None:
    terminal = ChatTerminal()
    terminal.child.send("x\x04")
    terminal.wait_for("> x")
    assert terminal.child.isalive()
    terminal.child.send("\x03")
    terminal.wait_for_prompt()
    assert terminal.exit() == 0


# --- drawing


def test_a_code_block_longer_than_the_screen_scrolls_while_it_is_written() -> None:
    code = [f"line_{number:02} = {number}" for number in range(40)]
    answer = "Look:\n\n```python\n" + "\n".join(code) + "\n```\n\nThe end."
    terminal = ChatTerminal(answers=[answer], seconds=0.01, rows=12)
    terminal.child.send("code\r")
    terminal.wait_for("line_25")
    assert "The end." not in "\n".join(terminal.lines)  # it is still being written
    assert "line_08 = 8" in terminal.scrollback
    terminal.wait_for("The end.")
    terminal.wait_for_prompt()
    shown = [line for line in (*terminal.scrollback, *terminal.lines) if line.startswith("line_")]
    assert shown == code
    assert terminal.exit() == 0


def test_a_paragraph_longer_than_the_screen_scrolls_while_it_is_written() -> None:
    words = [f"word{number:03}" for number in range(150)]
    terminal = ChatTerminal(answers=[" ".join(words)], seconds=0.01, rows=7)
    terminal.child.send("write\r")
    terminal.wait_for("word110")
    assert "prompt tokens cached" not in "\n".join(terminal.lines)  # it is still being written
    terminal.wait_for("prompt tokens cached")
    terminal.wait_for_prompt()
    shown = re.findall(r"word\d{3}", "\n".join((*terminal.scrollback, *terminal.lines)))
    assert shown[-150:] == words
    assert terminal.exit() == 0


def test_keys_typed_during_an_answer_are_not_drawn_and_reach_the_next_prompt() -> None:
    answer = "one two three four five six seven eight nine ten"
    terminal = ChatTerminal(answers=[answer, "Second."], seconds=0.05)
    terminal.child.send("count\r")
    terminal.wait_for("one two")
    terminal.child.send("typed ahead")
    terminal.wait_for("> typed ahead")
    assert [line for line in terminal.lines if "one" in line or "typed" in line] == [answer, "> typed ahead"]
    terminal.child.send("\r")
    terminal.wait_for("Second.")
    terminal.wait_for_prompt()
    assert "user: typed ahead" in terminal.send_line("/history")
    assert terminal.exit() == 0


@pytest.mark.parametrize("during_answer", [True, False])
def test_the_terminal_is_restored_when_the_chat_is_terminated(during_answer: bool) -> None:
    arguments = shlex.join([*AFTERGLOW, "chat", MODEL, "--context", "100000"])
    print_mode = "stty -a | tr ' ' '\\n' | grep -E '^-?(echo|icanon|isig|icrnl)$'"
    shell = pexpect.spawn(
        "/bin/sh",
        ["-c", f"{arguments}; echo mode $((40+2)); {print_mode}"],
        env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        encoding="utf-8",
        timeout=120,
        dimensions=(40, 120),
    )
    shell.expect("Ctrl-D exits")
    shell.expect_exact("\x1b[?2004h")  # the line editor
    shell.expect(">")
    if during_answer:
        shell.send("hello\r")
        shell.expect("abcdefghij")
    find_child(shell.pid).send_signal(signal.SIGTERM)
    shell.expect("mode 42")
    for mode in ("icrnl", "isig", "icanon", "echo"):
        assert shell.expect([rf"\s{mode}\b", rf"-{mode}\b"]) == 0
    shell.close(force=True)


def find_child(pid: int) -> psutil.Process:
    """Return the chat that a shell runs."""
    return next(
        child for child in psutil.Process(pid).children(recursive=True) if "afterglow.cli.main" in child.cmdline()
    )


# --- history and completion


def test_the_input_history_outlives_the_chat(tmp_path: Path) -> None:
    first = ChatTerminal(AFTERGLOW_DATA=str(tmp_path))
    first.send_line("remember this")
    assert first.exit() == 0
    second = ChatTerminal(AFTERGLOW_DATA=str(tmp_path))
    second.child.send("\x1b[A")
    second.wait_for("> remember this")
    second.child.send("\x03")
    second.wait_for_prompt()
    assert second.exit() == 0
    assert stat.S_IMODE((tmp_path / "chat" / "history").stat().st_mode) == 0o600


def test_tab_completes_commands_parameters_and_files(terminal: ChatTerminal, tmp_path: Path) -> None:
    (tmp_path / "picture.png").touch()
    for typed, completed in (
        ("/reg\t", "> /regenerate"),
        ("/set temp\t", "> /set temperature"),
        (f"/image {tmp_path}/pic\t", f"> /image {tmp_path}/picture.png"),
    ):
        terminal.child.send(typed)
        terminal.wait_for(completed)
        terminal.child.send("\x03")
        terminal.wait_for_prompt()


def test_tab_completes_the_names_of_models(tmp_path: Path) -> None:
    shutil.copy(MODEL, tmp_path / "tiny-one.gguf")
    terminal = ChatTerminal(AFTERGLOW_MODELS=str(tmp_path))
    terminal.child.send("/model tiny\t")
    terminal.wait_for("> /model tiny-one.gguf")
    terminal.child.send("\x03")
    terminal.wait_for_prompt()
    assert terminal.exit() == 0


# --- commands


def test_clear_starts_a_new_conversation_with_the_same_system_prompt(terminal: ChatTerminal) -> None:
    terminal.send_line("hello")
    assert "a new conversation" in terminal.send_line("/clear")
    history = terminal.send_line("/history")
    assert "0 system: You are a helpful assistant." in history
    assert "hello" not in history


def test_set_changes_the_sampling_of_the_next_response(terminal: ChatTerminal) -> None:
    assert "abcdefghijkl" in terminal.send_line("hello")
    for name, value in (("temperature", "100"), ("top_k", "0"), ("top_p", "1"), ("min_p", "0")):
        assert f"{name} is {value} (/set)" in terminal.send_line(f"/set {name} {value}")
    assert "abcdefghijkl" not in terminal.send_line("hello")
    terminal.send_line("/set parameter temperature 0")  # as in Ollama
    assert "abcdefghijkl" in terminal.send_line("hello")
    terminal.send_line("/set max_tokens 3")
    assert "3 tokens at" in terminal.send_line("hello")
    assert "max_tokens is 12 (--max-tokens)" in terminal.send_line("/set max_tokens default")


def test_set_lists_the_parameters_with_their_sources() -> None:
    terminal = ChatTerminal(AFTERGLOW_TEMPERATURE="0.7")
    terminal.send_line("/set top_k 7")
    rows = {line.split()[0]: line.split()[1:] for line in terminal.send_line("/set").splitlines() if " " in line}
    assert rows["temperature"] == ["0.7", "AFTERGLOW_TEMPERATURE"]
    assert rows["top_k"] == ["7", "/set"]
    assert rows["max_tokens"] == ["12", "--max-tokens"]
    assert rows["mirostat"] == ["0", "default"]
    assert rows["system"] == ["You", "are", "a", "helpful", "assistant."]
    assert terminal.exit() == 0


def test_set_system_keeps_the_conversation(terminal: ChatTerminal) -> None:
    terminal.send_line("hello")
    terminal.send_line('/set system "Be brief."')
    history = terminal.send_line("/history")
    assert "0 system: Be brief." in history
    assert "1 user: hello" in history


def test_set_says_what_is_wrong(terminal: ChatTerminal) -> None:
    assert "did you mean 'temperature'?" in terminal.send_line("/set temprature 1")
    assert "`top_p`" in terminal.send_line("/set top_p 2")
    assert "must be a valid number" in terminal.send_line("/set top_p high")
    assert "start it with --context" in terminal.send_line("/set num_ctx 8192")
    assert "is called max_tokens here" in terminal.send_line("/set num_predict 5")


def test_model_continues_the_conversation_with_another_model(tmp_path: Path) -> None:
    shutil.copy(models.get_path("successor-hybrid"), tmp_path / "other.gguf")
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    terminal = ChatTerminal(AFTERGLOW_MODELS=str(tmp_path))
    terminal.send_line("hello")
    assert "other.gguf" in terminal.send_line("/model")
    assert "continuing with other.gguf" in terminal.send_line("/model other.gguf")
    assert "12 tokens at" in terminal.send_line("and now?")
    for name, reason in (("damaged.gguf", "cannot be loaded"), ("nothing", "No model called 'nothing'")):
        assert reason in terminal.send_line_unwrapped(f"/model {name}")
        assert "12 tokens at" in terminal.send_line("/regenerate")
    history = terminal.send_line("/history")
    assert "1 user: hello" in history
    assert "3 user: and now?" in history
    assert "/model other.gguf continues with it" in terminal.send_line("/load other.gguf")
    assert terminal.exit() == 0


def test_copy_sends_the_last_answer_to_the_clipboard_of_the_terminal() -> None:
    terminal = ChatTerminal(answers=["The *answer*."])
    assert "there is no response yet" in terminal.send_line("/copy")
    terminal.send_line("hello")
    assert "sent 13 characters" in terminal.send_line("/copy")
    assert f"\x1b]52;c;{base64.b64encode(b'The *answer*.').decode()}\a" in terminal.output
    assert terminal.exit() == 0


def test_a_text_in_triple_quotes_may_have_several_lines(terminal: ChatTerminal) -> None:
    terminal.send_line('"""one\rtwo"""')
    assert re.search(r"user: one\s+two", terminal.send_line("/history"))


# --- saved conversations


def test_a_conversation_is_saved_and_resumed(tmp_path: Path) -> None:
    first = ChatTerminal(AFTERGLOW_DATA=str(tmp_path))
    assert "conversations are saved in" in first.first_screen
    first.send_line("the first question")
    first.child.kill(signal.SIGKILL)  # it is saved after each answer
    first.child.close()
    (file,) = (tmp_path / "chat" / "conversations").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = ChatTerminal("--resume", model=None, AFTERGLOW_DATA=str(tmp_path))
    assert "conversations are saved in" not in second.first_screen
    assert "resumed a conversation of 3 messages: the first question" in second.first_screen
    second.send_line("the second question")
    assert "4 assistant:" in second.send_line("/history")
    second.child.sendeof()
    second.child.expect(f"--resume {file.stem}")
    second.child.expect(pexpect.EOF)


def test_a_conversation_is_resumed_by_its_id(tmp_path: Path) -> None:
    terminal = ChatTerminal(AFTERGLOW_DATA=str(tmp_path))
    terminal.send_line("the old question")
    terminal.send_line("/clear")
    terminal.send_line("the new question")
    listed = re.findall(r"(\S+)  3 messages  the (\w+) question", terminal.send_line("/resume"))
    assert [title for _, title in listed] == ["new", "old"]
    old_id = listed[1][0]
    assert "the old question" in terminal.send_line(f"/resume {old_id}")
    assert terminal.exit() == 0
    second = ChatTerminal("--resume", old_id, model=None, AFTERGLOW_DATA=str(tmp_path))
    assert "the old question" in second.first_screen
    assert second.exit() == 0


def test_resume_without_a_saved_conversation_is_an_error(tmp_path: Path) -> None:
    for arguments, reason in (
        (("--resume",), "found no saved conversation"),
        (("--resume", "20260101-000000-abcd"), "found no saved conversation 20260101-000000-abcd"),
        (("--resume", "--private"), "cannot be used with --private"),
        ((MODEL, "20260101-000000-abcd"), "can only be given with --resume"),
    ):
        result = run_in_process("chat", *arguments, stdin="x", AFTERGLOW_DATA=str(tmp_path))
        assert result.returncode == 1
        assert reason in result.stderr


def test_piped_input_can_continue_a_conversation(tmp_path: Path) -> None:
    terminal = ChatTerminal(AFTERGLOW_DATA=str(tmp_path))
    terminal.send_line("hello")
    assert terminal.exit() == 0
    result = run_in_process("chat", "--resume", "--max-tokens", "5", stdin="and now?", AFTERGLOW_DATA=str(tmp_path))
    assert result.stdout == "abcde\n"
    assert "stopped at the token limit of 5" in result.stderr


def test_a_private_chat_leaves_nothing_on_disk(tmp_path: Path) -> None:
    directories = {"AFTERGLOW_DATA": str(tmp_path / "data"), "AFTERGLOW_CACHE": str(tmp_path / "cache")}
    terminal = ChatTerminal("--private", AFTERGLOW_DISK_CACHE="on", **directories)
    terminal.send_line("hello")
    assert "not saved" in terminal.send_line("/resume")
    assert terminal.exit() == 0
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "cache" / "prefix").exists()


def test_a_conversation_that_cannot_be_saved_goes_on(tmp_path: Path) -> None:
    (tmp_path / "chat").touch()
    terminal = ChatTerminal(AFTERGLOW_DATA=str(tmp_path))
    assert "the conversation cannot be saved" in terminal.send_line("hello")
    screen = terminal.send_line("and now?")
    assert "12 tokens at" in screen
    assert "cannot be saved" not in screen
    assert terminal.exit() == 0


# --- limits and errors


def test_an_answer_that_reaches_max_tokens_says_so(terminal: ChatTerminal) -> None:
    assert "stopped at the token limit of 12; --max-tokens sets it" in terminal.send_line("hello")


def test_an_answer_that_fills_the_context_says_so_and_the_chat_goes_on() -> None:
    terminal = ChatTerminal("--context", "256", "--max-tokens", "1000", "--no-loop-guard")
    for number in range(3):
        screen = terminal.send_line_unwrapped(f"question {number}")
        assert "the context of 256 tokens is full; --context sets its length" in screen
    assert "the prompt leaves out" in screen
    assert terminal.exit() == 0


def test_the_chat_can_refuse_a_conversation_over_the_context() -> None:
    terminal = ChatTerminal("--context", "256", "--overflow", "refuse")
    screens = [terminal.send_line_unwrapped(f"{number} {'x' * 60}") for number in range(4)]
    assert re.search(r"The prompt is \d+ tokens but the context is 256. Use --context 512", screens[-1])
    assert terminal.exit() == 0


def test_a_message_longer_than_the_context_names_the_flag_that_helps() -> None:
    terminal = ChatTerminal("--context", "256")
    screen = terminal.send_line_unwrapped("x" * 300)
    assert re.search(r"The prompt is \d+ tokens but the context is 256. Use --context 512", screen)
    assert "PromptTooLong" not in screen
    assert "12 tokens at" in terminal.send_line("hello")
    assert terminal.exit() == 0


def test_piped_input_longer_than_the_context_names_the_flag_that_helps() -> None:
    result = run_in_process("chat", MODEL, "--context", "256", stdin="x" * 300)
    assert result.returncode == 1
    assert re.fullmatch(
        r"afterglow: The prompt is \d+ tokens but the context is 256. Use --context 512 or .*", result.stderr.strip()
    )
