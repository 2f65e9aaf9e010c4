"""Errors name the field of the request that they are about, on every API."""

from __future__ import annotations

from typing import Any

import pytest

from support.server_process import ServerProcess

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/completion", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": {}}, "prompt"),
        ("/v1/embeddings", {"input": None}, "input"),
        ("/v1/embeddings", {"input": ["text", None]}, "input[1]"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]"),
        ("/v1/responses", {"input": None}, "input"),
        ("/api/embed", {"input": None}, "input"),
        ("/tokenize", {"content": {}}, "content"),
        ("/completion", {"prompt": "a", "logit_bias": [[1]]}, "logit_bias[0][1]"),
    ],
)
def test_a_value_of_a_wrong_type_is_named_by_its_field(
    server: ServerProcess, path: str, body: dict[str, Any], name: str
) -> None:
    response = server.post(path, {"model": "tiny", **body})
    assert response.status_code == 400
    assert f"`{name}`" in response.text


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/completion", {"prompt": [99, 999_999]}, "prompt"),
        ("/v1/completions", {"prompt": [99, 999_999]}, "prompt"),
        ("/embedding", {"content": [99, 999_999]}, "content"),
        ("/tokenize", {"content": [99, 999_999]}, "content"),
        ("/detokenize", {"tokens": [99, 999_999]}, "tokens"),
        ("/api/generate", {"prompt": "a", "context": [99, 999_999]}, "context"),
    ],
)
def test_a_token_outside_of_the_vocabulary_is_named_by_its_field(
    server: ServerProcess, path: str, body: dict[str, Any], name: str
) -> None:
    response = server.post(path, {"model": "tiny", **body})
    assert response.status_code == 400
    assert f"`{name}` must be from 0 to " in response.text


def test_a_body_that_must_be_a_list_is_refused_as_such(server: ServerProcess) -> None:
    response = server.post("/lora-adapters?model=tiny", {})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the body must be a list")
