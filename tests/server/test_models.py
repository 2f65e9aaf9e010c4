"""Model registry: which model a request means, and how models are loaded."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

import afterglow
from afterglow.engine.host import remote_calls
from afterglow.engine.types.counters import StoreReport
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import Closed, EngineError, InvalidArgument, ModelNotFound, OutOfMemory
from afterglow.server import held_models
from afterglow.server import models as served_models
from afterglow.server.app import build_application
from afterglow.server.errors import APIError
from afterglow.server.held_models import hold_models
from afterglow.server.installed import ModelVariant, RequestDefaults
from afterglow.server.models import ModelRegistry, ServedModel
from afterglow.server.settings import ServerSettings
from afterglow.server.state import ENGINE_CALL_THREADS, ServerState
from afterglow.testing import models
from support.engine_factories import Raise
from support.server_process import COMMAND, ServerProcess, get_text, run_server, wait_until

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


def test_an_alias_or_a_pattern_names_a_served_model() -> None:
    def never() -> Any:
        raise AssertionError

    aliases = ["o3=big", "claude-opus-*=big", "claude-*=small"]
    registry = ModelRegistry(dict.fromkeys(("small", "big"), ServedModel(never)), aliases=aliases)
    names = {"o3": "big", "claude-opus-4": "big", "claude-haiku-4": "small", "small": "small"}
    assert {name: registry.get_slot(name).name for name in names} == names
    for name in ("o30", "Claude-haiku-4", "gpt-5"):
        with pytest.raises(ModelNotFound, match="served models: small, big"):
            registry.get_slot(name)
    with pytest.raises(InvalidArgument, match=r"'gpt-\*' must be a served model \(small\), not 'huge'"):
        ModelRegistry({"small": ServedModel(never)}, aliases=["gpt-*=huge"])


def test_the_variants_are_searched_once_for_the_slot_the_name_and_the_defaults_of_a_request() -> None:
    def never() -> Any:
        raise AssertionError

    class Variants:
        def __init__(self) -> None:
            self.searched: list[str] = []

        def find(self, name: str) -> ModelVariant | None:
            self.searched.append(name)
            defaults = RequestDefaults(max_tokens=5)
            return (
                ModelVariant(name="pirate", source="tiny", created=0, defaults=defaults) if name == "pirate" else None
            )

        def list_all(self) -> list[ModelVariant]:
            return []

    registry = ModelRegistry({"tiny": ServedModel(never)}, aliases=["gpt-*=tiny"])
    registry.variants = variants = Variants()
    for name, expected in {"pirate": ("pirate", 5), "gpt-4o": ("tiny", None), "other": ("tiny", None)}.items():
        requested = registry.get_requested_model(name)
        assert (requested.slot.name, requested.name, requested.defaults.max_tokens) == ("tiny", *expected)
    assert variants.searched == ["pirate", "gpt-4o", "other"]


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
        for path in ("/props", "/slots", "/lora-adapters"):
            assert server.http.get(path, params={"model": "claude-fable-9"}).status_code == 200, path
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
    registry = ModelRegistry({"tiny": ServedModel(lambda: load_tiny(models.get_path("attention")))})
    slot = registry.get_slot("tiny")
    with closing(registry):
        model = slot.load()
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        model.plan_chat("Hello")
        after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after == before


@pytest.mark.native
def test_a_model_with_an_invalid_chat_template_is_still_served() -> None:
    path = models.get_path("successor-attention")
    registry = ModelRegistry(
        {"tiny": ServedModel(lambda: load_tiny(path, chat_template="{{ raise_exception('no') }}"))}
    )
    slot = registry.get_slot("tiny")
    with closing(registry):
        assert slot.load().complete("abc", max_tokens=3).text == "def"


@pytest.mark.native
@pytest.mark.parametrize("step", ["get_engine_info", "prepare"])
def test_a_model_that_fails_while_it_starts_leaves_nothing_open(
    step: str, monkeypatch: pytest.MonkeyPatch, list_own_handles: Any
) -> None:
    module = remote_calls if step == "get_engine_info" else served_models
    monkeypatch.setattr(module, step, Raise(EngineError("the bug")))
    processes = psutil.Process().children(recursive=True)
    registry = ModelRegistry({"tiny": ServedModel(lambda: load_tiny(models.get_path("attention")))})
    slot = registry.get_slot("tiny")
    with closing(registry), pytest.raises(EngineError, match="the bug"):
        slot.load()
    assert set(psutil.Process().children(recursive=True)) <= set(processes)
    assert not list_own_handles()


@pytest.mark.native
def test_a_model_whose_engine_cannot_be_restarted_has_failed_and_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_models, "RETRY_AFTER_SECONDS", 0.0)
    path = Path(shutil.copy(models.get_path("successor-attention"), tmp_path / "model.gguf"))
    registry = ModelRegistry({"tiny": ServedModel(lambda: load_tiny(path))})
    slot = registry.get_slot("tiny")
    with closing(registry):
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

    @property
    def has_engine(self) -> bool:
        return self.is_active or self.needs_restart

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
    return ServerState(ModelRegistry({"fake": ServedModel(FakeModel)}), ServerSettings())


def test_requests_share_one_load_and_block_no_engine_call(slow_models: type[FakeModel]) -> None:
    async def run(state: ServerState) -> int:
        requests = [asyncio.ensure_future(state.get_model("fake")) for _ in range(2 * ENGINE_CALL_THREADS)]
        await asyncio.sleep(0)
        requests[0].cancel()  # a client that disconnects does not cancel the load for the others
        result = await asyncio.wait_for(state.run_engine_call("fake", lambda: 7), 30)
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
    assert wait_until(30, lambda: slow_models.loads)
    state.close()
    with pytest.raises(Closed):
        future.result(0)
    with pytest.raises(Closed):
        state.models.get_slot("fake").start_load()
    slow_models.allowed.set()
    assert slow_models.closed.wait(120)  # the model that was loaded too late


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
        assert wait_until(120, lambda: client.get("/health").status_code == 200)
    assert slow_models.loads == 2


# --- several models, one budget


class SwapModel:
    """A model without an engine. Its unload waits until a test allows it, and its load fails as often as it says."""

    can_generate = needs_restart = False

    def __init__(self, name: str = "model", errors: list[Exception] | None = None) -> None:
        self.name = name
        self.errors = errors or []
        self.has_engine = False
        self.can_leave = threading.Event()
        self.can_leave.set()
        self.activate()

    @property
    def is_active(self) -> bool:
        return self.has_engine

    def activate(self) -> None:
        if self.errors:
            raise self.errors.pop()
        self.has_engine = True

    def deactivate(self, store_timeout: float) -> StoreReport:
        self.can_leave.wait(60)
        self.has_engine = False
        return StoreReport(is_complete=True)

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        pass

    def close(self) -> None:
        self.has_engine = False
        self.can_leave.set()


def serve_fakes(limit: int = 100, **served: dict[str, Any]) -> ModelRegistry:
    """A registry of fake models that take 60 bytes each, with room for one."""
    return ModelRegistry(
        {
            name: ServedModel(functools.partial(SwapModel, name), **{"nbytes": {"ram": 60}, **fields})  # type: ignore[arg-type]
            for name, fields in served.items()
        },
        {"ram": limit},
    )


def get_states(registry: ModelRegistry) -> dict[str, str]:
    return {name: slot.state for name, slot in registry.slots.items()}


def test_a_load_unloads_the_model_that_is_in_the_way_and_keeps_it_warm() -> None:
    with serve_fakes(a={}, b={}) as registry:
        first = registry.get_slot("a").load()
        registry.get_slot("b").load()
        assert get_states(registry) == {"a": "warm", "b": "ready"}
        assert registry.get_slot("a").load() is first
        assert get_states(registry) == {"a": "ready", "b": "warm"}
        counters = registry.get_slot("a").counters
        assert (counters.loads, counters.unloads) == (2, 1)


def test_a_busy_model_is_unloaded_after_its_requests_and_new_ones_wait_for_their_turn() -> None:
    with serve_fakes(a={}, b={}) as registry:
        a, b = registry.get_slot("a"), registry.get_slot("b")
        a.acquire().result(30)
        waiting = b.acquire()
        assert wait_until(30, lambda: a.state == "unloading")
        late = a.acquire()  # comes after the request for b
        assert not waiting.done()
        a.release()
        waiting.result(30)
        assert b.is_loading is late.done() is False
        assert wait_until(30, lambda: b.state == "unloading")  # when its request has ended
        b.release()
        late.result(30)
        assert get_states(registry) == {"a": "ready", "b": "warm"}
        a.release()


def test_all_requests_that_wait_for_a_model_are_served_by_one_load() -> None:
    with serve_fakes(a={}, b={}) as registry:
        a, b = registry.get_slot("a"), registry.get_slot("b")
        a.acquire().result(30)
        waiting = [b.acquire() for _ in range(3)]
        cancelled = b.acquire()
        assert cancelled.cancel()  # a client that has gone is not counted
        a.release()
        for future in waiting:
            future.result(30)
        assert (b.active_requests, b.counters.loads) == (3, 1)


def test_a_client_that_leaves_while_its_load_fails_does_not_count_as_a_request() -> None:
    may_fail = threading.Event()

    def fail() -> Any:
        may_fail.wait(30)
        raise EngineError("it cannot be read")

    async def leave(slot: Any) -> None:
        request = asyncio.ensure_future(held_models.get_held_model(slot))
        await asyncio.sleep(0)
        may_fail.set()
        assert wait_until(30, lambda: not slot.is_loading)  # the event loop has not seen the error yet
        request.cancel()
        with suppress(asyncio.CancelledError):
            await request

    with closing(ModelRegistry({"a": ServedModel(fail)})) as registry:
        asyncio.run(leave(registry.get_slot("a")))
        assert registry.get_slot("a").active_requests == 0


def test_requests_that_wait_for_a_deleted_model_do_not_find_it() -> None:
    with serve_fakes(a={}) as registry, ThreadPoolExecutor(1) as pool:
        slot = registry.get_slot("a")
        slot.acquire().result(30)
        removal = pool.submit(registry.remove, slot)
        assert wait_until(30, lambda: slot.state == "unloading")
        waiting = slot.acquire()
        slot.release()
        with pytest.raises(ModelNotFound, match="it was deleted"):
            waiting.result(30)
        removal.result(30)
        with pytest.raises(ModelNotFound, match="it was deleted"):
            slot.acquire()


def test_a_reload_that_fails_leaves_the_model_as_it_was() -> None:
    def fail() -> Any:
        raise EngineError("it does not fit")

    too_long = ServedModel(fail, nbytes={"ram": 90})
    with serve_fakes(a={"with_context": lambda context: too_long}) as registry:
        slot = registry.get_slot("a")
        slot.load()
        with pytest.raises(EngineError, match="does not fit"):
            slot.start_reload(4096).result(30)
        assert slot.acquire().result(30).is_active
        assert slot.nbytes == {"ram": 60}
        slot.release()


def test_no_model_starves_if_two_that_do_not_fit_together_are_used_all_the_time() -> None:
    served: list[str] = []

    def use(slot: Any) -> None:
        for _ in range(10):
            slot.acquire().result(60)
            served.append(slot.name)
            slot.release()

    with serve_fakes(a={}, b={}) as registry:
        threads = [threading.Thread(target=use, args=[registry.get_slot(name)]) for name in "aabb"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert (served.count("a"), served.count("b")) == (20, 20)
        assert all(slot.active_requests == 0 for slot in registry.slots.values())
        assert sum(slot.has_room for slot in registry.slots.values()) == 1


def test_an_idle_model_is_unloaded_after_its_time_to_live() -> None:
    with serve_fakes(a={"keep_alive": 0.05}) as registry:
        slot = registry.get_slot("a")
        slot.acquire().result(30)
        assert slot.expires_at is None  # it is used
        slot.release()
        assert wait_until(30, lambda: slot.state == "warm")


def test_a_request_can_set_the_time_to_live_until_the_unload() -> None:
    with serve_fakes(a={}) as registry:
        slot = registry.get_slot("a")
        slot.acquire().result(30)
        slot.set_keep_alive(0)
        assert slot.state == "ready"
        slot.release()
        assert wait_until(30, lambda: slot.state == "warm")
        slot.load()
        assert slot.expires_at is None  # the setting again
        slot.set_keep_alive(None)
        assert slot.expires_at is None
        slot.set_keep_alive(300)
        assert slot.expires_at is not None


@pytest.mark.parametrize("seconds", [1e10, 1e300])
def test_models_expire_after_one_that_stays_for_longer_than_a_clock_can_count(seconds: float) -> None:
    with serve_fakes(a={}, b={}) as registry:
        slot = registry.get_slot("a")
        slot.load()
        slot.set_keep_alive(seconds)
        time.sleep(0.1)  # the timer waits for it
        slot.set_keep_alive(0.05)
        assert wait_until(30, lambda: slot.state == "warm")


def test_a_pinned_model_is_never_unloaded() -> None:
    with serve_fakes(a={"pinned": True, "keep_alive": 0.0}) as registry:
        slot = registry.get_slot("a")
        slot.load()
        with pytest.raises(APIError, match="pinned") as caught:
            slot.unload()
        assert (caught.value.status, caught.value.code, slot.state) == (409, "model_pinned", "ready")
    with pytest.raises(OutOfMemory, match="beside a, which are pinned"):
        serve_fakes(a={"pinned": True}, b={})


def test_the_unload_of_a_busy_model_is_refused_after_the_timeout_and_changes_nothing() -> None:
    with serve_fakes(a={}) as registry:
        slot = registry.get_slot("a")
        slot.acquire().result(30)
        waiting: list[Any] = []

        def ask_during_unload() -> None:
            assert wait_until(30, lambda: slot.state == "unloading")
            waiting.append(slot.acquire())

        thread = threading.Thread(target=ask_during_unload)
        thread.start()
        with pytest.raises(APIError, match="1 requests run") as caught:
            slot.unload(timeout=1.0)
        thread.join()
        assert (caught.value.status, caught.value.code) == (409, "model_busy")
        waiting[0].result(30)
        assert (slot.state, slot.active_requests, slot.counters.unloads) == ("ready", 2, 0)


def test_requests_during_an_unload_wait_for_the_next_load() -> None:
    with serve_fakes(a={}) as registry:
        slot = registry.get_slot("a")
        model: Any = slot.load()
        model.can_leave.clear()
        unload = slot.start_unload()
        waiting = slot.acquire()
        assert (slot.state, waiting.done()) == ("unloading", False)
        model.can_leave.set()
        assert waiting.result(30) is model
        assert unload.done()
        assert slot.counters.loads == 2


def test_a_load_without_memory_unloads_idle_models_and_is_repeated_once() -> None:
    registry = serve_fakes(1000, a={}, b={}, c={"pinned": True})
    with registry:
        for name in ("a", "b", "c"):
            registry.get_slot(name).load()
        registry.get_slot("b").unload()
        fake: Any = registry.get_slot("b").model
        fake.errors = [OutOfMemory(60, 10, "the driver took it")]
        registry.get_slot("b").load()
        assert get_states(registry) == {"a": "warm", "b": "ready", "c": "ready"}
        registry.get_slot("b").unload()
        fake.errors = [OutOfMemory(60, 10, "the driver took it")]
        with pytest.raises(OutOfMemory):  # nothing is left to unload
            registry.get_slot("b").load()


def test_a_request_holds_its_model_until_its_end_also_if_it_asks_twice() -> None:
    async def run(state: ServerState) -> None:
        slot = state.models.get_slot("a")
        with hold_models():
            model = await state.get_model("a")
            waiting = state.models.get_slot("b").acquire()
            assert await asyncio.to_thread(wait_until, 30, lambda: slot.state == "unloading")
            assert await asyncio.wait_for(state.get_model("a"), 30) is model  # it would wait for itself
            assert slot.active_requests == 1
        await asyncio.to_thread(waiting.result, 30)
        assert (slot.state, slot.active_requests) == ("warm", 0)

    with ServerState(serve_fakes(a={}, b={}), ServerSettings()) as state:
        asyncio.run(run(state))


def test_a_client_that_disconnects_while_its_model_loads_holds_nothing() -> None:
    async def run(state: ServerState) -> None:
        a, b = state.models.get_slot("a"), state.models.get_slot("b")
        await asyncio.to_thread(a.acquire().result, 30)
        with hold_models():
            request = asyncio.ensure_future(state.get_model("b"))
            assert await asyncio.to_thread(wait_until, 30, lambda: a.state == "unloading")
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        a.release()
        assert await asyncio.to_thread(wait_until, 30, lambda: b.state == "ready")
        assert b.active_requests == 0

    with ServerState(serve_fakes(a={}, b={}), ServerSettings()) as state:
        asyncio.run(run(state))


def test_closing_ends_requests_that_wait_for_room() -> None:
    registry = serve_fakes(a={}, b={})
    with registry:
        registry.get_slot("a").acquire().result(30)
        waiting = registry.get_slot("b").acquire()
    with pytest.raises(Closed):
        waiting.result(30)


def test_the_models_that_fit_are_loaded_at_startup() -> None:
    with serve_fakes(130, a={}, b={}, c={"pinned": True}) as registry:
        assert registry.load_first() == ["c", "a"]
        assert get_states(registry) == {"a": "ready", "b": "not loaded", "c": "ready"}


# --- several models on a real server

BUDGET_BYTES = 260 * 1024**2
SWAPPED = {"dense": "successor-attention", "hybrid": "successor-hybrid", "window": "successor-window"}


@pytest.fixture(scope="module")
def swap_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of three models with room for one."""
    cache = tmp_path_factory.mktemp("swap")
    arguments = [f"{name}={models.get_path(kind)}" for name, kind in SWAPPED.items()]
    options = ("--context", "1024", "--sequences", "2", "--memory-bytes", str(BUDGET_BYTES))
    environment = {"AFTERGLOW_CACHE": str(cache), "AFTERGLOW_DISK_CACHE": "on"}
    with run_server(*arguments, *options, **environment) as server:
        yield server


