"""`afterglow run` and `afterglow perplexity`: only the response, or one number, on standard output."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pexpect
import pytest

import afterglow
from afterglow.cli.run import is_model
from afterglow.testing import models
from support.commands import AFTERGLOW, run_command, run_in_process

pytestmark = pytest.mark.native

MODEL = str(models.get_path("successor-attention"))  # continues the alphabet


def test_raw_completes_a_text_without_the_template() -> None:
    result = run_command("run", "abc", "--raw", "--model", MODEL, "--max-tokens", "3")
    assert (result.returncode, result.stdout) == (0, "def\n")


def test_a_dash_reads_the_prompt_from_standard_input() -> None:
    result = run_command("run", "-", "--raw", "--model", MODEL, "--max-tokens", "3", stdin="mno")
    assert result.stdout == "pqr\n"


def test_statistics_go_to_standard_error() -> None:
    without = run_command("run", "abc", "--model", MODEL, "--max-tokens", "3")
    with_stats = run_command("run", "abc", "--model", MODEL, "--max-tokens", "3", "--stats")
    assert without.stderr == ""
    assert "prompt tokens cached" in with_stats.stderr
    assert with_stats.stdout == without.stdout


def test_a_response_satisfies_the_schema(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps({"enum": ["yes", "no"]}))
    result = run_in_process("run", "Is snow white?", "--model", MODEL, "--schema", str(tmp_path / "schema.json"))
    assert json.loads(result.stdout) in ("yes", "no")


@pytest.mark.parametrize(
    "flag",
    [
        ("--schema", "a.json"),
        ("--system", "x"),
        ("--reasoning", "off"),
        ("--strip-media",),
        ("--audio", "a.wav"),
        ("--stats",),
    ],
)
def test_chat_flags_are_rejected_with_raw(flag: tuple[str, ...]) -> None:
    result = run_in_process("run", "abc", "--raw", "--model", MODEL, *flag)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"`{flag[0]}` cannot be used with --raw" in result.stderr


def test_perplexity_prints_the_perplexity_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh")
    with afterglow.load(MODEL, disk_cache=False) as model:
        expected = model.perplexity("abcdefgh")
    result = run_in_process("perplexity", str(tmp_path / "text.txt"), "--model", MODEL)
    assert result.stdout == f"{expected:.4f} over 8 tokens in 1 window\n"
    missing = run_in_process("perplexity", str(tmp_path / "missing.txt"), "--model", MODEL)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "missing.txt cannot be read" in missing.stderr


# --- model and prompt


def test_piped_input_comes_before_the_prompt() -> None:
    flags = ("--model", MODEL, "--max-tokens", "3", "--json", "--raw")
    both = json.loads(run_in_process("run", "xyz", *flags, stdin="one two\n").stdout)
    joined = json.loads(run_in_process("run", "-", *flags, stdin="one two\n\nxyz").stdout)
    alone = json.loads(run_in_process("run", "xyz", *flags).stdout)
    assert both["text"] == joined["text"]
    assert both["usage"]["prompt_tokens"] == joined["usage"]["prompt_tokens"] > alone["usage"]["prompt_tokens"]


def test_piped_input_alone_is_the_prompt() -> None:
    result = run_in_process("run", "--raw", "--model", MODEL, "--max-tokens", "3", stdin="mno")
    assert (result.returncode, result.stdout) == (0, "pqr\n")


def test_the_first_of_two_words_is_a_model_as_in_ollama() -> None:
    result = run_in_process("run", MODEL, "abc", "--raw", "--max-tokens", "3")
    assert (result.returncode, result.stdout) == (0, "def\n")
    piped = run_in_process("run", MODEL, "--raw", "--max-tokens", "3", stdin="mno")
    assert piped.stdout == "pqr\n"


def test_the_words_after_the_model_are_one_prompt() -> None:
    words = run_in_process("run", MODEL, "ab", "abc", "--raw", "--max-tokens", "3")
    prompt = run_in_process("run", MODEL, "ab abc", "--raw", "--max-tokens", "3")
    assert (words.returncode, words.stdout) == (0, prompt.stdout)


def test_an_unknown_model_before_a_prompt_is_an_error_that_mentions_quotes() -> None:
    result = run_in_process("run", "why", "is the sky blue?")
    assert (result.returncode, result.stdout) == (1, "")
    assert "no model called 'why'" in result.stderr
    assert "Put a prompt of several words into quotes" in result.stderr


def test_a_file_name_that_is_no_model_is_a_prompt(tmp_path: Path) -> None:
    assert not is_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("notes")
    assert not is_model(str(tmp_path / "notes.txt"))
    assert not is_model("Why is the sky blue?")
    assert is_model(MODEL)
    assert is_model("smollm2")


def test_a_missing_prompt_is_an_error_that_says_what_to_do() -> None:
    for arguments in ((), (MODEL,)):
        result = run_in_process("run", *arguments)
        assert (result.returncode, result.stdout) == (1, "")
        assert "`PROMPT` is missing" in result.stderr
        assert "afterglow chat" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", MODEL, "Summarise"),
        ("chat", MODEL),
        ("perplexity", "-", "--model", MODEL),
        ("explain", "-", "--model", MODEL),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])  # the latter is that of the locale C
def test_piped_input_must_be_utf8(arguments: tuple[str, ...], encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [*AFTERGLOW, *arguments]
    result = subprocess.run(command, input=b"caf\xe9", capture_output=True, env=environment, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.startswith(b"afterglow: `standard input` must be UTF-8 text")


def test_a_prompt_must_be_utf8() -> None:
    result = subprocess.run([*AFTERGLOW, "run", b"caf\xe9"], capture_output=True, timeout=120, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(b"afterglow: `PROMPT` must be UTF-8 text")


def test_a_chat_without_standard_input_has_no_question() -> None:
    result = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *AFTERGLOW, "chat"], timeout=120, check=False)
    assert result.returncode == 0


def test_a_model_without_a_prompt_starts_a_chat_in_a_terminal() -> None:
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    child = pexpect.spawn(
        AFTERGLOW[0], [*AFTERGLOW[1:], "run", MODEL, "--max-tokens", "8"], env=environment, timeout=120
    )
    child.expect("> ")
    child.sendline("hello")
    child.expect("abcdefgh")
    child.expect("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


# --- output


def test_json_is_one_object_with_text_finish_reason_and_usage() -> None:
    result = run_in_process("run", "abc", "--model", MODEL, "--max-tokens", "3", "--json")
    plain = run_in_process("run", "abc", "--model", MODEL, "--max-tokens", "3")
    answer = json.loads(result.stdout)
    assert (answer["text"], answer["finish_reason"]) == (plain.stdout.rstrip("\n"), "length")
    assert (answer["model"], answer["usage"]["generated_tokens"]) == (MODEL, 3)
    raw = json.loads(run_in_process("run", "abc", "--raw", "--model", MODEL, "--max-tokens", "3", "--json").stdout)
    assert (raw["text"], raw["finish_reason"], raw["usage"]["prompt_tokens"]) == ("def", "length", 3)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_response_that_ends_before_its_schema_is_an_error(flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps({"enum": ["a long text that needs many tokens"]}))
    schema = ("--schema", str(tmp_path / "schema.json"))
    result = run_in_process("run", "Say it.", "--model", MODEL, "--max-tokens", "5", *schema, *flags)
    assert result.returncode == 1
    assert "does not satisfy the schema: it stopped at the token limit, after 5 tokens" in result.stderr
    assert "--max-tokens" in result.stderr
    assert result.stdout.startswith('{"model"' if flags else '"a lo')
    assert run_in_process("run", "Say it.", "--model", MODEL, *schema, *flags).returncode == 0


# --- memory


@pytest.mark.parametrize("arguments", [("run", "abc", "--raw", "--max-tokens", "1"), ("perplexity", "-")])
def test_one_request_has_one_sequence_of_the_kv_cache(arguments: tuple[str, ...]) -> None:
    result = run_command("--verbose", *arguments, "--model", MODEL, "--context", "512", stdin="abcdef")
    assert result.returncode == 0, result.stderr
    assert re.findall(r"n_seq_max\s+= (\d+)", result.stderr)[-1] == "1"
    assert re.findall(r"llama_context: n_ctx\s+= (\d+)", result.stderr)[-1] == "512"


def test_a_second_run_finds_the_prefix_of_the_first_on_disk(tmp_path: Path) -> None:
    environment = {"AFTERGLOW_CACHE": str(tmp_path), "AFTERGLOW_DISK_CACHE": "on"}
    arguments = ("run", "abcdefghijklmnopqrstuvwxyz " * 24, "--model", MODEL, "--max-tokens", "1", "--json")
    first, second = (json.loads(run_command(*arguments, **environment).stdout)["usage"] for _ in range(2))
    assert (first["cached_tokens"], second["cached_tokens"] > 512) == (0, True)


def test_a_private_run_writes_nothing_of_the_prompt_to_disk(tmp_path: Path) -> None:
    environment = {"AFTERGLOW_CACHE": str(tmp_path), "AFTERGLOW_DISK_CACHE": "on"}
    arguments = ("run", "abcdefghijklmnopqrstuvwxyz " * 12, "--model", MODEL, "--max-tokens", "1")
    run_in_process(*arguments, "--private", **environment)
    assert not (tmp_path / "prefix").exists()
    run_in_process(*arguments, **environment)
    assert (tmp_path / "prefix").exists()


def test_a_command_uses_adapters() -> None:
    model, adapter = str(models.get_path("attention")), f"style={models.get_path('adapter')}"
    command = ["run", "abc", "--raw", "--model", model, "--max-tokens", "8", "--adapter", adapter]
    base, styled, scaled = (
        run_in_process(*command, *lora).stdout for lora in ((), ("--lora", "style"), ("--lora", "style@0.3"))
    )
    assert len({base, styled, scaled}) == 3
    assert run_in_process(*command, "--lora", "styel").stderr.count("did you mean 'style'?") == 1
