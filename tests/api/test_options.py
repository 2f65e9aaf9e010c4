"""`LoadOptions`: every option reaches llama.cpp, from `load`, from served models and from the flags of the commands."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import afterglow
from afterglow.api import load as load_module
from afterglow.api.options import LoadOptions
from afterglow.api.served_model import ServedSettings
from afterglow.cli.main import app
from afterglow.cli.options import LOAD_OPTIONS, MODEL_OPTIONS
from afterglow.cli.serve import build_served_settings
from afterglow.cli.settings import Settings, load_command_settings
from afterglow.errors import InvalidArgument, UnsupportedOption
from afterglow.llama import model as llama_model
from afterglow.llama.library.loader import get_library
from afterglow.testing import models

TEXT = "the rain in spain and the thin heron on the river " * 4
# Option: its value, and the field of llama.cpp's parameters with the value it must have.
MODEL_FIELDS: dict[str, tuple[Any, str, Any]] = {
    "gpu_layers": (7, "n_gpu_layers", 7),
    "split_mode": ("row", "split_mode", 2),
    "tensor_split": ((3.0, 1.0), "tensor_split", [3.0, 1.0]),
    "main_gpu": (1, "main_gpu", 1),
    "mmap": (False, "load_mode", 0),
    "mlock": (True, "load_mode", 3),
}
CONTEXT_FIELDS: dict[str, tuple[Any, str, Any]] = {
    "context": (512, "n_ctx", 2048),
    "sequences": (3, "n_seq_max", 3),
    "threads": (2, "n_threads", 2),
    "batch": (300, "n_batch", 300),
    "ubatch": (200, "n_ubatch", 200),
    "cache_type_k": ("q8_0", "type_k", 8),
    "cache_type_v": ("bf16", "type_v", 30),
    "flash_attention": (False, "flash_attn_type", 0),
    "kv_unified": (True, "kv_unified", True),
    "swa_full": (True, "swa_full", True),
    "rope_scaling": ("yarn", "rope_scaling_type", 2),
    "rope_freq_base": (5000.0, "rope_freq_base", 5000.0),
    "rope_freq_scale": (0.5, "rope_freq_scale", 0.5),
    "yarn_orig_ctx": (64, "yarn_orig_ctx", 64),
    "yarn_ext_factor": (0.5, "yarn_ext_factor", 0.5),
    "yarn_attn_factor": (2.0, "yarn_attn_factor", 2.0),
    "yarn_beta_fast": (16.0, "yarn_beta_fast", 16.0),
    "yarn_beta_slow": (4.0, "yarn_beta_slow", 4.0),
}
VALUES = {name: value for name, (value, _, _) in (MODEL_FIELDS | CONTEXT_FIELDS).items()}
COMMANDS = {"chat": ["small"], "run": ["--model", "small", "Why?"], "serve": ["small"]}


def test_every_option_is_in_a_table() -> None:
    fields = {field.name for field in dataclasses.fields(LoadOptions)}
    assert fields == VALUES.keys() == LOAD_OPTIONS.keys()
    assert fields <= Settings.model_fields.keys()
    assert MODEL_OPTIONS.keys() <= Settings.model_fields.keys()
    assert all(value != getattr(LoadOptions(), name) for name, value in VALUES.items())


@pytest.mark.native
@pytest.mark.parametrize("name", CONTEXT_FIELDS)
def test_every_context_option_is_a_parameter_of_llama_cpp(name: str) -> None:
    value, field, expected = CONTEXT_FIELDS[name]
    needed = {"yarn_ext_factor": 0.0} if name == "yarn_attn_factor" else {}
    parameters = LoadOptions(**{name: value}, **needed).build_context_settings().build_parameters()
    assert getattr(parameters, field) == expected
    assert getattr(LoadOptions(threads=1).build_context_settings().build_parameters(), field) != expected


@pytest.mark.native
@pytest.mark.parametrize("name", MODEL_FIELDS)
def test_every_option_of_the_weights_is_a_parameter_of_llama_cpp(name: str) -> None:
    value, field, expected = MODEL_FIELDS[name]
    if name == "tensor_split":
        if get_library().symbols.llama_max_devices() < len(value):
            with pytest.raises(InvalidArgument, match="tensor_split"):
                llama_model._build_parameters(LoadOptions(tensor_split=value).build_model_settings())
            return
        parameters, shares = llama_model._build_parameters(LoadOptions(tensor_split=value).build_model_settings())
        assert list(parameters.tensor_split[0:2]) == list(shares[0:2]) == expected
        return
    parameters, _ = llama_model._build_parameters(LoadOptions(**{name: value}).build_model_settings())
    assert getattr(parameters, field) == expected
    parameters, _ = llama_model._build_parameters(LoadOptions().build_model_settings())
    assert getattr(parameters, field) != expected


@pytest.mark.native
@pytest.mark.parametrize("name", VALUES)
def test_load_and_served_models_pass_every_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    passed: list[LoadOptions] = []

    def build_engine_spec(path: Path, options: LoadOptions, *_: Any, **__: Any) -> None:
        passed.append(options)
        raise Stop

    path = models.get_path("attention")
    monkeypatch.setattr(load_module, "build_engine_spec", build_engine_spec)
    with pytest.raises(Stop):
        afterglow.load(path, **{name: VALUES[name]})
    assert passed == [LoadOptions(**{name: VALUES[name]})]
    monkeypatch.undo()
    needed = {"yarn_ext_factor": 0.0} if name == "yarn_attn_factor" else {}
    default = ServedSettings(threads=1, **needed).build_spec(path)
    spec = ServedSettings(**{"threads": 1, name: VALUES[name]}, **needed).build_spec(path)
    assert (spec.model_settings, spec.context_settings) != (default.model_settings, default.context_settings)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_have_the_same_flags_for_the_model(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_SETTINGS", "/dev/null")
    arguments = []
    for name, value in VALUES.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True or value is False:
            arguments.append(flag if value else f"--no-{name.replace('_', '-')}")
        else:
            arguments += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    context = (
        get_command(app)
        .commands[command]
        .make_context(  # type: ignore[attr-defined]
            command, [*arguments, "--draft", "mtp", "--speculation", "3", *COMMANDS[command]]
        )
    )
    assert MODEL_OPTIONS.keys() <= context.params.keys()
    settings = load_command_settings(context)
    assert settings.load_options == VALUES
    assert (settings.draft, settings.speculation) == ("mtp", 3)
    served = build_served_settings(settings)
    assert {name: getattr(served, name) for name in VALUES} == VALUES


def test_the_environment_sets_shares_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_SETTINGS", "/dev/null")
    monkeypatch.setenv("AFTERGLOW_TENSOR_SPLIT", "3,1")
    context = get_command(app).commands["chat"].make_context("chat", [])  # type: ignore[attr-defined]
    assert load_command_settings(context).tensor_split == (3.0, 1.0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ubatch": 1024, "batch": 512}, "ubatch.*at most.*512"),
        ({"rope_scaling": "ntk"}, "rope_scaling.*yarn"),
        ({"yarn_beta_fast": -1.0}, "yarn_beta_fast"),
        ({"yarn_attn_factor": 2.0, "rope_scaling": "yarn"}, "yarn_attn_factor.*yarn_ext_factor=0"),
        ({"sequences": 0}, "sequences"),
        ({"batch": 2, "sequences": 4}, "batch"),
        ({"cache_type_v": "q8_0", "flash_attention": False}, "cache_type_v"),
    ],
)
def test_an_invalid_option_is_an_error_that_names_it(options: dict[str, Any], match: str) -> None:
    with pytest.raises((InvalidArgument, UnsupportedOption), match=match):
        LoadOptions(**options).build_context_settings()


# --- effects


def compute_logprobs(**options: Any) -> tuple[float, ...]:
    with afterglow.load(models.get_path("attention"), context=512, sequences=1, threads=1, **options) as model:
        return model.logprobs(TEXT).logprobs


@pytest.mark.native
@pytest.mark.parametrize("name", [name for name in CONTEXT_FIELDS if name.startswith(("rope", "yarn"))])
def test_rope_and_yarn_options_change_the_logits(name: str) -> None:
    base = {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 8192}
    # Far from the defaults: with few dimensions, small differences of the correction limits are rounded away.
    values = VALUES | {"rope_scaling": "linear", "yarn_beta_fast": 500.0, "yarn_beta_slow": 50.0}
    if name == "yarn_attn_factor":
        base |= {"yarn_ext_factor": 0.0}
    assert compute_logprobs(**base) != compute_logprobs(**base | {name: values[name]})


@pytest.mark.native
def test_states_of_different_rope_options_are_not_mixed() -> None:
    keys = set()
    for options in ({}, {"rope_scaling": "yarn"}, {"yarn_orig_ctx": 64}, {"yarn_beta_fast": 2.0}):
        with afterglow.load(models.get_path("attention"), context=256, sequences=1, threads=1, **options) as model:
            keys.add(model._lifecycle.context.state.key)
    assert len(keys) == 4


@pytest.mark.native
def test_batch_sizes_and_the_full_window_are_those_of_the_context() -> None:
    options = {"context": 1024, "sequences": 1, "threads": 1}
    with afterglow.load(models.get_path("window"), batch=300, ubatch=100, swa_full=True, **options) as model:
        context = model._lifecycle.context
        assert (context.batch.capacity, context.ubatch) == (300, 100)
        model.complete([1 + n % 200 for n in range(900)], max_tokens=1)
        assert context.memory.get_position_range(0) == (0, 899)
    with afterglow.load(models.get_path("window"), **options) as model:
        model.complete([1 + n % 200 for n in range(900)], max_tokens=1)
        assert model._lifecycle.context.memory.get_position_range(0)[0] > 0
    with afterglow.load(models.get_path("attention"), ubatch=600, **options) as model:
        assert (model._lifecycle.context.batch.capacity, model._lifecycle.context.ubatch) == (600, 600)
