"""Decisions of the budget: they never exceed it, never unload pinned models, and unload no more than they must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.errors import OutOfMemory
from afterglow.server.model_budget import (
    RAM,
    ResidentModel,
    check_fits,
    choose_first_models,
    fits,
    plan_room,
)

HOUR = 3600.0
GPU = "CUDA0"


def resident(name: str, nbytes: int = 60, **fields: object) -> ResidentModel:
    return ResidentModel(name=name, nbytes={RAM: nbytes}, **fields)  # type: ignore[arg-type]


def test_a_model_that_fits_unloads_nothing() -> None:
    plan = plan_room("new", {RAM: 40}, [resident("old")], {RAM: 100})
    assert (plan.can_load, plan.unload, plan.drain) == (True, (), ())


def test_the_least_recently_used_of_equal_models_is_unloaded() -> None:
    models = [resident("b", last_used=2 * HOUR), resident("a", last_used=HOUR)]
    assert plan_room("new", {RAM: 60}, models, {RAM: 130}).unload == ("a",)


def test_a_model_that_is_cheap_to_restore_is_unloaded_before_an_older_one() -> None:
    slow = resident("slow", last_used=0.0, restore_seconds=40.0)
    quick = resident("quick", last_used=HOUR, restore_seconds=1.0)
    assert plan_room("new", {RAM: 60}, [slow, quick], {RAM: 130}).unload == ("quick",)
    large = resident("large", 600, last_used=HOUR, restore_seconds=40.0)  # fewer seconds per byte
    assert plan_room("new", {RAM: 60}, [slow, large], {RAM: 700}).unload == ("large",)


def test_models_that_need_not_leave_stay() -> None:
    models = [resident("small", 10, last_used=0.0), resident("large", 90, last_used=HOUR, restore_seconds=5.0)]
    assert plan_room("new", {RAM: 90}, models, {RAM: 100}).unload == ("large",)


def test_busy_models_are_drained_only_if_idle_ones_do_not_suffice() -> None:
    models = [resident("busy", is_busy=True, last_used=0.0), resident("idle", last_used=HOUR)]
    plan = plan_room("new", {RAM: 60}, models, {RAM: 130})
    assert (plan.unload, plan.drain) == (("idle",), ())
    plan = plan_room("new", {RAM: 120}, models, {RAM: 130})
    assert (plan.unload, plan.drain) == (("idle",), ("busy",))


def test_a_model_that_leaves_already_is_waited_for() -> None:
    models = [resident("leaving", is_leaving=True), resident("idle")]
    plan = plan_room("new", {RAM: 60}, models, {RAM: 130})
    assert (plan.can_load, plan.unload, plan.drain) == (False, (), ())


def test_each_device_has_its_own_limit() -> None:
    on_gpu = ResidentModel(name="on gpu", nbytes={RAM: 10, GPU: 80})
    in_ram = ResidentModel(name="in ram", nbytes={RAM: 80})
    plan = plan_room("new", {RAM: 5, GPU: 50}, [in_ram, on_gpu], {RAM: 100, GPU: 100})
    assert plan.unload == ("on gpu",)


def test_a_model_that_cannot_fit_is_refused_with_the_numbers() -> None:
    mib = 1024**2
    with pytest.raises(OutOfMemory) as caught:
        plan_room("new", {RAM: 300 * mib}, [resident("base", 150 * mib, pinned=True)], {RAM: 400 * mib})
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (300 * mib, 250 * mib)
    assert "beside base, which are pinned" in str(caught.value)
    assert "Raise `memory_bytes` to at least 450 MiB" in str(caught.value)


def test_the_first_models_are_the_pinned_ones_and_those_that_fit() -> None:
    models = {"a": {RAM: 50}, "b": {RAM: 60}, "c": {RAM: 40}}
    assert choose_first_models(models, [], {RAM: 100}) == ["a", "c"]
    assert choose_first_models(models, ["b"], {RAM: 100}) == ["b", "c"]
    assert choose_first_models(models, [], {}) == ["a", "b", "c"]


names = st.sampled_from("abcdefgh")
sizes = st.fixed_dictionaries({RAM: st.integers(0, 50)}, optional={GPU: st.integers(0, 50)})
residents = st.lists(
    st.builds(
        ResidentModel,
        name=names,
        nbytes=sizes,
        last_used=st.floats(0, 10 * HOUR),
        restore_seconds=st.floats(0, 100),
        pinned=st.booleans(),
        is_busy=st.booleans(),
        is_leaving=st.booleans(),
    ),
    unique_by=lambda model: model.name,
    max_size=8,
)


@given(needed=sizes, models=residents, limit=st.integers(1, 120))
def test_a_plan_never_exceeds_the_budget_and_spares_pinned_and_busy_models(
    needed: dict[str, int], models: list[ResidentModel], limit: int
) -> None:
    limits = {RAM: limit, GPU: limit}
    try:
        plan = plan_room("new", needed, models, limits)
    except OutOfMemory:
        with pytest.raises(OutOfMemory):
            check_fits("new", needed, [model for model in models if model.pinned], limits)
        return
    by_name = {model.name: model for model in models}
    leaving = {*plan.unload, *plan.drain}
    assert plan == plan_room("new", needed, models[::-1], limits)
    assert plan.can_load == fits(needed, models, limits)
    assert not any(by_name[name].pinned or by_name[name].is_leaving for name in leaving)
    assert not any(by_name[name].is_busy for name in plan.unload)
    stay = [model for model in models if model.name not in leaving and not model.is_leaving]
    assert plan.can_load or fits(needed, stay, limits)
    for name in leaving:  # each of them is necessary
        assert not fits(needed, [*stay, by_name[name]], limits)
