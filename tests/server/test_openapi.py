"""The OpenAPI document. No request that it allows causes a server error."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis

from support.server_process import ServerProcess

pytestmark = pytest.mark.native

FORM_ROUTES = {"/v1/audio/transcriptions", "/v1/audio/translations"}
ROUTES = {
    *FORM_ROUTES,
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/{id}",
    "/v1/responses/{id}/input_items",
    "/v1/embeddings",
    "/v1/files",
    "/v1/files/{id}",
    "/v1/files/{id}/content",
    "/v1/batches",
    "/v1/batches/{id}",
    "/v1/batches/{id}/cancel",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/reranking",
    "/reranking",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/health",
    "/models/load",
    "/models/unload",
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
    "/conversations",
    "/conversations/export",
    "/conversations/import",
    "/conversations/{id}",
    "/conversations/{id}/messages/{message_id}",
    "/tree",
    "/tree/pin",
    "/tree/unpin",
    "/tree/forget",
    "/tree/prompt",
    "/tree/export",
    "/events",
    "/requests",
    "/requests/{id}",
    "/api/version",
    "/api/tags",
    "/api/ps",
    "/api/show",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/pull",
    "/api/create",
    "/api/copy",
    "/api/delete",
    "/completion",
    "/completions",
    "/infill",
    "/embedding",
    "/embeddings",
    "/chat/completions",
    "/chat/completions/input_tokens",
    "/v1/chat/completions/input_tokens",
    "/responses",
    "/responses/input_tokens",
    "/v1/responses/input_tokens",
    "/slots",
    "/props",
    "/lora-adapters",
    "/models",
}
NOT_IMPLEMENTED = 501  # infill with a model that has no tokens for it


WITHOUT_BODY = {"/v1/batches/{id}/cancel"}


def test_the_document_has_every_route_and_a_strict_schema_for_every_body(server: ServerProcess) -> None:
    document = server.http.get("/openapi.json").json()
    assert set(document["paths"]) == ROUTES
    for path, methods in document["paths"].items():
        if "post" in methods and path not in WITHOUT_BODY:
            content = methods["post"]["requestBody"]["content"]
            if path in FORM_ROUTES:
                assert content["multipart/form-data"]["schema"]["additionalProperties"] is False, path
                continue
            (media_type,) = content.values()
            schema = media_type["schema"].get("items", media_type["schema"])  # of an object, or of those in an array
            body = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
            assert body["additionalProperties"] is False, path


def check_operations(server: ServerProcess, examples: int) -> None:
    """Send a number of valid requests to each operation of the document."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for operation in document.get_all_operations():
        if operation.ok().path == "/events":
            continue  # its response does not end

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
        if case.path.startswith(("/v1/", "/completion", "/infill", "/chat", "/responses")) and not case.path.endswith(
            ("embeddings", "rerank", "translations", "transcriptions")
        ):
            case.body["deadline"] = 0.2
        if case.path in ("/api/chat", "/api/generate"):
            case.body["options"] = {**(case.body.get("options") or {}), "deadline": 0.2}
        case.body.pop("keep_alive", None)  # other tests use the models of this server
    response = case.call(timeout=240)
    assert response.status_code < 500 or response.status_code == NOT_IMPLEMENTED, (
        f"{response.status_code} {response.text[:500]} for {case.body!r}"
    )


def test_valid_requests_cause_no_server_error(server: ServerProcess) -> None:
    check_operations(server, 10)


@pytest.mark.full
def test_many_valid_requests_cause_no_server_error(server: ServerProcess) -> None:
    check_operations(server, 300)
