"""Tenant isolation: clients with different API keys share no cached state and no responses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afterglow.testing import models
from support.server_process import ServerProcess, wait_until

pytestmark = pytest.mark.native

SECRET = "the secret of the first tenant is a very long text that is worth finding again"
PRIVATE_TEXT = "only the first tenant ever sent this, and no other tenant may see it"
FIRST_KEY, SECOND_KEY = "key-of-the-first", "key-of-the-second"


@pytest.fixture(scope="module")
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def tenant_server(caches_of_our_own: None, cache_directory: Path) -> Iterator[ServerProcess]:
    """A server with two API keys and a disk tier."""
    process = ServerProcess(
        f"tiny={models.get_path('successor-attention')}",
        *("--context", "512", "--sequences", "2", "--api-key", FIRST_KEY, "--api-key", SECOND_KEY),
        AFTERGLOW_CACHE=str(cache_directory),
        AFTERGLOW_DISK_CACHE="on",
    )
    yield process
    process.stop()


def send(server: ServerProcess, path: str, key: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    if body is None:
        return server.http.get(path, headers=headers).json()
    return server.post(path, {"model": "tiny", **body}, headers=headers).json()


def count_cached_tokens(server: ServerProcess, key: str) -> int:
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
    return send(server, "/v1/chat/completions", key, body)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_another_key_has_no_prefix_hit_in_any_tier(tenant_server: ServerProcess) -> None:
    def complete(key: str, prompt: str) -> int:
        completion = send(tenant_server, "/v1/completions", key, {"prompt": prompt, "max_tokens": 4})
        return completion["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert count_cached_tokens(tenant_server, FIRST_KEY) == 0
    assert count_cached_tokens(tenant_server, SECOND_KEY) == 0
    assert count_cached_tokens(tenant_server, FIRST_KEY) > 50
    for number in range(6):  # evicts both from the device to the RAM tier and the disk tier
        complete(FIRST_KEY, f"{number} something else" * 9)
    assert complete(FIRST_KEY, SECRET * 3) == 0
    for number in range(6):
        complete(FIRST_KEY, f"{number} something new" * 9)
    assert complete(SECOND_KEY, SECRET * 3) == 0
    assert complete(FIRST_KEY, SECRET * 3) > 100


def test_a_tenant_is_the_same_in_either_header(tenant_server: ServerProcess) -> None:
    text = "Two headers, one tenant: what was sent with one is found with the other"
    prompt = {"model": "tiny", "prompt": text, "max_tokens": 4}
    send(tenant_server, "/v1/completions", FIRST_KEY, prompt)
    for key, is_cached in ((FIRST_KEY, True), (SECOND_KEY, False)):
        completion = tenant_server.post("/v1/completions", prompt, headers={"x-api-key": key}).json()
        assert (completion["usage"]["prompt_tokens_details"]["cached_tokens"] > 20) is is_cached


def test_another_key_sees_no_text(tenant_server: ServerProcess) -> None:
    send(tenant_server, "/v1/completions", FIRST_KEY, {"prompt": f"{PRIVATE_TEXT} so it is", "max_tokens": 4})
    prompt = {"prompt": f"{PRIVATE_TEXT} and more"}
    assert send(tenant_server, "/cache/explain", FIRST_KEY, prompt)["cached_text"].startswith(" so it is")
    explanation = send(tenant_server, "/cache/explain", SECOND_KEY, prompt)
    assert (explanation["shared_tokens"], explanation["evicted_tokens"]) == (0, 0)
    assert "so it is" not in str(explanation)
    assert PRIVATE_TEXT[:20] in str(send(tenant_server, "/cache", FIRST_KEY))
    assert PRIVATE_TEXT[:20] not in str(send(tenant_server, "/cache", SECOND_KEY))


def test_pins_are_per_key_and_need_one(tenant_server: ServerProcess) -> None:
    prompt = {"prompt": "a prefix that the first tenant pins"}
    assert send(tenant_server, "/cache/pin", FIRST_KEY, prompt)["pinned"] is True
    assert send(tenant_server, "/cache/unpin", SECOND_KEY, prompt)["error"]["code"] == "pin_not_found"
    assert send(tenant_server, "/cache/unpin", FIRST_KEY, prompt)["pinned"] is False
    for route in ("/cache/pin", "/cache/unpin", "/cache/clear"):
        assert send(tenant_server, route, "no key", prompt)["error"]["code"] == "invalid_api_key"


def test_a_response_is_visible_to_its_own_key_only(tenant_server: ServerProcess) -> None:
    response = send(tenant_server, "/v1/responses", FIRST_KEY, {"input": SECRET, "max_output_tokens": 4})
    path = f"/v1/responses/{response['id']}"
    assert send(tenant_server, path, FIRST_KEY)["id"] == response["id"]
    assert send(tenant_server, path, SECOND_KEY)["error"]["code"] == "response_not_found"
    body = {"input": "go on", "previous_response_id": response["id"]}
    assert send(tenant_server, "/v1/responses", SECOND_KEY, body)["error"]["code"] == "previous_response_not_found"


def test_no_key_is_written_to_disk(tenant_server: ServerProcess, cache_directory: Path) -> None:
    contents: dict[Path, bytes] = {}

    def read_files() -> bool:
        """Return False if no cells are written yet, or the engine renamed or removed a file meanwhile."""
        contents.clear()
        with contextlib.suppress(FileNotFoundError):
            contents.update((path, path.read_bytes()) for path in cache_directory.rglob("*") if path.is_file())
            return any(path.suffix == ".cells" for path in contents)
        return False

    assert wait_until(120, read_files)
    assert not [path for path, content in contents.items() if FIRST_KEY.encode() in content]
