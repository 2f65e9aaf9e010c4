"""The OpenAPI document, and that nothing it allows ends in an error of ours."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis

from support.server_process import ServerProcess

ROUTES = {
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
}


def test_the_document_has_every_route_and_a_type_for_every_body(server: ServerProcess) -> None:
    document = server.http.get("/openapi.json").json()
    assert set(document["paths"]) == ROUTES
    for path, methods in document["paths"].items():
        if "post" in methods:
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            body = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
            assert body["additionalProperties"] is False, path


def try_all(server: ServerProcess, examples: int) -> None:
    """Ask for so many things of each operation that the document allows."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in document.get_all_operations():

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=found.ok().as_strategy())
        def run(case: Any) -> None:
            check(case)

        run()


def test_nothing_that_the_document_allows_is_an_error_of_ours(server: ServerProcess) -> None:
    try_all(server, 10)


@pytest.mark.full
def test_nothing_of_many_things_that_the_document_allows_is_an_error_of_ours(server: ServerProcess) -> None:
    try_all(server, 300)


def check(case: Any) -> None:
    if isinstance(case.body, dict):
        case.body["model"] = "tiny"
        if "/v1/" in case.path and "embeddings" not in case.path:
            case.body["deadline"] = 0.2
    answer = case.call(timeout=30)
    assert answer.status_code < 500, f"{answer.status_code} {answer.text[:500]} for {case.body!r}"
