"""Middleware: API keys, body size limit and CORS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

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
        assert chunked.status_code == 413
        assert server.chat()["status"] == 200


def test_requests_without_a_valid_key_get_401(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\n\nsecond\n")
    keys = ("--api-key", "third", "--api-key-file", str(tmp_path / "keys"), "--lazy-load")
    with run_server(f"tiny={models.get_path('successor-attention')}", *keys) as server:
        for path in ("/v1/models", "/metrics", "/stats", "/cache", "/openapi.json", "/nowhere"):
            response = server.http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        body = {"model": "tiny", "messages": MESSAGES}
        headers = {"Authorization": "Bearer no"}
        assert server.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 401
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/v1/health").status_code == 200
        for key in ("first", "second", "third"):
            assert server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert server.list_engines() == []  # --lazy-load: no model is loaded yet
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="second", max_retries=0) as client:
            completion = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)
            assert completion.choices[0].message.content == "abc"
        assert len(server.list_engines()) == 1


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