def get_cards(server: ServerProcess) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}


def count_engine_bytes(server: ServerProcess) -> int:
    total = 0
    for process in server.list_engines():
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


@pytest.mark.native
@pytest.mark.parametrize("turns", [6, pytest.param(30, marks=pytest.mark.full)])
def test_alternating_turns_of_models_that_do_not_fit_together_are_prefix_hits(
    swap_server: ServerProcess, turns: int
) -> None:
    conversations: dict[str, list[dict[str, str]]] = {name: [] for name in SWAPPED}
    known_tokens = dict.fromkeys(SWAPPED, 0)
    text = f"in test of {turns} turns " * 8
    for turn in range(turns):
        name = list(SWAPPED)[turn % len(SWAPPED)]
        messages = conversations[name]
        messages.append({"role": "user", "content": f"{text} {turn}"})
        answer = swap_server.chat(model=name, messages=messages, max_tokens=6)
        assert answer["status"] == 200
        usage = answer["usage"]
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        new_tokens = usage["prompt_tokens"] - known_tokens[name]
        assert computed <= new_tokens + 1, (turn, name, usage)
        known_tokens[name] = usage["total_tokens"]
        messages.append({"role": "assistant", "content": get_text(answer)})
        text = "abc"
        assert count_engine_bytes(swap_server) <= BUDGET_BYTES * 1.05
        states = {name: card["state"] for name, card in get_cards(swap_server).items()}
        assert (states[name], list(states.values()).count("ready")) == ("ready", 1)
    assert swap_server.get_metric('afterglow_model_swaps{kind="unload",model="dense"}') >= turns // 3 - 1


