"""LoRA adapters of the Python API: declared at load, chosen per request."""

from __future__ import annotations

from pathlib import Path

import pytest

import afterglow
from afterglow.api.adapters import read_adapters
from afterglow.api.load import build_engine_settings, plan_load
from afterglow.api.options import GenerationOptions, LoadOptions, check_options, parse_adapters
from afterglow.errors import InvalidArgument, InvalidModel, ModelNotFound
from afterglow.testing import models

pytestmark = pytest.mark.native

ADAPTERS = {
    "style": models.get_path("adapter-attention-a"),
    "formal": (models.get_path("adapter-attention-b"), 0.5),
    "judge": models.get_path("adapter-attention-activated"),
}
PROMPT = "the thing and the other thing"
OPTIONS: GenerationOptions = {"max_tokens": 8, "ignore_eos": True}
LOAD: LoadOptions = {"context": 512, "threads": 1, "projector": False, "disk_cache": False}


@pytest.fixture(scope="module", params=["thread", "process"])
def model(request):
    with afterglow.load(models.get_path("attention"), host=request.param, adapters=ADAPTERS, **LOAD) as loaded:
        loaded.score([1, 2])  # creates the context for scores, which outlives the test
        yield loaded


@pytest.fixture(scope="module")
def base():
    with afterglow.load(models.get_path("attention"), **LOAD) as loaded:
        yield loaded


def test_each_request_chooses_its_adapters(model, base):
    texts = {}
    for lora in ([], ["style"], ["formal"], [("formal", 1.0)], {"style": 0.5, "formal": 1}, "style@0.25"):
        first = model.complete(PROMPT, lora=lora, **OPTIONS)
        again = model.complete(PROMPT, lora=lora, **OPTIONS)
        assert again.tokens == first.tokens
        assert again.usage.cached_tokens == again.usage.prompt_tokens
        texts[str(lora)] = first.tokens
    assert len(set(map(tuple, texts.values()))) == len(texts)
    assert texts["[]"] == base.complete(PROMPT, **OPTIONS).tokens
    assert model.complete(PROMPT, lora=[("formal", 0.5)], **OPTIONS).tokens == texts["['formal']"]  # its default
    assert model.complete(PROMPT, lora={"style": 0}, **OPTIONS).tokens == texts["[]"]


def test_a_chat_and_a_stream_use_their_adapters(model):
    chats = [model.chat(PROMPT, lora=lora, temperature=0, **OPTIONS).text for lora in ([], ["style"])]
    assert chats[0] != chats[1]
    streams = ["".join(model.stream(PROMPT, lora=lora, **OPTIONS)) for lora in ([], ["style"])]
    assert streams == [model.complete(PROMPT, lora=lora, **OPTIONS).text for lora in ([], ["style"])]


def test_an_activated_adapter_shares_the_prefix_of_the_base(model):
    text = "a long introduction to the thing that the judge will read"
    tokens = len(model.tokenize(text))
    model.complete(text, **OPTIONS)
    plain = model.complete(f"{text}{models.INVOCATION_TEXT} yes or no", **OPTIONS)
    invoked = model.complete(f"{text}{models.INVOCATION_TEXT} yes or no", lora=["judge"], **OPTIONS)
    assert invoked.usage.cached_tokens == tokens
    assert invoked.tokens != plain.tokens
    assert model.complete(f"{text} yes or no", lora=["judge"], **OPTIONS).tokens == (
        model.complete(f"{text} yes or no", **OPTIONS).tokens
    )


def test_scores_explanations_and_pins_are_those_of_the_adapters(model):
    prompt = f"{PROMPT}{models.INVOCATION_TEXT} and more"
    tokens = model.tokenize(prompt)
    base, style, judge = ([score for score, _ in model.score(tokens, lora=lora)] for lora in ([], ["style"], ["judge"]))
    start = len(model.tokenize(PROMPT))
    assert base[0] != style[0]
    assert judge[: start - 1] == pytest.approx(base[: start - 1], abs=1e-3)
    assert judge[start] != pytest.approx(base[start], abs=1e-3)
    model.complete(prompt, lora=["style"], max_tokens=1)
    assert model.explain(prompt, lora=["style"]).reused_entries == len(tokens)
    assert model.explain(prompt, lora={"style": 0.125}).reused_entries == 0
    model.pin(prompt, lora=["style"])
    assert not model.unpin(prompt)
    assert model.unpin(prompt, lora=["style"])


