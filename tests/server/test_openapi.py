"""The OpenAPI document. No request that it allows causes a server error."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis

from support.server_process import ServerProcess

pytestmark = pytest.mark.native

ROUTES = {
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/{id}",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/health",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/health",
    "/metrics",
    "/stats",
    "/cache",
    "/cache/explain",
    "/cache/pin",
    "/cache/unpin",
    "/cache/clear",
}


def test_the_document_has_every_route_and_a_strict_schema_for_every_body(server: ServerProcess) -> None:
    document = server.http.get("/openapi.json").json()
    assert set(document["paths"]) == ROUTES
    for path, methods in document["paths"].items():
        if "post" in methods:
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            body = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
            assert body["additionalProperties"] is False, path


def check_operations(server: ServerProcess, examples: int) -> None:
    """Send a number of valid requests to each operation of the document."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for operation in document.get_all_operations():

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.ok().as_strategy())
        def run(case: Any) -> None:
            check_case(case)

        run()


def check_case(case: Any) -> None:
    if isinstance(case.body, dict):
        case.body["model"] = "tiny"
        if "/v1/" in case.path and "embeddings" not in case.path:
            case.body["deadline"] = 0.2
    response = case.call(timeout=240)
    assert response.status_code < 500, f"{response.status_code} {response.text[:500]} for {case.body!r}"


def test_valid_requests_cause_no_server_error(server: ServerProcess) -> None:
    check_operations(server, 10)


@pytest.mark.full
def test_many_valid_requests_cause_no_server_error(server: ServerProcess) -> None:
    check_operations(server, 300)
