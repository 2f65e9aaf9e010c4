"""The neutral pipeline: a second API consists of routes, a formatter and an error body of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.testclient import TestClient

import afterglow
from afterglow.chat.messages import Message
from afterglow.chat.output.response import Delta
from afterglow.server.app import ERROR_FORMATS, build_routed_app
from afterglow.server.auth import AuthMiddleware, get_tenant_salt
from afterglow.server.errors import APIError, ErrorFormats, install_error_handlers
from afterglow.server.generation import Generation, start_generation
from afterglow.server.generation_requests import ConversationRequest, PromptRequest
from afterglow.server.installed import RequestDefaults
from afterglow.server.models import ModelRegistry, ServedModel
from afterglow.server.schema.base import StrictModel, StrictRoute
from afterglow.server.schema.sampling import SamplingFields
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ServerState
from afterglow.testing import models
from support.server_process import CYCLE

pytestmark = pytest.mark.native


class SecondBody(StrictModel):
    question: str
    stream: bool = False
    max_tokens: int | None = None


class SecondFormatter:
    """Formats text only."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    async def build_response(self) -> dict[str, Any]:
        return {"answers": [response.text for response in await self.generation.collect_responses()]}

    async def stream_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        async for _, delta in deltas:
            for part in delta.parts:
                yield getattr(part, "text", "").encode()

    def format_error(self, error: APIError) -> bytes:
        return b"!" + str(error.code).encode()


def build_second_error(error: APIError) -> dict[str, Any]:
    return {"oops": error.code}


def build_second_router(state: ServerState) -> APIRouter:
    router = APIRouter(route_class=StrictRoute, prefix="/second")

    @router.post("/chat")
    async def chat(body: SecondBody, request: Request) -> Response:
        conversation = ConversationRequest(
            messages=[Message(role="user", content=body.question)],
            prompt_options={},
            sampling_fields=SamplingFields(temperature=0),
            max_tokens=body.max_tokens,
            salt=get_tenant_salt(request),
        )
        generation = await start_generation(state, None, conversation)
        return await generation.respond(SecondFormatter(generation), stream=body.stream)

    @router.post("/complete")
    async def complete(body: SecondBody, request: Request) -> Response:
        model = await state.get_generating_model(None)
        prompts = [model.fit_prompt(body.question)]
        prompt_request = PromptRequest(
            prompts=prompts, n=2, sampling_fields=SamplingFields(temperature=0), max_tokens=body.max_tokens
        )
        generation = await start_generation(state, None, prompt_request)
        return await generation.respond(SecondFormatter(generation), stream=body.stream)

    return router


@pytest.fixture(scope="module")
def client(caches_of_our_own: None) -> Iterator[TestClient]:
    """A server with the OpenAI API and a second one."""
    path = models.get_path("successor-attention")
    options: afterglow.LoadOptions = {"context": 4096, "sequences": 4, "threads": 1, "disk_cache": False}
    registry = ModelRegistry(
        {"tiny": ServedModel(lambda: afterglow.load(path, host="process", name="tiny", **options))}
    )
    formats = ErrorFormats(ERROR_FORMATS.default, {"/second/": build_second_error})
    with ServerState(registry, ServerSettings(api_keys=("key",), max_body_bytes=10_000)) as state:
        app: FastAPI = build_routed_app(state)
        install_error_handlers(app, formats)
        app.include_router(build_second_router(state))
        middleware = AuthMiddleware(app, state, formats)
        registry.load_first()
        with TestClient(middleware, "http://localhost", headers={"x-api-key": "key"}) as test_client:
            test_client.app_state["state"] = state
            yield test_client


def test_a_second_api_generates_with_a_formatter_of_its_own(client: TestClient) -> None:
    body = {"question": "hello", "max_tokens": 8}
    assert client.post("/second/chat", json=body).json() == {"answers": [CYCLE[:8]]}
    assert client.post("/second/chat", json={**body, "stream": True}).text == CYCLE[:8]
    assert client.post("/second/complete", json={**body, "question": "abc"}).json() == {"answers": [CYCLE[3:11]] * 2}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"json": {"question": 3}}, "invalid_value"),
        ({"json": {"question": "x", "other": 1}}, "unknown_parameter"),
        ({"json": {"question": "x" * 5000}}, "context_length_exceeded"),
        ({"json": {"question": "x" * 20_000}}, "body_too_large"),
        ({"json": {"question": "x"}, "headers": {"x-api-key": "wrong"}}, "invalid_api_key"),
    ],
)
def test_a_second_api_formats_all_errors_of_its_paths(client: TestClient, options: dict[str, Any], code: str) -> None:
    assert client.post("/second/chat", **options).json() == {"oops": code}
    assert client.post("/v1/chat/completions", **options).json()["error"]["message"]


def test_a_second_api_formats_the_error_that_ends_a_stream(client: TestClient) -> None:
    model = client.app_state["state"].models.get_slot("tiny").load()
    killed = False
    with client.stream("POST", "/second/chat", json={"question": "hello", "stream": True}) as response:
        text = ""
        for chunk in response.iter_text():
            text += chunk
            if not killed:
                killed = True
                os.kill(model._lifecycle.get_host().pid, signal.SIGKILL)
    assert text.startswith(CYCLE[:1])
    assert text.endswith("!engine_crashed")


def test_the_defaults_of_a_model_apply_to_what_a_request_does_not_set() -> None:
    defaults = RequestDefaults(
        system="Be brief.", stop=("x",), max_tokens=4, chat_template="t", sampling={"top_k": 3, "overflow": "shift"}
    )
    ours = Message(role="user", content="hello")
    request = ConversationRequest(messages=[ours], sampling_fields=SamplingFields(), prompt_options={})
    filled = request.apply_defaults(defaults)
    assert [message.content for message in filled.messages] == ["Be brief.", "hello"]
    assert (filled.stop, filled.max_tokens, filled.overflow, filled.sampling_fields.top_k) == (["x"], 4, "shift", 3)
    assert filled.prompt_options["chat_template"] == "t"
    own = ConversationRequest(
        messages=[Message(role="system", content="Rhyme."), ours],
        sampling_fields=SamplingFields(top_k=5, overflow="refuse"),
        prompt_options={"chat_template": "own"},
        stop=["y"],
        max_tokens=9,
    )
    kept = own.apply_defaults(defaults)
    assert [message.content for message in kept.messages] == ["Rhyme.", "hello"]
    assert (kept.stop, kept.max_tokens, kept.overflow, kept.sampling_fields.top_k) == (["y"], 9, "refuse", 5)
    assert kept.prompt_options["chat_template"] == "own"