def test_a_model_lists_its_adapters(model):
    assert [(adapter.name, adapter.scale) for adapter in model.adapters] == [
        ("style", 1.0),
        ("formal", 0.5),
        ("judge", 1.0),
    ]
    assert model.detokenize(model.adapters[2].invocation_tokens) == models.INVOCATION_TEXT
    assert model.supports("lora_adapters")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (["styel"], r"'styel' is not an adapter of '.*'; did you mean 'style'\?"),
        (["style", ("style", 0.5)], "has 'style' twice"),
        ([("style", float("nan"))], "must have a scale from -100 to 100"),
        (["style", 1], "must be"),
    ],
)
def test_a_wrong_choice_of_adapters_is_rejected(model, lora, message):
    with pytest.raises(InvalidArgument, match=message):
        model.complete(PROMPT, lora=lora)


def test_a_model_without_adapters_says_so(base):
    with pytest.raises(InvalidArgument, match="it was loaded without adapters"):
        base.complete(PROMPT, lora=["style"])
    assert not base.supports("lora_adapters")


def test_an_adapter_of_another_model_is_rejected_with_both_names(tmp_path):
    for source, message in (
        (
            models.get_path("adapter-window-a"),
            "adapter for models of the architecture gemma3, not for attention",
        ),
        (models.get_path("draft"), "it is not a LoRA adapter for attention-.*"),
        (models.get_path("adapter"), None),
    ):
        model = models.get_path("draft" if message is None else "attention")
        with pytest.raises(InvalidModel, match=message or "cannot be applied to|incorrect shape") as error:
            afterglow.load(model, adapters={"style": source}, **LOAD)
        assert str(source) in str(error.value)
    with pytest.raises(ModelNotFound, match="there is no such file for the adapter 'style'"):
        afterglow.load(models.get_path("attention"), adapters={"style": tmp_path / "none.gguf"}, **LOAD)


@pytest.mark.parametrize("adapters", ["style", {"a+b": "style.gguf"}, {"style": 3}, ["=x"]])
def test_a_wrong_declaration_is_rejected(adapters):
    with pytest.raises(InvalidArgument, match="adapters"):
        afterglow.load(models.get_path("attention"), adapters=adapters, **LOAD)


def test_the_memory_of_adapters_is_planned():
    def plan(adapters):
        options = check_options(LoadOptions, {**LOAD, "adapters": adapters})
        settings = build_engine_settings(None, options, options, label="")
        return plan_load(models.get_path("attention"), options, settings)

    nbytes = sum(adapter.nbytes for adapter in read_adapters(models.get_path("attention"), parse_adapters(ADAPTERS)))
    plain, adapted = plan({}), plan(ADAPTERS)
    assert nbytes > 1000
    assert adapted.ram_bytes - plain.ram_bytes == nbytes
    assert "adapters" in {line.name for line in adapted.lines}


def test_adapters_outlive_a_reload_and_a_restart(tmp_path):
    options: LoadOptions = {**LOAD, "disk_cache": True}
    engine = afterglow.EngineSettings(disk_cache_directory=tmp_path)
    long_prompt = PROMPT * 4
    with afterglow.load(models.get_path("attention"), adapters=ADAPTERS, engine=engine, **options) as model:
        expected = model.complete(long_prompt, lora=["style"], **OPTIONS)
        model.unload()
        model.activate()
        again = model.complete(long_prompt, lora=["style"], **OPTIONS)
        assert again.tokens == expected.tokens
        assert again.usage.cached_tokens == again.usage.prompt_tokens
    renamed = {"other": ADAPTERS["style"]}
    with afterglow.load(models.get_path("attention"), adapters=renamed, engine=engine, **options) as model:
        assert model.complete(long_prompt, **OPTIONS).usage.cached_tokens == 0
        assert model.complete(long_prompt, lora=["other"], **OPTIONS).usage.cached_tokens > 40


def test_a_path_may_have_a_scale():
    assert parse_adapters(["a=dir@2/a.gguf", "b=b.gguf@0.5"]) == {"a": ("dir@2/a.gguf", 1.0), "b": ("b.gguf", 0.5)}
    assert parse_adapters({"a": Path("a.gguf")}) == {"a": ("a.gguf", 1.0)}