@pytest.mark.native
def test_concurrent_requests_for_models_that_do_not_fit_together_are_all_served(swap_server: ServerProcess) -> None:
    def ask(number: int) -> int:
        return int(swap_server.chat(f"number {number}", model=list(SWAPPED)[number % 2], max_tokens=4)["status"])

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {200}
    assert all(card["active_requests"] == 0 for card in get_cards(swap_server).values())


@pytest.mark.native
def test_a_client_can_load_and_unload_a_model(swap_server: ServerProcess) -> None:
    card = swap_server.post("/models/load", {"model": "dense", "keep_alive": "5m"}).json()
    assert (card["state"], card["loaded"], card["pinned"]) == ("ready", True, False)
    assert 0 < card["bytes"]["ram"] <= BUDGET_BYTES
    assert card["expires_at"] - card["last_used"] == pytest.approx(300, abs=1)
    assert swap_server.get_metric('afterglow_model_bytes{device="ram",model="dense"}') == card["bytes"]["ram"]
    card = swap_server.post("/models/unload", {"model": "dense"}).json()
    assert (card["state"], card["loaded"], card["bytes"]) == ("warm", False, {})
    assert swap_server.http.get("/health").json()["models"]["dense"] == "warm"
    assert swap_server.list_engines() == []
    card = swap_server.post("/models/unload", {"model": "dense"}).json()  # nothing to do
    assert card["state"] == "warm"


