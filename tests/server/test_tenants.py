"""Who has one key sees and uses nothing that was computed, kept or said for another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afterglow.testing import models
from support.server_process import ServerProcess

SECRET = "the secret of the first tenant is a very long text that is worth finding again"
WHISPER = "only the first tenant ever said this, and nobody else may hear of it"
FIRST, SECOND = "key-of-the-first", "key-of-the-second"


@pytest.fixture(scope="module")
def locked(caches_of_our_own: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    cache = tmp_path_factory.mktemp("tenants")
    model = f"tiny={models.get_path('successor-attention')}"
    running = ServerProcess(
        model, "--context", "512", "--sequences", "2", "--api-key", FIRST, "--api-key", SECOND,
        AFTERGLOW_CACHE=str(cache), AFTERGLOW_DISK_CACHE="on",
    )  # fmt: skip
    running.cache = cache  # type: ignore[attr-defined]
    yield running
    running.end()


def ask(server: ServerProcess, path: str, key: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    if body is None:
        return server.http.get(path, headers=headers).json()
    return server.post(path, {"model": "tiny", **body}, headers=headers).json()


def cached(server: ServerProcess, key: str) -> int:
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
    return ask(server, "/v1/chat/completions", key, body)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_another_key_finds_nothing_in_any_tier(locked: ServerProcess) -> None:
    assert cached(locked, FIRST) == 0
    assert cached(locked, SECOND) == 0
    assert cached(locked, FIRST) > 50
    for number in range(6):  # both are pushed out of memory, into RAM and onto the disk
        ask(locked, "/v1/completions", FIRST, {"prompt": f"{number} something else" * 9, "max_tokens": 4})
    body = {"prompt": SECRET * 3, "max_tokens": 4}
    assert ask(locked, "/v1/completions", FIRST, body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for number in range(6):
        ask(locked, "/v1/completions", FIRST, {"prompt": f"{number} something new" * 9, "max_tokens": 4})
    assert ask(locked, "/v1/completions", SECOND, body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask(locked, "/v1/completions", FIRST, body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_another_key_sees_nothing(locked: ServerProcess) -> None:
    ask(locked, "/v1/completions", FIRST, {"prompt": f"{WHISPER} so it is", "max_tokens": 4})
    prompt = {"prompt": f"{WHISPER} and more"}
    assert ask(locked, "/cache/explain", FIRST, prompt)["theirs"].startswith(" so it is")
    stranger = ask(locked, "/cache/explain", SECOND, prompt)
    assert (stranger["shared_tokens"], stranger["evicted_tokens"]) == (0, 0)
    assert "so it is" not in str(stranger)
    assert WHISPER[:20] in str(ask(locked, "/cache", FIRST))
    assert WHISPER[:20] not in str(ask(locked, "/cache", SECOND))


def test_a_response_belongs_to_its_key(locked: ServerProcess) -> None:
    said = ask(locked, "/v1/responses", FIRST, {"input": SECRET, "max_output_tokens": 4})
    assert ask(locked, f"/v1/responses/{said['id']}", FIRST)["id"] == said["id"]
    assert ask(locked, f"/v1/responses/{said['id']}", SECOND)["error"]["code"] == "response_not_found"
    body = {"input": "go on", "previous_response_id": said["id"]}
    assert ask(locked, "/v1/responses", SECOND, body)["error"]["code"] == "previous_response_not_found"


def test_no_key_is_written_down(locked: ServerProcess) -> None:
    cache: Path = locked.cache  # type: ignore[attr-defined]
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert any(path.suffix == ".cells" for path in files)
    assert all(FIRST.encode() not in path.read_bytes() for path in files)
