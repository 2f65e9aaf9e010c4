"""`afterglow run` and `afterglow perplexity`: one answer, or one number, on standard output, and nothing else there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import afterglow
from afterglow.testing import models
from cli.test_main import run

MODEL = str(models.get_path("successor-attention"))  # it goes on in the alphabet


def test_a_text_is_continued_as_it_is() -> None:
    done = run("run", "abc", "--raw", "--model", MODEL, "--max-tokens", "3")
    assert (done.returncode, done.stdout) == (0, "def\n")


def test_a_prompt_comes_from_standard_input() -> None:
    done = run("run", "-", "--raw", "--model", MODEL, "--max-tokens", "3", question="mno")
    assert done.stdout == "pqr\n"


def test_what_an_answer_took_is_said_beside_it() -> None:
    quiet = run("run", "abc", "--model", MODEL, "--max-tokens", "3")
    told = run("run", "abc", "--model", MODEL, "--max-tokens", "3", "--stats")
    assert quiet.stderr == ""
    assert "prompt tokens cached" in told.stderr
    assert told.stdout == quiet.stdout


def test_an_answer_satisfies_its_schema(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps({"enum": ["yes", "no"]}))
    done = run("run", "Is snow white?", "--model", MODEL, "--schema", str(tmp_path / "schema.json"))
    assert json.loads(done.stdout) in ("yes", "no")


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
def test_what_is_about_conversations_is_refused_for_a_text(flag: tuple[str, ...]) -> None:
    done = run("run", "abc", "--raw", "--model", MODEL, *flag)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"`{flag[0]}` is about conversations: leave it or --raw out" in done.stderr


def test_perplexity_is_the_model_s(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh")
    with afterglow.load(MODEL, disk_cache=False) as model:
        expected = model.perplexity("abcdefgh")
    done = run("perplexity", str(tmp_path / "text.txt"), "--model", MODEL)
    assert done.stdout == f"{expected:.4f} over 8 tokens in 1 window\n"
    missing = run("perplexity", str(tmp_path / "missing.txt"), "--model", MODEL)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "missing.txt cannot be read" in missing.stderr
