"""Model registry: which model a request means."""

from __future__ import annotations

from typing import Any

import pytest

from afterglow.testing import models
from support.server_process import ServerProcess, run_server

pytestmark = pytest.mark.native

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "hello"},
    "/tokenize": {"content": "hello"},
    "/detokenize": {"tokens": [100]},
    "/apply-template": {"messages": [{"role": "user", "content": "hello"}]},
    "/cache/explain": {"prompt": "abc"},
}


def test_the_model_is_optional_on_every_route_if_one_model_is_served() -> None:
    with run_server(f"tiny={models.get_path('successor-attention')}", "--context", "256") as server:
        for path, body in BODIES.items():
            response = server.post(path, body)
            assert response.status_code == 200, path
            assert response.json().get("model", "tiny") == "tiny"
        events = server.collect_events("/v1/completions", BODIES["/v1/completions"])
        assert {event["model"] for event in events} == {"tiny"}


@pytest.mark.parametrize("path", BODIES)
def test_the_model_is_required_if_several_models_are_served(server: ServerProcess, path: str) -> None:
    response = server.post(path, BODIES[path])
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "model", "missing_required_parameter")
    assert "tiny, hybrid" in error["message"]
