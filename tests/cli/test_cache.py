"""`afterglow cache` and `afterglow explain`, which run without an engine."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import afterglow
from afterglow.engine.inspect import disk
from afterglow.testing import models
from support.commands import run_in_process
from support.server_process import run_server, wait_until

pytestmark = pytest.mark.native

MODEL = str(models.get_path("successor-attention"))
MESSAGES = [("system", "Today is Monday. You are kind."), ("user", "Tell me about the sea, please.")]


@pytest.fixture(scope="module")
def filled_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache root with two conversations. Tests must not change it."""
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AFTERGLOW_CACHE", str(root))
        with afterglow.load(MODEL, context=512, disk_cache=True) as model:
            model.chat(MESSAGES, max_tokens=4)
            model.chat([("user", "Something else")], max_tokens=4)
    return root


@pytest.fixture
def root(filled_root: Path, tmp_path: Path) -> Path:
    """A copy of the cache root."""
    target = tmp_path / "prefix"
    for path in sorted((filled_root / "prefix").rglob("*")):
        copy = target / path.relative_to(filled_root / "prefix")
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_file():
            copy.write_bytes(path.read_bytes())
    return tmp_path


def read_json(root: Path, *arguments: str) -> dict:
    result = run_in_process("cache", *arguments, "--json", AFTERGLOW_CACHE=str(root))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_cache_lists_conversations_by_their_first_user_message(root: Path) -> None:
    result = run_in_process("cache", AFTERGLOW_CACHE=str(root), COLUMNS="200")
    assert result.returncode == 0, result.stderr
    assert "Tell me about the sea" in result.stdout
    assert "Something else" in result.stdout
    assert "<|" not in result.stdout  # no control tokens of the template
    contents = read_json(root)
    conversations = contents["conversations"]
    assert [model["file"] for model in contents["models"]] == [MODEL]
    assert all(item["entries"] > 30 for item in conversations)
    assert [item for item in conversations if item["nbytes"] <= 0 or item["idle_seconds"] < 0 or item["hits"] < 0] == []
    assert any("Monday" in item["preview"] for item in conversations)


def test_previews_are_token_ids_if_the_model_file_is_missing(root: Path) -> None:
    (directory,) = (path for path in (root / "prefix").iterdir() if path.is_dir())
    (directory / "name").write_text("/nowhere/gone.gguf")
    contents = read_json(root)
    assert contents["models"][0]["name"] == "gone"
    assert all(item["preview"].replace(" ", "").isdigit() for item in contents["conversations"])


def test_a_conversation_is_pinned_and_unpinned(root: Path) -> None:
    id = read_json(root)["conversations"][0]["id"]
    assert run_in_process("cache", "pin", id[:8], AFTERGLOW_CACHE=str(root)).returncode == 0
    assert [item["id"] for item in read_json(root)["conversations"] if item["pinned"]] == [id]
    assert run_in_process("cache", "unpin", id, AFTERGLOW_CACHE=str(root)).returncode == 0
    assert not any(item["pinned"] for item in read_json(root)["conversations"])
    unknown = run_in_process("cache", "pin", "zzz", AFTERGLOW_CACHE=str(root))
    assert (unknown.returncode, "no conversation" in unknown.stderr) == (1, True)


def test_the_cache_is_verified_exported_cleared_and_imported(root: Path, tmp_path: Path) -> None:
    before = read_json(root)
    assert read_json(root, "verify") == {"checked": before["models"][0]["files"], "broken": 0}
    archive = tmp_path / "cache.tar"
    assert run_in_process("cache", "export", str(archive), AFTERGLOW_CACHE=str(root)).returncode == 0
    unknown = run_in_process("cache", "clear", "unknown", "-y", AFTERGLOW_CACHE=str(root))
    assert (unknown.returncode, "unknown" in unknown.stderr) == (1, True)
    assert run_in_process("cache", "clear", MODEL, "-y", AFTERGLOW_CACHE=str(root)).returncode == 0
    assert read_json(root)["conversations"] == []
    assert run_in_process("cache", "import", str(archive), AFTERGLOW_CACHE=str(root)).returncode == 0
    after = read_json(root)
    assert {item["id"] for item in after["conversations"]} == {item["id"] for item in before["conversations"]}


