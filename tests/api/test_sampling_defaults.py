"""One sampling default: the settings, Ollama's parameters, the model file, or the defaults of afterglow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import afterglow
from afterglow import Conversation, Sampling
from afterglow.api.sampling_defaults import FILE_KEYS, OLLAMA_KEYS, build_sampling_defaults
from afterglow.engine.types.request import Request
from afterglow.errors import InvalidArgument
from afterglow.testing import models
from support.sampling_models import write_model_with_sampling

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0}


def get_values(sampling: Sampling, names: Any = DEFAULTS) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in names}


# --- the values and their sources


def test_without_any_source_the_values_are_those_of_afterglow() -> None:
    defaults = build_sampling_defaults({}, context_length=4096)
    assert defaults.sampling == Sampling()
    assert defaults.describe() == {name: (value, "default") for name, value in DEFAULTS.items()}


def test_settings_override_ollama_which_overrides_the_file() -> None:
    metadata = {"general.sampling.temp": "0.600000", "general.sampling.top_k": 20, "general.sampling.top_p": 0.9}
    ollama = {"temperature": 0.7, "top_k": 30, "stop": ["<|im_end|>"], "num_ctx": 9}
    defaults = build_sampling_defaults(metadata, ollama, {"temperature": 0.5, "min_p": None}, context_length=64)
    assert get_values(defaults.sampling) == DEFAULTS | {"temperature": 0.5, "top_k": 30, "top_p": 0.9}
    assert defaults.sources == {"temperature": "settings", "top_k": "ollama params", "top_p": "file"}
    assert defaults.get_source("min_p") == "default"


def test_every_known_key_sets_a_field_of_the_sampling() -> None:
    metadata = dict.fromkeys(FILE_KEYS, 1)
    assert set(build_sampling_defaults(metadata, context_length=64).sources) == set(FILE_KEYS.values())
    ollama = dict.fromkeys(OLLAMA_KEYS, 1)
    assert set(build_sampling_defaults({}, ollama, context_length=64).sources) == set(OLLAMA_KEYS)


def test_minus_one_means_off_or_the_whole_context_as_in_llama_cpp() -> None:
    metadata = {"general.sampling.top_k": -1, "general.sampling.penalty_last_n": -1}
    sampling = build_sampling_defaults(metadata, context_length=777).sampling
    assert (sampling.top_k, sampling.repeat_last_n) == (0, 777)


@pytest.mark.parametrize("value", [-3, "warm", float("nan"), None, [1]])
def test_an_invalid_value_is_left_out_with_a_warning(value: object, caplog: pytest.LogCaptureFixture) -> None:
    defaults = build_sampling_defaults({"general.sampling.temp": value}, {"top_k": 7}, context_length=64)
    assert get_values(defaults.sampling) == DEFAULTS | {"top_k": 7}
    assert defaults.sources == {"top_k": "ollama params"}
    assert "temperature" in caplog.text


# --- requests


def capture_request(model: afterglow.Model, ask: Callable[[], object]) -> Request:
    """Return the engine request of a call, which is not started."""
    requests: list[Request] = []

    class Captured(Exception):
        pass

    def start(request: Request, *_: object, **__: object) -> None:
        requests.append(request)
        raise Captured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "start", start)
        with pytest.raises(Captured):
            ask()
    return requests[0]


@pytest.fixture(scope="module")
def own_sampling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file with sampling values of its own."""
    path = tmp_path_factory.mktemp("models") / "own.gguf"
    return write_model_with_sampling(path, {"temp": 0.6, "top_k": 20, "penalty_repeat": 1.05})


@pytest.mark.native
@pytest.mark.parametrize("host", ["thread", "process"])
def test_a_chat_has_the_values_of_its_model_file_and_options_win(host: Any, own_sampling: Path) -> None:
    with afterglow.load(own_sampling, host=host, context=256, threads=1) as model:
        expected = DEFAULTS | {"temperature": 0.6, "top_k": 20, "repeat_penalty": 1.05}
        assert get_values(model.sampling_defaults.sampling) == expected
        assert model.sampling_defaults.get_source("top_k") == "file"
        conversation = Conversation(model, top_p=0.5)
        asks: list[tuple[Callable[..., object], dict[str, float]]] = [
            (model.chat, expected),
            (lambda text, **options: model.chat(text, stream=True, **options), expected),
            (conversation.ask, expected | {"top_p": 0.5}),
            (lambda text, **options: list(conversation.stream(text, **options)), expected | {"top_p": 0.5}),
        ]
        for ask, values in asks:
            request = capture_request(model, lambda ask=ask: ask("hello"))  # type: ignore[misc]
            assert get_values(request.sampling) == values
            assert request.max_tokens is None
            given: Any = {"temperature": 0, "repeat_penalty": 1.3, "seed": 5}
            request = capture_request(model, lambda ask=ask, given=given: ask("hello", **given))  # type: ignore[misc]
            assert get_values(request.sampling) == values | {"temperature": 0, "repeat_penalty": 1.3}
            assert request.sampling.seed == 5


