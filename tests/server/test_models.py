"""Model registry: which model a request means, and how models are loaded."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

import afterglow
from afterglow.engine.host import remote_calls
from afterglow.errors import Closed, EngineError, ModelNotFound
from afterglow.server import models as served_models
from afterglow.server.app import build_application
from afterglow.server.models import ModelRegistry, ModelSlot
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ENGINE_CALL_THREADS, ServerState
from afterglow.testing import models
from support.engine_factories import Raise
from support.server_process import ServerProcess, run_server, wait_until

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


@pytest.mark.native
def test_the_model_is_optional_on_every_route_if_one_model_is_served() -> None:
    with run_server(f"tiny={models.get_path('successor-attention')}", "--context", "256") as server:
        for path, body in BODIES.items():
            response = server.post(path, body)
            assert response.status_code == 200, path
            assert response.json().get("model", "tiny") == "tiny"
            assert "x-afterglow-ignored" not in response.headers
            other = server.post(path, {**body, "model": "claude-fable-9"})
            assert (other.status_code, other.headers["x-afterglow-ignored"]) == (200, "model")
        assert server.http.get("/v1/models/claude-fable-9").status_code == 404
        events = server.collect_events("/v1/completions", BODIES["/v1/completions"])
        assert {event["model"] for event in events} == {"tiny"}


@pytest.mark.native
@pytest.mark.parametrize("path", BODIES)
def test_the_model_is_required_if_several_models_are_served(server: ServerProcess, path: str) -> None:
    response = server.post(path, BODIES[path])
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "model", "missing_required_parameter")
    assert "tiny, hybrid" in error["message"]


def load_tiny(path: Path, **options: Any) -> afterglow.Model:
    return afterglow.load(path, host="process", context=256, threads=1, disk_cache=False, **options)


@pytest.mark.native
def test_the_template_process_is_started_when_the_model_is_loaded() -> None:
    slot = ModelSlot("tiny", lambda: load_tiny(models.get_path("attention")))
    with closing(slot):
        model = slot.load()
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        model.plan_chat("Hello")
        after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after == before


@pytest.mark.native
def test_a_model_with_an_invalid_chat_template_is_still_served() -> None:
    path = models.get_path("successor-attention")
    slot = ModelSlot("tiny", lambda: load_tiny(path, chat_template="{{ raise_exception('no') }}"))
    with closing(slot):
        assert slot.load().complete("abc", max_tokens=3).text == "def"


@pytest.mark.native
@pytest.mark.parametrize("step", ["get_engine_info", "prepare"])
def test_a_model_that_fails_while_it_starts_leaves_nothing_open(
    step: str, monkeypatch: pytest.MonkeyPatch, list_own_handles: Any
) -> None:
    module = remote_calls if step == "get_engine_info" else served_models
    monkeypatch.setattr(module, step, Raise(EngineError("the bug")))
    processes = psutil.Process().children(recursive=True)
    slot = ModelSlot("tiny", lambda: load_tiny(models.get_path("attention")))
    with closing(slot), pytest.raises(EngineError, match="the bug"):
        slot.load()
    assert set(psutil.Process().children(recursive=True)) <= set(processes)
    assert not list_own_handles()


@pytest.mark.native
def test_a_model_whose_engine_cannot_be_restarted_has_failed_and_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_models, "RETRY_AFTER_SECONDS", 0.0)
    path = Path(shutil.copy(models.get_path("successor-attention"), tmp_path / "model.gguf"))
    slot = ModelSlot("tiny", lambda: load_tiny(path))
    with closing(slot):
        model = slot.load()
        process = model._lifecycle.get_host()
        assert slot.state == "ready"
        path.rename(tmp_path / "away")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert wait_until(60, lambda: slot.state == "failed")
        with pytest.raises(ModelNotFound):
            slot.load()
        (tmp_path / "away").rename(path)
        assert slot.load().complete("abc", max_tokens=3).text == "def"
        assert slot.state == "ready"
        assert slot.model is model  # other threads may be using its vocabulary


# --- loads


class FakeModel:
    """A model whose load waits until a test allows it, and fails if the test says so."""

    allowed = threading.Event()
    error: Exception | None = None
    loads = 0
    closed = threading.Event()

    can_generate = False

    def __init__(self) -> None:
        self.name = "fake"
        self.needs_restart = self.is_active = False
        self.activate()

    def activate(self) -> None:
        FakeModel.loads += 1
        FakeModel.allowed.wait(60)
        if FakeModel.error is not None:
            raise FakeModel.error
        self.needs_restart, self.is_active = False, True

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        pass

    def close(self) -> None:
        FakeModel.closed.set()


@pytest.fixture
def slow_models() -> Iterator[type[FakeModel]]:
    """Models are fake, and their loads wait."""
    FakeModel.allowed, FakeModel.closed, FakeModel.error, FakeModel.loads = (
        threading.Event(),
        threading.Event(),
        None,
        0,
    )
    yield FakeModel
    FakeModel.allowed.set()


def build_state() -> ServerState:
    return ServerState(ModelRegistry({"fake": FakeModel}), ServerSettings())


def test_requests_share_one_load_and_block_no_engine_call(slow_models: type[FakeModel]) -> None:
    async def run(state: ServerState) -> int:
        requests = [asyncio.ensure_future(state.get_model("fake")) for _ in range(2 * ENGINE_CALL_THREADS)]
        await asyncio.sleep(0)
        requests[0].cancel()  # a client that disconnects does not cancel the load for the others
        result = await asyncio.wait_for(state.run_engine_call(lambda: 7), 30)
        assert state.models.get_slot("fake").state == "loading"
        slow_models.allowed.set()
        assert len({id(model) for model in await asyncio.gather(*requests[1:])}) == 1
        return result

    with build_state() as state:
        assert asyncio.run(run(state)) == 7
    assert slow_models.loads == 1


def test_a_failed_load_is_remembered_for_some_time(
    slow_models: type[FakeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_models.allowed.set()
    slow_models.error = ModelNotFound("fake", "its file is missing")
    with build_state() as state:
        slot = state.models.get_slot("fake")
        for _ in range(3):
            with pytest.raises(ModelNotFound):
                slot.load()
        assert (slow_models.loads, slot.state) == (1, "not loaded")
        now = served_models.time.monotonic() + served_models.RETRY_AFTER_SECONDS
        monkeypatch.setattr(served_models.time, "monotonic", lambda: now)
        slow_models.error = None
        assert slot.load().is_active
        assert slow_models.loads == 2


def test_closing_does_not_wait_for_a_load(slow_models: type[FakeModel]) -> None:
    state = build_state()
    future = state.models.get_slot("fake").start_load()
    state.close()
    with pytest.raises(Closed):
        future.result(0)
    with pytest.raises(Closed):
        state.models.get_slot("fake").start_load()
    slow_models.allowed.set()
    assert slow_models.closed.wait(30)  # the model that was loaded too late


def test_a_health_check_reports_a_failed_model_and_loads_it_again(slow_models: type[FakeModel]) -> None:
    slow_models.allowed.set()
    with build_state() as state, TestClient(build_application(state)[0], "http://localhost") as client:
        model = state.models.get_slot("fake").load()
        assert client.get("/health").json() == {"status": "ok", "models": {"fake": "ready"}}
        slow_models.allowed.clear()
        model.needs_restart, model.is_active = True, False  # type: ignore[misc]
        response = client.get("/health")
        assert (response.status_code, response.json()["models"]) == (503, {"fake": "failed"})
        assert client.get("/health").json()["models"] == {"fake": "restarting"}
        slow_models.allowed.set()
        assert wait_until(30, lambda: client.get("/health").status_code == 200)
    assert slow_models.loads == 2
