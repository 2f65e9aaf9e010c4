"""C19: the options of `load` reach llama.cpp. Mutants that drop an option show that the checks see what they check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import afterglow
from afterglow.errors import InvalidArgument
from afterglow.llama import model as model_module
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.hosts import wait_until
from support.load_options import CONTEXT_FIELDS, MODEL_FIELDS, OPTION_CHECKS, check_option

pytestmark = pytest.mark.native


def drop_in_load(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a mutant: `load` ignores the option."""
    load, defaults = afterglow.load, {"context": 256, "sequences": 1, "threads": 1, "gpu_layers": 0}
    default = {option: defaults[option]} if option in defaults else {}

    def mutant(model: Any, **options: Any) -> Any:
        return load(model, **{name: value for name, value in options.items() if name != option} | default)

    monkeypatch.setattr(afterglow, "load", mutant)


def drop_in_binding(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a mutant: the parameters that llama.cpp gets have the default of the option."""

    def reset(parameters: Any, fields: dict[str, Any]) -> None:
        for field, value in fields.items():
            setattr(parameters, field, value)

    if option in CONTEXT_FIELDS:
        build_context = ContextSettings.build_parameters

        def build_mutated_context(self: ContextSettings) -> Any:
            parameters = build_context(self)
            reset(parameters, CONTEXT_FIELDS[option])
            return parameters

        monkeypatch.setattr(ContextSettings, "build_parameters", build_mutated_context)
    else:
        build_model = model_module._build_parameters

        def build_mutated_model(*arguments: Any) -> Any:
            parameters, kept = build_model(*arguments)
            reset(parameters, MODEL_FIELDS[option])
            return parameters, kept

        monkeypatch.setattr(model_module, "_build_parameters", build_mutated_model)


@pytest.mark.parametrize("option", OPTION_CHECKS)
def test_c19_an_option_of_load_reaches_llama_cpp(option: str) -> None:
    check_option(option)


@pytest.mark.parametrize("plant", [drop_in_load, drop_in_binding])
@pytest.mark.parametrize("option", OPTION_CHECKS)
def test_c19_a_dropped_option_is_noticed(
    option: str, plant: Callable[[str, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(option, monkeypatch)
    with pytest.raises(AssertionError, match="nothing shows"):
        check_option(option)


def test_the_store_of_load_is_a_tier_of_the_engine(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    with afterglow.load(
        models.get_path("attention"),
        context=512,
        threads=1,
        shared_cache=str(tmp_path / "s"),
        shared_cache_key_file=key,
    ) as model:
        model.complete([5] * 200, max_tokens=1)
        assert wait_until(lambda: model.get_stats().tiers["shared"].counters.saves > 0)
    assert all(b"afterglow" not in path.read_bytes() for path in (tmp_path / "s").rglob("*.*"))
    key.write_text("ab")
    with pytest.raises(InvalidArgument, match="64 hexadecimal digits"):
        afterglow.load(models.get_path("attention"), shared_cache=str(tmp_path / "s"), shared_cache_key_file=key)
    with pytest.raises(InvalidArgument, match="s3://bucket/path"):
        afterglow.load(models.get_path("attention"), shared_cache="bucket")
    with pytest.raises(InvalidArgument, match='use host="process"'):
        afterglow.load(models.get_path("attention"), replicas=2)