@pytest.mark.native
def test_the_defaults_given_to_load_override_the_file(own_sampling: Path) -> None:
    given: afterglow.SamplingOptions = {"temperature": 0.3, "min_p": 0.1}
    with afterglow.load(own_sampling, context=64, threads=1, sampling_defaults=given) as model:
        described = model.sampling_defaults.describe()
        assert described["temperature"] == (0.3, "settings")
        assert described["min_p"] == (0.1, "settings")
        assert described["top_k"] == (20, "file")
        assert described["top_p"] == (0.95, "default")
    with pytest.raises(InvalidArgument, match="`temperature` must be less than or equal to 100, not 101"):
        afterglow.load(own_sampling, sampling_defaults={"temperature": 101})
    with pytest.raises(InvalidArgument, match="`topk` is not an option; did you mean 'top_k'"):
        afterglow.load(own_sampling, sampling_defaults={"topk": 1})  # type: ignore[typeddict-unknown-key]


@pytest.mark.native
def test_a_completion_stays_greedy_unless_an_option_asks_for_a_draw(own_sampling: Path) -> None:
    with afterglow.load(own_sampling, context=64, threads=1) as model:
        assert model.build_request("abc").sampling == Sampling(temperature=0)
        assert model.build_request("abc", temperature=0).sampling == Sampling(temperature=0)
        penalty = model.build_request("abc", repeat_penalty=1.2).sampling
        assert penalty == Sampling(temperature=0, repeat_penalty=1.2)
        drawn = model.build_request("abc", top_p=0.7).sampling
        assert get_values(drawn) == {
            **{"temperature": 0.6, "top_k": 20, "top_p": 0.7, "min_p": 0.05, "repeat_penalty": 1.05}
        }
        assert model.build_request("abc", temperature=1.5).sampling.top_k == 20


@pytest.mark.native
def test_sampling_options_beside_sampling_are_rejected_by_name() -> None:
    with afterglow.load(models.get_path("attention"), context=64, threads=1) as model:
        for generate in (model.complete, model.chat):
            with pytest.raises(InvalidArgument, match="`top_k` must not be given beside `sampling`, whose top_k is 40"):
                generate("abc", sampling=Sampling(), top_k=3)


@pytest.mark.native
def test_without_max_tokens_a_completion_ends_when_the_context_is_full() -> None:
    with afterglow.load(models.get_path("successor-attention"), context=256, threads=1) as model:
        completion = model.complete("abc")
        assert (len(completion.tokens) > 200, completion.finish_reason) == (True, "length")


# --- Ollama


@pytest.mark.native
def test_a_model_of_ollama_has_the_parameters_of_its_own_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_sampling: Path
) -> None:
    """Two models share a file and have different parameters."""
    digests = {"model": "ab" * 32, "params": "cd" * 32}
    blobs, manifests = tmp_path / "blobs", tmp_path / "manifests" / "registry.example" / "library"
    blobs.mkdir()
    (blobs / f"sha256-{digests['model']}").symlink_to(own_sampling)
    (blobs / f"sha256-{digests['params']}").write_text(json.dumps({"temperature": 0.1, "stop": ["x"]}))
    for name, kinds in {"plain": ["model"], "tuned": ["model", "params"]}.items():
        layers = [
            {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digests[kind]}"} for kind in kinds
        ]
        (manifests / name).mkdir(parents=True)
        (manifests / name / "latest").write_text(json.dumps({"layers": layers}))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    with afterglow.load("ollama:tuned:latest", context=64, threads=1) as model:
        assert model.sampling_defaults.describe()["temperature"] == (0.1, "ollama params")
        assert model.sampling_defaults.describe()["top_k"] == (20, "file")
    with afterglow.load("ollama:plain:latest", context=64, threads=1) as model:
        assert model.sampling_defaults.describe()["temperature"] == (0.6, "file")
