"""C12: COLD → WARM → ACTIVE and back; a failed transition leaves the previous state usable."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import psutil
import pytest

from afterglow.engine.host.build import EngineSpec
from afterglow.engine.host.lifecycle import Lifecycle, LoadState, ProcessLifecycle, ThreadLifecycle
from afterglow.engine.types.request import Request
from afterglow.errors import Cancelled, Closed, EngineCrashed, InvalidModel, LoadVetoed, OutOfMemory, WrongState
from afterglow.llama.gguf import probe
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.media_prompts import noise_image

pytestmark = pytest.mark.native
SMALL = ContextSettings(cells=256, batch=64, threads=1)


HOSTS = {"thread": ThreadLifecycle, "process": ProcessLifecycle}


@pytest.fixture(params=HOSTS)
def host(request) -> str:
    return request.param


def build_lifecycle(
    host: str = "thread", path: Path | None = None, context: ContextSettings = SMALL, hooks=(), **options
) -> Lifecycle:
    spec = EngineSpec(path=path or models.get_path("attention"), context_settings=context, **options)
    return HOSTS[host](spec, hooks)


def test_c12_the_load_states_go_up_and_down(host, list_own_handles):
    with build_lifecycle(host) as model:
        assert model.state is LoadState.COLD
        model.warm()
        assert model.state is LoadState.WARM
        weights = model.model
        model.activate()
        assert model.state is LoadState.ACTIVE
        assert model.model is weights  # without a GPU the weights are not loaded twice
        assert model.info.cells == 256
        assert list(model.get_host().submit(Request(id="a", entries=[1, 2, 3], max_tokens=2)))[-1].usage
        model.deactivate()
        assert model.state is LoadState.WARM
        assert model.model is weights
        model.unload()
        assert model.state is LoadState.COLD
        model.activate()  # from COLD, in one call
        assert model.state is LoadState.ACTIVE
    assert not list_own_handles()


def test_c12_calls_in_the_wrong_state_are_typed_errors(host):
    with build_lifecycle(host) as model:
        for call in (model.deactivate, model.unload):
            with pytest.raises(WrongState, match="cold"):
                call()
        with pytest.raises(WrongState, match="needs the model to be warm"):
            assert model.model
        model.warm()
        with pytest.raises(WrongState, match="needs the model to be active"):
            model.get_host()
        with pytest.raises(WrongState):
            model.warm()
        model.activate()
        with pytest.raises(WrongState):
            model.activate()


def test_c12_a_closed_lifecycle_raises_closed(host):
    model = build_lifecycle(host)
    model.activate()
    model.close()
    model.close()
    for call in (model.warm, model.activate, model.unload, lambda: model.model, model.get_host):
        with pytest.raises(Closed):
            call()


def test_c12_a_hook_gets_the_target_state_and_can_reject_the_load(host, list_own_handles):
    targets: list[LoadState] = []

    def hook(path: Path, state: LoadState) -> str | None:
        targets.append(state)
        return "not on Sundays" if state is LoadState.ACTIVE else None

    with build_lifecycle(host, hooks=[hook]) as model:
        with pytest.raises(LoadVetoed, match="not on Sundays"):
            model.activate()
        assert model.state is LoadState.COLD
        assert not list_own_handles()
        model.warm()
        assert targets == [LoadState.ACTIVE, LoadState.WARM]


def test_c12_a_failed_activation_leaves_the_warm_model_usable(host):
    with build_lifecycle(host, context=ContextSettings(cells=2**31 - 1000)) as model:
        model.warm()
        with pytest.raises(OutOfMemory):
            model.activate()
        assert model.state is LoadState.WARM
        assert model.model.vocabulary.tokenize("still here")


def test_c12_a_failed_load_leaves_the_model_cold_and_no_handle_open(host, tmp_path, list_own_handles):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(models.get_path("attention").read_bytes()[:5000])
    with build_lifecycle(host, broken) as model:
        with pytest.raises(InvalidModel):
            model.activate()
        assert model.state is LoadState.COLD
        assert not list_own_handles()


def test_c12_progress_is_reported_and_can_cancel():
    fractions: list[float] = []
    with build_lifecycle() as model:
        model.warm(progress=fractions.append)
        assert fractions[-1] == 1.0
        assert fractions == sorted(fractions)
        model.unload()
        with pytest.raises(Cancelled):
            model.warm(progress=lambda fraction: False)
        assert model.state is LoadState.COLD

        def explode(fraction: float) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            model.warm(progress=explode)
        model.warm()


def test_c12_a_load_in_a_child_process_reports_progress_and_can_be_cancelled(list_own_handles):
    fractions: list[float] = []
    with build_lifecycle("process") as model:
        model.activate(progress=fractions.append)
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)
        assert fractions == sorted(fractions)
        model.unload()
        with pytest.raises(Cancelled, match="progress callback"):
            model.activate(progress=lambda fraction: False)
        assert model.state is LoadState.COLD
        assert not list_own_handles()
        model.activate()
        assert model.state is LoadState.ACTIVE


def test_c12_the_state_is_readable_during_a_transition():
    entered, release = threading.Event(), threading.Event()

    def hook(path: Path, state: LoadState) -> None:
        entered.set()
        release.wait(60)

    with build_lifecycle(hooks=[hook]) as model:
        worker = threading.Thread(target=model.warm)
        worker.start()
        assert entered.wait(60)
        assert model.state is LoadState.COLD  # does not block, although the lock is held
        release.set()
        worker.join()
        assert model.state is LoadState.WARM


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("projector", [pytest.param(None, marks=pytest.mark.full), "projector-llava"])
def test_c12_fifty_cycles_leak_nothing(projector, list_own_handles):
    process = psutil.Process()
    sizes = []
    for _ in range(50):
        with build_lifecycle(projector_path=projector and models.get_path(projector)) as model:
            model.warm()
            model.activate()
            assert bool(model.info.media) == (projector is not None)
            if projector is not None:
                model.get_host().call(lambda engine: engine.backend.projector.encode([noise_image(1)]))
            model.deactivate()
            model.unload()
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert not list_own_handles()
    assert sizes[49] - sizes[9] < 5 * 2**20


# --- new files


def test_the_first_load_in_a_process_is_the_trial_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "_try_in_child", lambda *_: pytest.fail("a second process tried the file"))
    path = tmp_path / "new.gguf"
    path.write_bytes(models.get_path("attention").read_bytes())
    assert not probe.is_proven(path)
    with build_lifecycle("process", path) as lifecycle:
        lifecycle.activate()
        assert lifecycle.state is LoadState.ACTIVE
    assert probe.is_proven(path)


def test_a_file_that_crashes_its_engine_is_an_invalid_model_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    path = tmp_path / "new.gguf"
    path.write_bytes(models.get_path("attention").read_bytes())

    def crash(*_: object, **__: object) -> None:
        raise EngineCrashed("process exited (SIGABRT)")

    def explain(*_: object) -> None:
        raise InvalidModel(str(path), "a trial load crashed with SIGABRT: GGML_ASSERT")

    monkeypatch.setattr("afterglow.engine.host.lifecycle.EngineProcess", crash)
    monkeypatch.setattr(probe, "_try_in_child", explain)
    with build_lifecycle("process", path) as lifecycle:
        with pytest.raises(InvalidModel, match="GGML_ASSERT"):
            lifecycle.activate()
        assert lifecycle.state is LoadState.COLD
    assert not probe.is_proven(path)
