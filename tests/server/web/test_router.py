"""Routes of the web page: files without a key, conversations of a tenant with one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from afterglow.server.app import build_application
from afterglow.server.models import ModelRegistry
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState

pytestmark = pytest.mark.slow

KEY, OTHER_KEY = {"x-api-key": "key"}, {"x-api-key": "other"}
HELLO: dict[str, Any] = {"message": {"role": "user", "content": "<img src=x onerror=alert(1)>"}}


def open_client(**settings: Any) -> Iterator[TestClient]:
    with ServerState(ModelRegistry({}), ServerSettings(store_conversations=False, **settings)) as state:
        application, _ = build_application(state)
        with TestClient(application, "http://localhost") as client:
            yield client


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A server with two keys and without models."""
    yield from open_client(api_keys=("key", "other"))


def create(client: TestClient, **body: Any) -> str:
    id: str = client.post("/conversations", json=body, headers=KEY).json()["id"]
    return id


def test_the_page_needs_no_key_and_runs_only_its_own_scripts(client: TestClient) -> None:
    page = client.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = page.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} <= set(policy)
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "require-trusted-types-for 'script'" in policy
    assert (page.headers["x-content-type-options"], page.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    for address in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        file = client.get(address)
        assert (file.status_code, file.headers["x-content-type-options"]) == (200, "nosniff"), address


def test_files_are_cached_by_digest_and_the_page_is_revalidated(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["cache-control"] == "no-cache"
    assert client.get("/", headers={"If-None-Match": page.headers["etag"]}).status_code == 304
    [digest] = set(re.findall("/web/([0-9a-f]{16})/", page.text))
    file = client.get(f"/web/{digest}/app.js")
    assert (file.status_code, file.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert "immutable" in file.headers["cache-control"]
    for wrong in ("0123456789abcdef/app.js", f"{digest}/index.html", f"{digest}/README.md", f"{digest}/%2e%2e"):
        assert client.get(f"/web/{wrong}").status_code == 404, wrong


def test_conversations_need_a_key_and_belong_to_it(client: TestClient) -> None:
    assert client.get("/conversations").status_code == 401
    id = create(client, title="secret")
    assert client.get(f"/conversations/{id}", headers=KEY).json()["title"] == "secret"
    for method, path in (("GET", ""), ("DELETE", ""), ("PATCH", ""), ("PUT", "/messages/a"), ("DELETE", "/messages/a")):
        body = {"PATCH": {"title": "x"}, "PUT": HELLO}.get(method)
        response = client.request(method, f"/conversations/{id}{path}", json=body, headers=OTHER_KEY)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "conversation_not_found")
    assert id not in client.get("/conversations", headers=OTHER_KEY).text
    assert client.get("/conversations/export", headers=OTHER_KEY).json()["conversations"] == []


def test_an_exported_conversation_comes_back_with_all_branches(client: TestClient) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    settings = {"system": "Be brief.", "sampling": {"temperature": 0.5, "max_tokens": 9}, "tools": [tool]}
    id = create(client, title="whole", settings=settings)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "<b>"}'}}
    bodies: dict[str, dict[str, Any]] = {
        "a": {
            "message": {"role": "user", "content": [{"type": "text", "text": "x"}]},
            "info": {"files": [{"name": "<b>.txt", "part": 0}]},
        },
        "b": {"parent": "a", "message": {"role": "assistant", "content": "", "tool_calls": [call]}},
        "c": {"parent": "b", "message": {"role": "tool", "tool_call_id": "1", "content": "<i>"}},
        "d": {
            "parent": "a",
            "message": {"role": "assistant", "content": "y", "reasoning_content": "z"},
            "info": {"state": "stopped", "prompt_tokens": 3},
        },
    }
    for name, body in bodies.items():
        assert client.put(f"/conversations/{id}/messages/{name}", json=body, headers=KEY).status_code == 200
    assert client.patch(f"/conversations/{id}", json={"leaf": "c"}, headers=KEY).json()["leaf"] == "c"
    exported = client.get("/conversations/export", headers=KEY).json()
    imported = client.post("/conversations/import", json=exported, headers=OTHER_KEY).json()["conversations"]
    whole = next(conversation for conversation in imported if conversation["title"] == "whole")
    copy = client.get(f"/conversations/{whole['id']}", headers=OTHER_KEY).json()
    original = client.get(f"/conversations/{id}", headers=KEY).json()
    assert {**copy, "id": id} == original
    assert original["settings"] == settings
    assert {message["id"]: message["message"] for message in copy["messages"]} == {
        name: body["message"] for name, body in bodies.items()
    }


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/messages/a", {"message": {"role": "user"}}, "message.content"),
        ("/messages/a", {**HELLO, "parent": "x y"}, "parent"),
        ("/messages/a", {**HELLO, "color": "red"}, "color"),
        ("/messages/a", {**HELLO, "info": {"state": "happy"}}, "info.state"),
    ],
)
def test_a_wrong_field_is_refused_by_name(client: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    id = create(client)
    response = client.put(f"/conversations/{id}{path}", json=body, headers=KEY)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert client.get(f"/conversations/{id}", headers=KEY).json()["messages"] == []


def test_a_message_id_must_be_a_plain_word(client: TestClient) -> None:
    id = create(client)
    assert client.put(f"/conversations/{id}/messages/a%20b", json=HELLO, headers=KEY).status_code == 400


@pytest.mark.parametrize(("settings", "reason"), [({"web": False}, "`web`"), ({"host": "0.0.0.0"}, "`api_keys`")])
def test_a_page_that_is_off_says_why(settings: dict[str, Any], reason: str) -> None:
    for client in open_client(**settings):
        response = client.get("/")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "page_disabled")
        assert reason in response.json()["error"]["message"]
        assert client.get("/conversations").status_code == 404
