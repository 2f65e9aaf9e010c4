"""Middleware: API keys, `Host` and `Origin` headers, body size limit and CORS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from afterglow.cli.settings import load_settings
from afterglow.errors import InvalidArgument
from afterglow.server.auth import BrowserPolicy
from afterglow.server.settings import ServerSettings, hash_api_key
from afterglow.testing import models
from support.server_process import ServerProcess, run_server

pytestmark = pytest.mark.native

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def test_a_body_over_the_size_limit_gets_413() -> None:
    model = f"tiny={models.get_path('successor-attention')}"
    with run_server(model, AFTERGLOW_SERVER_MAX_BODY_BYTES="10000") as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 20_000}]}
        response = server.post("/v1/chat/completions", body)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        chunks = (b'{"model": "' + b"x" * 1000 for _ in range(20))  # without Content-Length
        headers = {"Content-Type": "application/json"}
        chunked = server.http.post("/v1/chat/completions", content=chunks, headers=headers)
        assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "body_too_large")
        assert server.chat()["status"] == 200


def test_requests_without_a_valid_key_get_401(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"first\n\n{hash_api_key('second')}\nschlüssel\n")
    keys = ("--api-key-file", str(tmp_path / "keys"), "--lazy-load")
    model = f"tiny={models.get_path('successor-attention')}"
    with run_server(model, *keys, AFTERGLOW_SERVER_API_KEYS="third,fourth") as server:
        for path in ("/v1/models", "/metrics", "/stats", "/cache", "/openapi.json", "/nowhere"):
            response = server.http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        body = {"model": "tiny", "messages": MESSAGES}
        for wrong in ("no", hash_api_key("second")):
            headers = {"Authorization": f"Bearer {wrong}"}
            assert server.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 401
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/v1/health").status_code == 200
        for key in ("first", "second", "third", "fourth"):
            assert server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        headers = {"Authorization": "Bearer schlüssel".encode()}
        assert server.http.get("/v1/models", headers=headers).status_code == 200
        assert server.list_engines() == []  # --lazy-load: no model is loaded yet
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="second", max_retries=0) as client:
            completion = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)
            assert completion.choices[0].message.content == "abc"
        (engine,) = server.list_engines()
        assert not any("third" in value for value in engine.environ().values())
        rebound = {"Host": "page.example", "Authorization": "Bearer first"}
        assert server.http.get("/v1/models", headers=rebound).status_code == 200  # a page does not know the key


def test_a_key_may_be_sent_in_either_header() -> None:
    model = f"tiny={models.get_path('successor-attention')}"
    with run_server(model, "--lazy-load", AFTERGLOW_SERVER_API_KEYS="first,second") as server:

        def get(**headers: str) -> tuple[int, str]:
            response = server.http.get(
                "/v1/models", headers={name.replace("_", "-"): headers[name] for name in headers}
            )
            return response.status_code, response.json().get("error", {}).get("message", "")

        assert get(x_api_key="first")[0] == 200
        assert get(authorization="Bearer second", x_api_key="second")[0] == 200
        assert get(x_api_key="wrong")[0] == 401
        status, message = get(authorization="Bearer first", x_api_key="second")
        assert (status, "different keys" in message) == (401, True)


def test_settings_keep_digests_of_api_keys_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("of the file\n")
    (tmp_path / "settings.toml").write_text(f"[server]\napi_key_file = '{tmp_path / 'keys'}'\n")
    monkeypatch.setenv("AFTERGLOW_SETTINGS", str(tmp_path / "settings.toml"))
    monkeypatch.setenv("AFTERGLOW_SERVER_API_KEYS", "of the environment")
    settings = load_settings().server
    assert settings.api_keys == (hash_api_key("of the environment"), hash_api_key("of the file"))
    assert "of the environment" not in repr(settings)
    assert "of the file" not in repr(settings)
    monkeypatch.setenv("AFTERGLOW_SERVER_API_KEYS", "")
    with pytest.raises(InvalidArgument, match="must not be empty"):
        load_settings()
    monkeypatch.setenv("AFTERGLOW_SERVER_API_KEYS", "sha256:123")
    with pytest.raises(InvalidArgument, match="64 lower-case hexadecimal digits"):
        load_settings()
    for file, reason in ((tmp_path / "missing", "cannot be read"), (tmp_path / "empty", "has no keys")):
        (tmp_path / "empty").touch()
        monkeypatch.setenv("AFTERGLOW_SERVER_API_KEY_FILE", str(file))
        with pytest.raises(InvalidArgument, match=f"api_key_file.*{reason}"):
            load_settings()


# --- web pages

ROUTES = (
    *(("GET", path) for path in ("/v1/models", "/cache", "/stats", "/metrics", "/health", "/openapi.json", "/nowhere")),
    *(("POST", path) for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize")),
    ("OPTIONS", "/v1/chat/completions"),
)


@pytest.mark.parametrize(
    "host", ["page.example", "127.0.0.1.example", "192.168.0.9", "localhost.example:80", "", "[::1"]
)
def test_a_host_name_that_is_not_configured_gets_403(server: ServerProcess, host: str) -> None:
    for method, path in ROUTES:
        response = server.http.request(method, path, headers={"Host": host})
        assert response.status_code == 403, path
        assert response.json()["error"]["code"] == "host_not_allowed"
        assert "`allow_hosts`" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "127.1.2.3", "[::1]:8080", "localhost."]
)
def test_loopback_names_are_accepted(server: ServerProcess, host: str) -> None:
    assert server.http.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://page.example", "null", "http://localhost:3000", "http://127.0.0.1", "x", "http://["]
)
def test_a_page_of_another_origin_gets_403_on_every_route(server: ServerProcess, origin: str) -> None:
    for method, path in ROUTES:
        response = server.http.request(method, path, headers={"Origin": origin})
        assert response.status_code == 403, path
        assert response.json()["error"]["code"] == "origin_not_allowed"
        assert "`allow_origins`" in response.json()["error"]["message"]


def test_a_page_of_the_server_itself_is_accepted(server: ServerProcess) -> None:
    assert server.http.get("/v1/models", headers={"Origin": server.url}).status_code == 200


def test_configured_hosts_and_origins_are_accepted() -> None:
    model = f"tiny={models.get_path('successor-attention')}"
    arguments = ("--allow-host", "box.example", "--allow-origin", "http://page.example", "--lazy-load")
    with run_server(model, *arguments) as server:
        headers = {"Host": "box.example:8080", "Origin": "http://page.example"}
        response = server.http.get("/v1/models", headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://page.example"
        assert "x-afterglow-ignored" in response.headers["access-control-expose-headers"]
        assert server.http.get("/v1/models", headers={**headers, "Host": "other.example"}).status_code == 403
        assert server.http.get("/v1/models", headers={**headers, "Origin": "http://b.example"}).status_code == 403


def test_a_server_on_all_addresses_is_reached_by_each_of_them() -> None:
    """A page can rebind a name, but not an address."""
    for listening, answers in (("0.0.0.0", True), ("::", True), ("192.168.0.9", True), ("127.0.0.1", False)):
        policy = BrowserPolicy(ServerSettings(host=listening))
        assert policy.is_host_allowed("192.168.0.9:8080") == answers
        assert not policy.is_host_allowed("page.example")


def test_origins_may_have_wildcards() -> None:
    policy = BrowserPolicy(ServerSettings(allow_origins=("http://localhost:*", "https://*.example", "app://*")))
    for origin in ("http://localhost:3000", "https://chat.example", "app://obsidian.md"):
        assert policy.is_origin_allowed(origin, "box.example")
    for origin in ("http://localhost", "https://localhost:3000", "https://example", "https://a.example/x", "null"):
        assert not policy.is_origin_allowed(origin, "box.example")


# --- CORS


def test_cors_headers_are_sent_to_allowed_origins_only(server: ServerProcess) -> None:
    headers = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.http.options("/v1/models", headers=headers).headers
    assert "access-control-allow-origin" not in server.http.get("/v1/models", headers=headers).headers
    model = f"tiny={models.get_path('successor-attention')}"
    with run_server(model, "--allow-origin", "http://page.example", "--lazy-load") as cors_server:
        preflight = cors_server.http.options("/v1/models", headers=headers)
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        other_origin = cors_server.http.get("/v1/models", headers={"Origin": "http://other.example"})
        assert "access-control-allow-origin" not in other_origin.headers