@pytest.mark.native
def test_loads_of_unknown_models_and_wrong_times_to_live_are_refused(swap_server: ServerProcess) -> None:
    response = swap_server.post("/models/load", {"model": "other"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    response = swap_server.post("/models/load", {"model": "dense", "keep_alive": "soon"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "keep_alive")


@pytest.mark.native
@pytest.mark.parametrize("cycles", [4, pytest.param(50, marks=pytest.mark.full)])
def test_load_and_unload_cycles_leak_no_memory(swap_server: ServerProcess, cycles: int) -> None:
    server = psutil.Process(swap_server.process.pid)

    def run_cycle() -> None:
        swap_server.post("/models/load", {"model": "dense"})
        assert swap_server.chat(model="dense", max_tokens=2)["status"] == 200
        assert swap_server.post("/models/unload", {"model": "dense"}).status_code == 200

    for _ in range(2):
        run_cycle()
    before, descriptors = server.memory_info().rss, server.num_fds()
    for _ in range(cycles):
        run_cycle()
    assert server.memory_info().rss <= before * 1.02
    assert server.num_fds() <= descriptors
    assert swap_server.list_engines() == []


@pytest.mark.native
def test_a_budget_smaller_than_one_model_is_refused_at_startup_with_the_numbers(tmp_path: Path) -> None:
    command = [*COMMAND, f"tiny={models.get_path('attention')}", "--memory-bytes", "50MiB", "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode != 0
    assert re.search(r"needs \d+ MiB, 50 MiB are free", result.stderr)
    assert re.search(r"Raise `memory_bytes` to at least \d+ MiB", result.stderr)


@pytest.mark.native
def test_a_kill_of_the_engine_during_its_unload_loses_only_what_was_not_stored(tmp_path: Path) -> None:
    path = models.get_path("successor-attention")
    settings = EngineSettings(disk_cache_directory=tmp_path)
    registry = ModelRegistry(
        {"tiny": ServedModel(lambda: afterglow.load(path, host="process", context=256, threads=1, engine=settings))}
    )
    with closing(registry):
        slot = registry.get_slot("tiny")
        model = slot.load()
        pid = model._lifecycle.get_host().pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        unload = slot.start_unload()
        waiting = slot.acquire()
        assert slot.state == "unloading"
        os.kill(pid, signal.SIGKILL)
        unload.result(60)
        assert waiting.result(60).complete("abc", max_tokens=3).text == "def"
        assert slot.state == "ready"
        assert model.restarts <= 1  # the kill may come before the unload reaches the engine