def test_a_conversation_that_continues_after_a_clear_beside_a_server_survives_its_kill(tmp_path: Path) -> None:
    """`afterglow cache clear`, one more turn, kill -9, and the next start is warm."""
    environment = {"AFTERGLOW_CACHE": str(tmp_path), "AFTERGLOW_DISK_CACHE": "on"}
    arguments = (f"tiny={MODEL}", "--context", "1024", "--sequences", "2")

    def is_on_disk(tokens: int) -> bool:
        directory = tmp_path / "prefix"
        return any(stored.entries >= tokens for stored in disk.list_conversations(directory))

    text = models.CYCLE.decode() * 8
    with run_server(*arguments, **environment) as server:
        text += server.complete(text)["choices"][0]["text"]
        beginning = len(text) - 1
        assert wait_until(120, lambda: is_on_disk(beginning))
        assert run_in_process("cache", "clear", "-y", AFTERGLOW_CACHE=str(tmp_path)).returncode == 0
        assert not list(tmp_path.rglob("*.cells"))
        text += "and more"
        text += server.complete(text)["choices"][0]["text"]
        assert wait_until(120, lambda: is_on_disk(beginning)), "written from its beginning"
        server.stop(signal.SIGKILL)
    with run_server(*arguments, **environment) as server:
        usage = server.complete(text + "x")["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= beginning


def test_an_empty_cache_is_reported(tmp_path: Path) -> None:
    result = run_in_process("cache", AFTERGLOW_CACHE=str(tmp_path))
    assert (result.returncode, result.stdout) == (0, f"the cache in {tmp_path / 'prefix'} is empty\n")


def test_a_directory_readable_by_others_is_rejected_in_one_line(root: Path) -> None:
    (root / "prefix").chmod(0o755)
    for command in (("cache",), ("cache", "verify"), ("explain", "-m", MODEL, "-")):
        result = run_in_process(*command, stdin="abc", AFTERGLOW_CACHE=str(root))
        assert result.returncode == 1
        assert "accessible to other users" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_explain_names_the_reason_of_a_miss(root: Path, tmp_path: Path) -> None:
    def explain(prompt: object, *options: str) -> str:
        file = tmp_path / "prompt.json"
        file.write_text(json.dumps(prompt))
        result = run_in_process("explain", str(file), "-m", MODEL, *options, AFTERGLOW_CACHE=str(root))
        assert result.returncode == 0, result.stderr
        return result.stdout

    messages = [{"role": role, "content": text} for role, text in MESSAGES]
    assert "all that can be reused" in explain(messages)
    changed = [{"role": "system", "content": MESSAGES[0][1].replace("Mon", "Tues")}, messages[1]]
    assert "a date or time changed in the system prompt" in explain(changed)
    report = json.loads(explain({"messages": changed}, "--json"))
    assert report["reason"] == "date"
    assert "user message is different" in explain([messages[0], {"role": "user", "content": "Tell me of the sun"}])


def test_explain_accepts_plain_text_and_rejects_invalid_json(root: Path, tmp_path: Path) -> None:
    result = run_in_process("explain", "-", "-m", MODEL, stdin="never seen", AFTERGLOW_CACHE=str(root))
    assert "0 of 9 tokens" in result.stdout, result.stderr
    assert "No cached prefix begins like this prompt" in result.stdout
    (tmp_path / "bad.json").write_text("{")
    result = run_in_process("explain", str(tmp_path / "bad.json"), "-m", MODEL, AFTERGLOW_CACHE=str(root))
    assert (result.returncode, "is not JSON" in result.stderr) == (1, True)
