"""Options: each is declared once, and reaches llama.cpp from `load`, from served models and from the commands."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import afterglow
from afterglow.api import load as load_module
from afterglow.api.options import (
    ChatGenerationOptions,
    ContextOptions,
    GenerationOptions,
    LoadOptions,
    build_context_settings,
    build_model_settings,
    check_options,
    get_fields,
)
from afterglow.cli import serve
from afterglow.cli.commands import load_command
from afterglow.cli.options import MODEL_OPTIONS
from afterglow.cli.settings import SETTINGS_FIELDS, load_command_settings
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, UnsupportedOption
from afterglow.llama import model as llama_model
from afterglow.llama.library.loader import get_library
from afterglow.testing import models

TEXT = "the rain in spain and the thin heron on the river " * 4
# Option: its value, and the field of llama.cpp's parameters with the value it must have.
MODEL_FIELDS: dict[str, tuple[Any, str, Any]] = {
    "gpu_layers": (7, "n_gpu_layers", 7),
    "cpu_moe_layers": (2, "tensor_buft_overrides", rb"blk\.(0|1)\.ffn_(up|down|gate|gate_up)_(ch|)exps"),
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
    "pooling": ("last", "pooling_type", 3),
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
    fields = get_fields(ContextOptions)
    assert fields.keys() == VALUES.keys()
    assert set(MODEL_OPTIONS) == get_fields(LoadOptions).keys() <= SETTINGS_FIELDS.keys()
    assert all(value != fields[name].default for name, value in VALUES.items())


def test_every_option_has_a_description_and_is_in_the_docstring_of_load() -> None:
    for declaration in (LoadOptions, ChatGenerationOptions):
        assert all(field.description for field in get_fields(declaration).values())
    for name in get_fields(LoadOptions):
        assert f" {name}: " in (afterglow.load.__doc__ or ""), name


def test_an_option_of_the_engine_has_the_default_of_its_settings() -> None:
    names = {field.name for field in dataclasses.fields(EngineSettings)} & get_fields(LoadOptions).keys()
    assert {name: get_fields(LoadOptions)[name].default for name in names} == {
        name: getattr(EngineSettings(), name) for name in names
    }
    assert {"ram_cache_bytes", "speculation", "deterministic"} <= names


@pytest.mark.native
@pytest.mark.parametrize("name", CONTEXT_FIELDS)
def test_every_context_option_is_a_parameter_of_llama_cpp(name: str) -> None:
    value, field, expected = CONTEXT_FIELDS[name]
    needed = {"yarn_ext_factor": 0.0} if name == "yarn_attn_factor" else {}
    parameters = build_context_settings(check_options(LoadOptions, {name: value, **needed})).build_parameters()
    assert getattr(parameters, field) == expected
    default = build_context_settings(check_options(LoadOptions, {"threads": 1})).build_parameters()
    assert getattr(default, field) != expected


def build_model_parameters(**options: Any) -> Any:
    return llama_model._build_parameters(build_model_settings(check_options(LoadOptions, options)))


@pytest.mark.native
@pytest.mark.parametrize("name", MODEL_FIELDS)
def test_every_option_of_the_weights_is_a_parameter_of_llama_cpp(name: str) -> None:
    value, field, expected = MODEL_FIELDS[name]
    if name == "tensor_split":
        if get_library().symbols.llama_max_devices() < len(value):
            with pytest.raises(InvalidArgument, match="tensor_split"):
                build_model_parameters(tensor_split=value)
            return
        parameters, (shares, *_) = build_model_parameters(tensor_split=value)
        assert list(parameters.tensor_split[0:2]) == list(shares[0:2]) == expected
        return
    if name == "cpu_moe_layers":
        parameters, (_, overrides, pattern) = build_model_parameters(cpu_moe_layers=value)
        ffi = get_library().ffi
        assert ffi.string(parameters.tensor_buft_overrides[0].pattern) == ffi.string(pattern) == expected
        assert overrides[1].pattern == ffi.NULL == build_model_parameters()[0].tensor_buft_overrides
        return
    parameters, _ = build_model_parameters(**{name: value})
    assert getattr(parameters, field) == expected
    parameters, _ = build_model_parameters()
    assert getattr(parameters, field) != expected


@pytest.mark.native
@pytest.mark.parametrize("name", VALUES)
def test_load_passes_every_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    passed: list[LoadOptions] = []

    def build_engine_spec(path: Path, options: LoadOptions, *_: Any, **__: Any) -> None:
        passed.append(options)
        raise Stop

    path = models.get_path("attention")
    monkeypatch.setattr(load_module, "plan_load", lambda *_, **__: None)
    monkeypatch.setattr(load_module, "build_engine_spec", build_engine_spec)
    with pytest.raises(Stop):
        afterglow.load(path, **{name: VALUES[name]})
    assert passed == [check_options(LoadOptions, {name: VALUES[name]})]
    monkeypatch.undo()
    needed = {"threads": 1} | ({"yarn_ext_factor": 0.0} if name == "yarn_attn_factor" else {})
    default, spec = (
        load_module.build_engine_spec(path, check_options(LoadOptions, options), EngineSettings(), draft=None)
        for options in (needed, needed | {name: VALUES[name]})
    )
    assert (spec.model_settings, spec.context_settings) != (default.model_settings, default.context_settings)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_have_the_same_flags_for_the_model(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_SETTINGS", "/dev/null")
    arguments = []
    values = {name: value for name, value in VALUES.items() if (command, name) != ("run", "sequences")}
    values |= {"yarn_ext_factor": 0.0}  # the only value that `yarn_attn_factor` allows
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True or value is False:
            arguments.append(flag if value else f"--no-{name.replace('_', '-')}")
        else:
            arguments += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    flags = [*arguments, "--draft", "mtp", "--speculation", "3", *COMMANDS[command]]
    context = load_command(command).make_context(command, flags)
    assert set(values) | {"draft", "speculation"} <= context.params.keys()
    settings = load_command_settings(context)
    expected = values | {"tensor_split": [3.0, 1.0], "draft": "mtp", "speculation": 3}
    assert expected.items() <= settings.load_options.items()
    served: list[dict[str, Any]] = []
    monkeypatch.setattr(serve, "load", lambda *_, **options: served.append(options))
    serve.build_model_registry({"tiny": models.get_path("attention")}, settings).get_slot("tiny").served.open_model()
    assert expected.items() <= served[0].items()


def test_the_environment_sets_shares_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_SETTINGS", "/dev/null")
    monkeypatch.setenv("AFTERGLOW_TENSOR_SPLIT", "3,1")
    context = load_command("chat").make_context("chat", [])
    assert load_command_settings(context).load_options["tensor_split"] == [3.0, 1.0]


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
        build_context_settings(check_options(LoadOptions, options))


@pytest.mark.parametrize(
    ("declaration", "options", "message"),
    [
        (LoadOptions, {"contxt": 1}, "`contxt` is not an option; did you mean 'context'?"),
        (LoadOptions, {"context": "many"}, "`context` must be a valid integer, not 'many'"),
        (LoadOptions, {"context": "512"}, "`context` must be a valid integer, not '512'"),
        (LoadOptions, {"context": 0}, "`context` must be greater than or equal to 1, not 0"),
        (LoadOptions, {"tensor_split": [3, "a"]}, "`tensor_split` [1] must be a valid number, not 'a'"),
        (
            LoadOptions,
            {"projector": 3},
            "`projector` must be a valid string or an instance of PathLike or False, not 3",
        ),
        (GenerationOptions, {"temprature": 1}, "`temprature` is not an option; did you mean 'temperature'?"),
        (GenerationOptions, {"max_tokens": True}, "`max_tokens` must be a valid integer, not True"),
        (GenerationOptions, {"stop": "END"}, "`stop` must be a valid list or a valid tuple, not 'END'"),
        (GenerationOptions, {"stop": ["a", 3]}, "`stop` [1] must be a valid string, not 3"),
        (GenerationOptions, {"sampling": 1}, "`sampling` must be an instance of Sampling, not 1"),
        (
            GenerationOptions,
            {"overflow": "shfit"},
            "`overflow` must be 'refuse', 'shift', 'truncate_middle' or 'compact', not 'shfit'",
        ),
        (ChatGenerationOptions, {"response_fromat": {}}, "did you mean 'response_format'?"),
    ],
)
def test_a_wrong_name_or_type_is_an_error_that_says_what_is_valid(
    declaration: type, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message) + "$"):
        check_options(declaration, options)


def test_a_misspelled_keyword_of_load_is_rejected_before_the_model_is_looked_up() -> None:
    for keyword, meant in (("contxt", "context"), ("fetsh", "fetch"), ("hoks", "hooks")):
        with pytest.raises(InvalidArgument, match=f"`{keyword}` is not an option; did you mean '{meant}'"):
            afterglow.load("no such model", **{keyword: 1})


@pytest.mark.parametrize("name", ["engine", "media_policy", "projector_settings", "state"])
def test_a_keyword_of_the_wrong_type_is_rejected_before_the_model_is_looked_up(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"`{name}` must be"):
        afterglow.load("no such model", **{name: "nonsense"})


def test_numbers_of_numpy_are_numbers() -> None:
    options = {"max_tokens": np.int64(3), "temperature": np.float32(0.5)}
    checked = check_options(GenerationOptions, options)
    assert (type(checked["max_tokens"]), checked["max_tokens"], checked["temperature"]) == (int, 3, 0.5)


def test_a_missing_chat_template_is_rejected_before_the_model_is_looked_up(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"none\.jinja cannot be read"):
        afterglow.load("no such model", chat_template=tmp_path / "none.jinja")


@pytest.mark.native
def test_an_option_replaces_the_field_of_given_engine_settings() -> None:
    engine = EngineSettings(grid=32, speculation="off", ram_cache_bytes=1024)
    options = {"context": 256, "threads": 1, "engine": engine, "ram_cache_bytes": 2048}
    with afterglow.load(models.get_path("attention"), **options) as model:
        settings = model._lifecycle.spec.engine_settings
    assert (settings.grid, settings.speculation, settings.ram_cache_bytes) == (32, "off", 2048)


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
