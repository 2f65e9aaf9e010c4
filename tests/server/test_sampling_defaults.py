"""Sampling of requests over HTTP: the defaults of the model for absent fields, on every route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from afterglow.llama.sampling import Sampling
from afterglow.server.schema.sampling import SamplingFields, build_sampling
from afterglow.testing import models
from support.sampling_models import write_model_with_sampling
from support.server_process import ServerProcess

CYCLE = models.CYCLE.decode()
DEFAULTS = Sampling(temperature=0.6, top_k=20, repeat_penalty=1.05, repeat_last_n=32)


def build(**fields: Any) -> Sampling:
    return build_sampling(SamplingFields(**fields), DEFAULTS, context_length=512, vocabulary_size=100)


def test_absent_fields_have_the_defaults_of_the_model_and_given_ones_win() -> None:
    assert build() == DEFAULTS
    given = build(temperature=0, top_p=1.0, seed=3)
    assert (given.temperature, given.top_p, given.seed, given.top_k, given.repeat_penalty) == (0, 1.0, 3, 20, 1.05)
    assert build(presence_penalty=1).repeat_last_n == 512  # OpenAI's penalties cover the whole context


@pytest.fixture(scope="module")
def hot_server(caches_of_our_own: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a model that follows the cycle only if it is not sampled as its file says."""
    path = write_model_with_sampling(tmp_path_factory.mktemp("models") / "hot.gguf", {"temp": 100.0, "min_p": 0.0})
    process = ServerProcess(f"hot={path}", "--context", "512", "--top-k", "0", "--top-p", "1")
    yield process
    process.stop()


@pytest.mark.native
def test_every_route_samples_as_the_model_file_says_unless_the_request_does(hot_server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "hello"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 12},
        "/v1/completions": {"prompt": CYCLE, "max_tokens": 12},
        "/v1/responses": {"input": "hello", "max_output_tokens": 12},
    }
    for route, body in bodies.items():
        drawn = hot_server.post(route, {"model": "hot", "seed": 1, **body}).text
        greedy = hot_server.post(route, {"model": "hot", "seed": 1, "temperature": 0, **body}).text
        assert CYCLE[:12] not in drawn, route
        assert CYCLE[:12] in greedy, route


@pytest.mark.native
def test_a_completion_without_max_tokens_ends_when_the_context_is_full(hot_server: ServerProcess) -> None:
    body = {"model": "hot", "prompt": CYCLE, "temperature": 0}
    choice = hot_server.post("/v1/completions", body).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["text"]) > 400) == ("length", True)


@pytest.mark.native
def test_the_models_list_the_default_sampling_and_its_sources(hot_server: ServerProcess) -> None:
    card = hot_server.http.get("/v1/models/hot").json()
    assert card["sampling"]["temperature"] == {"value": 100.0, "source": "file"}
    assert card["sampling"]["top_k"] == {"value": 0.0, "source": "settings"}
    assert card["sampling"]["repeat_penalty"] == {"value": 1.0, "source": "default"}


@pytest.mark.native
def test_a_response_has_the_sampling_that_was_used(hot_server: ServerProcess) -> None:
    """Fields that the request does not set have the defaults of the model, not those of OpenAI."""
    body = {"model": "hot", "input": "hello", "max_output_tokens": 1}
    used = hot_server.post("/v1/responses", body).json()
    assert (used["temperature"], used["top_p"]) == (100.0, 1.0)
    used = hot_server.post("/v1/responses", {**body, "temperature": 0.5, "top_p": 0.9}).json()
    assert (used["temperature"], used["top_p"]) == (0.5, 0.9)
