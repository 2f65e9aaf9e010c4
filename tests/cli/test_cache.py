"""`afterglow cache` and `afterglow explain`, as a person or a script runs them, without any engine."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import afterglow
from afterglow.cli.main import main
from afterglow.testing import models
from cli import test_main as test_commands

MODEL = str(models.get_path("successor-attention"))
TURNS = [("system", "Today is Monday. You are kind."), ("user", "Tell me about the sea, please.")]


def run(*arguments: str, question: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in this process, which saves its start."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["afterglow", *arguments])
        patch.setattr(sys, "stdin", io.StringIO(question))
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which two conversations are kept."""
    root = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AFTERGLOW_CACHE", str(root))
        with afterglow.load(MODEL, context=512, disk_cache=True) as model:
            model.chat(TURNS, max_tokens=4)
            model.chat([("user", "Something else")], max_tokens=4)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    target = tmp_path / "prefix"
    for path in sorted((made / "prefix").rglob("*")):
        copy = target / path.relative_to(made / "prefix")
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_file():
            copy.write_bytes(path.read_bytes())
    return tmp_path


def values(root: Path, *arguments: str) -> dict:
    done = run("cache", *arguments, "--json", AFTERGLOW_CACHE=str(root))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_shows_what_is_kept_by_its_first_words(root: Path) -> None:
    done = test_commands.run("cache", AFTERGLOW_CACHE=str(root), COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "Tell me about the sea" in done.stdout
    assert "Something else" in done.stdout
    assert "<|" not in done.stdout  # no marks of the template
    found = values(root)
    assert [one["file"] for one in found["models"]] == [MODEL]
    assert all(one["entries"] > 30 for one in found["conversations"])
    assert [one for one in found["conversations"] if one["nbytes"] <= 0 or one["age"] < 0 or one["hits"] < 0] == []
    assert any("Monday" in one["begins"] for one in found["conversations"])


def test_tokens_are_shown_where_the_model_is_gone(root: Path) -> None:
    (folder,) = (path for path in (root / "prefix").iterdir() if path.is_dir())
    (folder / "name").write_text("/nowhere/gone.gguf")
    found = values(root)
    assert found["models"][0]["name"] == "gone"
    assert all(one["begins"].replace(" ", "").isdigit() for one in found["conversations"])


def test_a_conversation_is_pinned_and_unpinned(root: Path) -> None:
    id = values(root)["conversations"][0]["id"]
    assert run("cache", "pin", id[:8], AFTERGLOW_CACHE=str(root)).returncode == 0
    assert [one["id"] for one in values(root)["conversations"] if one["pinned"]] == [id]
    assert run("cache", "unpin", id, AFTERGLOW_CACHE=str(root)).returncode == 0
    assert not any(one["pinned"] for one in values(root)["conversations"])
    refused = run("cache", "pin", "zzz", AFTERGLOW_CACHE=str(root))
    assert (refused.returncode, "no conversation" in refused.stderr) == (1, True)


def test_it_is_verified_exported_cleared_and_imported(root: Path, tmp_path: Path) -> None:
    before = values(root)
    assert values(root, "verify") == {"checked": before["models"][0]["files"], "broken": 0}
    file = tmp_path / "kept.tar"
    assert run("cache", "export", str(file), AFTERGLOW_CACHE=str(root)).returncode == 0
    refused = run("cache", "clear", "nobody", "-y", AFTERGLOW_CACHE=str(root))
    assert (refused.returncode, "nobody" in refused.stderr) == (1, True)
    assert run("cache", "clear", MODEL, "-y", AFTERGLOW_CACHE=str(root)).returncode == 0
    assert values(root)["conversations"] == []
    assert run("cache", "import", str(file), AFTERGLOW_CACHE=str(root)).returncode == 0
    after = values(root)
    assert {one["id"] for one in after["conversations"]} == {one["id"] for one in before["conversations"]}


def test_nothing_kept_is_said(tmp_path: Path) -> None:
    done = run("cache", AFTERGLOW_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"nothing is kept in {tmp_path / 'prefix'}\n")


def test_a_directory_that_others_can_read_is_refused_in_one_line(root: Path) -> None:
    (root / "prefix").chmod(0o755)
    for command in (("cache",), ("cache", "verify"), ("explain", "-m", MODEL, "-")):
        done = run(*command, question="abc", AFTERGLOW_CACHE=str(root))
        assert done.returncode == 1
        assert "open to others" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_miss_is_explained_in_words(root: Path, tmp_path: Path) -> None:
    def said(content: object, *options: str) -> str:
        file = tmp_path / "prompt.json"
        file.write_text(json.dumps(content))
        done = run("explain", str(file), "-m", MODEL, *options, AFTERGLOW_CACHE=str(root))
        assert done.returncode == 0, done.stderr
        return done.stdout

    messages = [{"role": role, "content": text} for role, text in TURNS]
    assert "all that can be reused" in said(messages)
    changed = [{"role": "system", "content": TURNS[0][1].replace("Mon", "Tues")}, messages[1]]
    assert "a date or time changed in the system prompt" in said(changed)
    assert json.loads(said({"messages": changed}, "--json"))["likely"] == "date"
    assert "another question" in said([messages[0], {"role": "user", "content": "Tell me of the sun"}])


def test_a_text_is_explained_and_a_broken_file_refused(root: Path, tmp_path: Path) -> None:
    done = run("explain", "-", "-m", MODEL, question="never seen", AFTERGLOW_CACHE=str(root))
    assert "0 of 9 tokens" in done.stdout, done.stderr
    assert "Nothing that begins like it is kept" in done.stdout
    (tmp_path / "bad.json").write_text("{")
    done = run("explain", str(tmp_path / "bad.json"), "-m", MODEL, AFTERGLOW_CACHE=str(root))
    assert (done.returncode, "is not JSON" in done.stderr) == (1, True)
