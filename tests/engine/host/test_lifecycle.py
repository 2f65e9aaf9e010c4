"""C12: COLD → WARM → ACTIVE and back; a failed transition leaves the previous state usable."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import psutil
import pytest

from afterglow.engine.host.lifecycle import Lifecycle, LoadState
from afterglow.errors import Cancelled, Closed, InvalidModel, LoadVetoed, OutOfMemory, WrongState
from afterglow.llama.handle import list_open_handles
from afterglow.llama.model import ModelSettings
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.media_prompts import noisy

SMALL = ContextSettings(cells=256, batch=64, threads=1)


def lifecycle(path: Path | None = None, context: ContextSettings = SMALL, **options) -> Lifecycle:
    return Lifecycle(path or models.get_path("attention"), ModelSettings(), context, **options)


def test_c12_the_way_up_and_down():
    with lifecycle() as model:
        assert model.state is LoadState.COLD
        model.warm()
        assert model.state is LoadState.WARM
        weights = model.model
        model.activate()
        assert model.state is LoadState.ACTIVE
        assert model.model is weights  # nothing moves to a GPU, so nothing is loaded twice
        assert model.context.cells == 256
        model.deactivate()
        assert model.state is LoadState.WARM
        assert model.model is weights
        model.unload()
        assert model.state is LoadState.COLD
        model.activate()  # load and activate in one call
        assert model.state is LoadState.ACTIVE
    assert not list_open_handles()


def test_c12_calls_in_the_wrong_state_are_typed_errors():
    with lifecycle() as model:
        for call in (model.deactivate, model.unload):
            with pytest.raises(WrongState, match="cold"):
                call()
        with pytest.raises(WrongState, match="needs the model to be warm"):
            assert model.model
        model.warm()
        with pytest.raises(WrongState, match="needs the model to be active"):
            assert model.context
        with pytest.raises(WrongState):
            model.warm()
        model.activate()
        with pytest.raises(WrongState):
            model.activate()


def test_c12_after_close_everything_says_closed():
    model = lifecycle()
    model.activate()
    model.close()
    model.close()
    for call in (model.warm, model.activate, model.unload, lambda: model.model, lambda: model.context):
        with pytest.raises(Closed):
            call()


def test_c12_a_hook_may_veto_a_load_and_learns_what_it_is_for():
    asked: list[LoadState] = []

    def hook(path: Path, stage: LoadState) -> str | None:
        asked.append(stage)
        return "not on Sundays" if stage is LoadState.ACTIVE else None

    with lifecycle(hooks=[hook]) as model:
        with pytest.raises(LoadVetoed, match="not on Sundays"):
            model.activate()
        assert model.state is LoadState.COLD
        assert not list_open_handles()
        model.warm()
        assert asked == [LoadState.ACTIVE, LoadState.WARM]


def test_c12_a_failed_activation_leaves_the_warm_model_usable():
    with lifecycle(context=ContextSettings(cells=2**31 - 1000)) as model:
        model.warm()
        with pytest.raises(OutOfMemory):
            model.activate()
        assert model.state is LoadState.WARM
        assert model.model.vocabulary.tokenize("still here")


def test_c12_a_failed_load_leaves_it_cold_and_nothing_open(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(models.get_path("attention").read_bytes()[:5000])
    with lifecycle(broken) as model:
        with pytest.raises(InvalidModel):
            model.activate()
        assert model.state is LoadState.COLD
        assert not list_open_handles()


def test_c12_progress_is_reported_and_can_cancel():
    seen: list[float] = []
    with lifecycle() as model:
        model.warm(progress=seen.append)
        assert seen[-1] == 1.0
        assert seen == sorted(seen)
        model.unload()
        with pytest.raises(Cancelled):
            model.warm(progress=lambda fraction: False)
        assert model.state is LoadState.COLD

        def explode(fraction: float) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            model.warm(progress=explode)
        model.warm()


def test_c12_the_state_is_readable_while_a_transition_runs():
    entered, release = threading.Event(), threading.Event()

    def hook(path: Path, stage: LoadState) -> None:
        entered.set()
        release.wait(10)

    with lifecycle(hooks=[hook]) as model:
        worker = threading.Thread(target=model.warm)
        worker.start()
        assert entered.wait(10)
        assert model.state is LoadState.COLD  # answers at once, though the lock is held
        release.set()
        worker.join()
        assert model.state is LoadState.WARM


@pytest.mark.parametrize("projector", [None, "projector-llava"])
def test_c12_fifty_cycles_leak_nothing(projector):
    process = psutil.Process()
    sizes = []
    for _ in range(50):
        with lifecycle(projector=projector and models.get_path(projector)) as model:
            model.warm()
            assert model.projector is None
            model.activate()
            assert (model.projector is not None) == (projector is not None)
            if model.projector is not None:
                model.projector.encode([noisy(1)])
            model.deactivate()
            assert model.projector is None
            model.unload()
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert not list_open_handles()
    assert sizes[49] - sizes[9] < 5 * 2**20
