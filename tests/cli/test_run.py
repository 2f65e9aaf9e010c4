"""`afterglow run` and `afterglow perplexity`: only the response, or one number, on standard output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import afterglow
from afterglow.testing import models
from support.commands import run_command

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
    result = run_command("run", "Is snow white?", "--model", MODEL, "--schema", str(tmp_path / "schema.json"))
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
    result = run_command("run", "abc", "--raw", "--model", MODEL, *flag)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"`{flag[0]}` cannot be used with --raw" in result.stderr


def test_perplexity_prints_the_perplexity_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh")
    with afterglow.load(MODEL, disk_cache=False) as model:
        expected = model.perplexity("abcdefgh")
    result = run_command("perplexity", str(tmp_path / "text.txt"), "--model", MODEL)
    assert result.stdout == f"{expected:.4f} over 8 tokens in 1 window\n"
    missing = run_command("perplexity", str(tmp_path / "missing.txt"), "--model", MODEL)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "missing.txt cannot be read" in missing.stderr
