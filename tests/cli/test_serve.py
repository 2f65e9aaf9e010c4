"""`afterglow serve` and `afterglow ps` as processes: keys, warnings, what is stored on disk, and the list of models."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from afterglow.cli import serve
from afterglow.cli.commands import app, load_command
from afterglow.cluster import run
from afterglow.testing import models
from support.commands import run_in_process
from support.server_process import run_server, wait_until

pytestmark = pytest.mark.native

TINY = f"tiny={models.get_path('successor-attention')}"
WARNING = "anyone who can reach 0.0.0.0 can use this server"


# --- keys


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("--api-key", ""), {}),
        (("--api-key", " "), {}),
        ((), {"AFTERGLOW_SERVER_API_KEYS": ""}),
        ((), {"AFTERGLOW_SERVER_API_KEYS": '["key", ""]'}),
    ],
)
def test_an_empty_api_key_is_refused(arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    result = run_in_process("serve", TINY, "--port", "0", *arguments, **environment)
    assert result.returncode == 1
    assert "an API key must not be empty" in result.stderr


def test_a_json_list_of_keys_in_the_variable_works() -> None:
    keys = ["one", "two, with a comma"]
    with run_server(TINY, AFTERGLOW_SERVER_API_KEYS=json.dumps(keys)) as server:
        assert server.http.get("/v1/models").status_code == 401
        for key in keys:
            headers = {"Authorization": f"Bearer {key}"}
            assert server.http.get("/v1/models", headers=headers).status_code == 200
        assert server.http.get("/v1/models", headers={"x-api-key": json.dumps(keys)}).status_code == 401


def test_a_broken_json_list_of_keys_is_refused_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("another\n")
    for arguments in ((), ("--api-key-file", str(tmp_path / "keys"))):
        result = run_in_process("serve", TINY, "--port", "0", *arguments, AFTERGLOW_SERVER_API_KEYS='["secret')
        assert result.returncode == 1
        assert "AFTERGLOW_SERVER_API_KEYS` must be a JSON list" in result.stderr
        assert "secret" not in result.stderr


def test_an_open_server_without_a_key_warns() -> None:
    with run_server(TINY, "--host", "0.0.0.0") as server:
        server.wait_for_log(WARNING)
    with run_server(TINY, "--host", "0.0.0.0", "--api-key", "secret") as server:
        assert WARNING not in server.stderr_text
    with run_server(TINY) as server:
        assert "anyone who can reach" not in server.stderr_text


# --- disk


def test_the_first_run_says_that_conversations_are_stored_on_disk(tmp_path: Path) -> None:
    environment = {"AFTERGLOW_CACHE": str(tmp_path), "AFTERGLOW_DISK_CACHE": "on"}
    notice = f"The prefix cache keeps conversations on disk, in {tmp_path / 'prefix'}"
    with run_server(TINY, "--private", **environment) as server:
        assert notice not in server.stderr_text
    with run_server(TINY, **environment) as server:
        assert notice in server.stderr_text
        assert "--private turns that off" in server.stderr_text
    with run_server(TINY, **environment) as server:
        assert notice not in server.stderr_text


@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_a_private_server_writes_nothing_of_a_request_to_disk(source: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    data = tmp_path / "data"
    environment = {"AFTERGLOW_CACHE": str(cache), "AFTERGLOW_DATA": str(data), "AFTERGLOW_DISK_CACHE": "on"}
    if source == "variable":
        environment["AFTERGLOW_PRIVATE"] = "true"
    if source == "file":
        (tmp_path / "settings.toml").write_text("private = true\ndisk_cache = true\n")
        environment["AFTERGLOW_SETTINGS"] = str(tmp_path / "settings.toml")
    text = "abcdefghijklmnopqrstuvwxyz " * 24
    with run_server(TINY, *(["--private"] if source == "flag" else []), **environment) as server:
        before = list_files(cache)
        assert server.chat(text)["status"] == 200
        assert server.post("/cache/pin", {"model": "tiny", "prompt": text}).status_code == 200
        assert server.respond(text)["http_status"] == 200
        assert server.post("/conversations", {"title": text[:50]}).status_code == 200
        assert server.stop() == 0
    assert list_files(cache) == before
    assert list_files(data) == []
    assert not (cache / "prefix").exists()


def test_a_server_that_is_not_private_stores_the_prefix(tmp_path: Path) -> None:
    environment = {"AFTERGLOW_CACHE": str(tmp_path), "AFTERGLOW_DISK_CACHE": "on"}
    with run_server(TINY, **environment) as server:
        server.chat("abcdefghijklmnopqrstuvwxyz " * 24)
        assert server.stop() == 0
    assert list_files(tmp_path / "prefix")


def list_files(directory: Path) -> list[str]:
    return sorted(os.path.join(parent, name) for parent, _, names in os.walk(directory) for name in names)


# --- the web page


def test_open_opens_the_page_whose_conversations_outlive_the_server(tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path / "opened"}\n')
    browser.chmod(0o700)
    environment = {"AFTERGLOW_DATA": str(tmp_path / "data"), "BROWSER": f"{browser} %s"}
    with run_server(TINY, "--lazy-load", "--open", **environment) as server:
        assert f"in a browser: {server.url}/" in server.stderr_text
        assert wait_until(60, lambda: (tmp_path / "opened").exists() and (tmp_path / "opened").read_text())
        assert (tmp_path / "opened").read_text() == f"{server.url}/\n"
        server.post("/conversations", {"title": "kept"})
    with run_server(TINY, "--lazy-load", "--no-web", **environment) as server:
        assert server.http.get("/").status_code == 404
        assert "in a browser" not in server.stderr_text
    with run_server(TINY, "--lazy-load", **environment) as server:
        assert [found["title"] for found in server.http.get("/conversations").json()["conversations"]] == ["kept"]


def test_a_page_that_is_off_cannot_be_opened() -> None:
    result = run_in_process("serve", TINY, "--open", "--no-web")
    assert (result.returncode, "--open" in result.stderr, "`web`" in result.stderr) == (1, True, True)


# --- Ray


@pytest.mark.parametrize(
    ("arguments", "address", "models"),
    [
        (["tiny"], None, ["tiny"]),
        (["tiny", "--ray"], "", ["tiny"]),
        (["--ray", "tiny"], "", ["tiny"]),
        (["--ray", "--replicas", "3", "tiny"], "", ["tiny"]),
        (["--ray", "name=models/tiny.gguf"], "", ["name=models/tiny.gguf"]),
        (["tiny", "--ray", "auto"], "auto", ["tiny"]),
        (["--ray", "local", "tiny"], "local", ["tiny"]),
        (["--ray", "first.example:6379", "tiny"], "first.example:6379", ["tiny"]),
        (["tiny", "--ray=elsewhere"], "elsewhere", ["tiny"]),
    ],
)
def test_the_address_of_a_ray_cluster_is_optional(arguments: list[str], address: str | None, models: list[str]) -> None:
    parameters = load_command("serve").make_context("serve", list(arguments)).params
    assert (parameters["ray"], parameters["models"]) == (address, models)


SETTINGS_FOR_RAY = f"""
threads = 3
temperature = 0.3
disk_cache = true
private = true
[models.tiny]
model = "{models.get_path("successor-attention")}"
context = 700
disk_cache = true
draft = "mtp"
adapters = {{style = "/nowhere/style.gguf"}}
[server]
aliases = ["gpt-*=tiny"]
"""


def start_on_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, *flags: str) -> tuple[Any, dict[str, Any]]:
    """Run `serve --ray` with a settings file; return its result, and the arguments of `serve_on_ray`."""
    calls: list[dict[str, Any]] = []
    signature = inspect.signature(run.serve_on_ray)
    monkeypatch.setattr(serve, "serve_on_ray", lambda *all: calls.append(signature.bind(*all).arguments))
    (tmp_path / "settings.toml").write_text(text)
    monkeypatch.setenv("AFTERGLOW_SETTINGS", str(tmp_path / "settings.toml"))
    result = CliRunner().invoke(app, ["serve", "--ray", "local", *flags])
    return result, calls[0] if calls else {}


def test_replicas_on_ray_have_the_settings_of_the_command_and_of_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = ["--replicas", "1", "--top-p", "0.8"]
    result, call = start_on_ray(monkeypatch, tmp_path, SETTINGS_FOR_RAY, *flags)
    assert (result.exception, call["name"]) == (None, "tiny")
    given = {name: call["options"][name] for name in ("threads", "context", "replicas", "draft", "disk_cache")}
    assert given == {"threads": 3, "context": 700, "replicas": 1, "draft": "mtp", "disk_cache": False}
    assert list(call["options"]["adapters"]) == ["style"]
    assert call["sampling_defaults"] == {"temperature": 0.3, "top_p": 0.8}
    assert (call["settings"].aliases, call["settings"].store_conversations) == (("gpt-*=tiny",), False)
    assert "replicas" not in start_on_ray(monkeypatch, tmp_path, SETTINGS_FOR_RAY)[1]["options"]  # that of `deployment`


@pytest.mark.parametrize(
    "flags",
    [
        ["--open"],
        ["--ollama"],
        ["--lazy-load"],
        ["--allow-reload"],
        ["--keep-alive", "5m"],
        ["--memory-bytes", "1GiB"],
        ["--gpu-memory-bytes", "1GiB"],
    ],
)
def test_a_setting_that_cannot_apply_on_ray_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]
) -> None:
    result, call = start_on_ray(monkeypatch, tmp_path, SETTINGS_FOR_RAY, *flags)
    assert str(result.exception).startswith(f"`{flags[0]}` cannot be used with --ray")
    assert not call


def test_the_lifetime_of_one_model_on_ray_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = SETTINGS_FOR_RAY.replace("context = 700", "keep_alive = '5m'")
    result, call = start_on_ray(monkeypatch, tmp_path, text)
    assert (str(result.exception).startswith("`models.tiny.keep_alive` cannot be used with --ray"), call) == (True, {})


# --- ps


def test_ps_lists_the_models_of_the_running_server() -> None:
    hybrid = f"hybrid={models.get_path('successor-hybrid')}"
    with run_server(TINY, hybrid, "--context", "512", "--api-key", "secret", "--lazy-load") as server:
        port = server.url.rpartition(":")[2]
        server.post("/v1/completions", {"model": "tiny", "prompt": "abc"}, headers={"x-api-key": "secret"})
        refused = run_in_process("ps", "--port", port)
        assert (refused.returncode, "--api-key" in refused.stderr) == (1, True)
        result = run_in_process("ps", "--port", port, AFTERGLOW_SERVER_API_KEYS="secret")
        assert result.stdout == "tiny\tready\t512\t0\t0\t0\nhybrid\tnot loaded\t-\t0\t0\t0\n", result.stderr
        rows = json.loads(run_in_process("ps", "--port", port, "--api-key", "secret", "--json").stdout)
        assert [row["name"] for row in rows] == ["tiny", "hybrid"]
    stopped = run_in_process("ps", "--port", port)
    assert stopped.returncode == 1
    assert "start one with `afterglow serve`" in stopped.stderr
