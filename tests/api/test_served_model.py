"""A served model: slow one-time work at the start, pins and clearing through the engine process."""

from __future__ import annotations

import psutil
import pytest

from afterglow.api.served_model import ServedModel, ServedSettings
from afterglow.engine.host import remote_calls
from afterglow.errors import EngineError, PromptTooLong
from afterglow.llama.handle import list_open_handles
from afterglow.testing import models
from support.engine_factories import Raise

pytestmark = pytest.mark.native


def test_the_template_process_is_started_when_the_model_is_loaded() -> None:
    settings = ServedSettings(context=256, threads=1, disk_cache=False)
    with ServedModel("tiny", models.get_path("attention"), settings) as model:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        model.plan_chat("Hello")
        after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after == before


def test_a_model_with_an_invalid_chat_template_is_still_served() -> None:
    settings = ServedSettings(context=256, threads=1, disk_cache=False, chat_template="{{ raise_exception('no') }}")
    with ServedModel("tiny", models.get_path("successor-attention"), settings) as model:
        assert model.complete("abc", max_tokens=3, temperature=0).text == "def"


@pytest.mark.parametrize("step", ["get_engine_info", "_warm_up"])
def test_a_model_that_fails_while_it_starts_leaves_nothing_open(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise EngineError("the bug")

    if step == "get_engine_info":
        monkeypatch.setattr(remote_calls, step, Raise(EngineError("the bug")))
    else:
        monkeypatch.setattr(ServedModel, step, fail)
    processes, handles = psutil.Process().children(recursive=True), list_open_handles()
    with pytest.raises(EngineError, match="the bug"):
        ServedModel("tiny", models.get_path("attention"), ServedSettings(context=256, threads=1, disk_cache=False))
    assert set(psutil.Process().children(recursive=True)) <= set(processes)
    assert list_open_handles() == handles


def test_prefixes_are_pinned_and_the_cache_is_cleared_in_the_engine_process(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    settings = ServedSettings(context=256, threads=1, disk_cache=True)
    with ServedModel("tiny", models.get_path("successor-attention"), settings) as model:
        model.pin("abc" * 20)
        model.complete("abc" * 20, max_tokens=1)
        assert model.complete("abc" * 20, max_tokens=1).usage.cached_tokens > 0
        model.clear_cache()
        assert model.complete("abc" * 20, max_tokens=1).usage.cached_tokens == 0
        model.clear_cache()
        assert model.unpin("abc" * 20)
        assert not model.unpin("abc" * 20)
        with pytest.raises(PromptTooLong):
            model.pin("a" * 1000)
    assert not list(tmp_path.rglob("*.cells"))
