"""Model registry: which model a request means."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

import afterglow
from afterglow.engine.host import remote_calls
from afterglow.errors import EngineError, ModelNotFound
from afterglow.server import models as server_models
from afterglow.server.models import ModelSlot
from afterglow.testing import models
from support.engine_factories import Raise
from support.server_process import ServerProcess, run_server, wait_until

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


def load_tiny(path: Path, **options: Any) -> afterglow.Model:
    return afterglow.load(path, host="process", context=256, threads=1, disk_cache=False, **options)


def test_the_template_process_is_started_when_the_model_is_loaded() -> None:
    slot = ModelSlot("tiny", lambda: load_tiny(models.get_path("attention")))
    with closing(slot):
        model = slot.load()
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        model.plan_chat("Hello")
        after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after == before


def test_a_model_with_an_invalid_chat_template_is_still_served() -> None:
    path = models.get_path("successor-attention")
    slot = ModelSlot("tiny", lambda: load_tiny(path, chat_template="{{ raise_exception('no') }}"))
    with closing(slot):
        assert slot.load().complete("abc", max_tokens=3).text == "def"


@pytest.mark.parametrize("step", ["get_engine_info", "prepare"])
def test_a_model_that_fails_while_it_starts_leaves_nothing_open(
    step: str, monkeypatch: pytest.MonkeyPatch, list_own_handles: Any
) -> None:
    module = remote_calls if step == "get_engine_info" else server_models
    monkeypatch.setattr(module, step, Raise(EngineError("the bug")))
    processes = psutil.Process().children(recursive=True)
    slot = ModelSlot("tiny", lambda: load_tiny(models.get_path("attention")))
    with closing(slot), pytest.raises(EngineError, match="the bug"):
        slot.load()
    assert set(psutil.Process().children(recursive=True)) <= set(processes)
    assert not list_own_handles()


def test_a_model_whose_engine_cannot_be_restarted_has_failed_and_is_loaded_again(tmp_path: Path) -> None:
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
