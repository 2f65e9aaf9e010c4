"""Public API on tiny models: load states, completion, snapshots, disk cache."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import afterglow
from afterglow import Conversation, Sampling
from afterglow.api.model import CAPABILITIES
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import (
    Cancelled,
    Closed,
    EngineCrashed,
    InvalidArgument,
    InvalidState,
    ModelNotFound,
    PromptTooLong,
    WrongState,
)
from afterglow.testing import models

pytestmark = pytest.mark.native
CYCLE = models.CYCLE.decode()
MEMORY_KINDS = ("attention", "window", "recurrent", "hybrid")


def load(name: str, **options) -> afterglow.Model:
    return afterglow.load(models.get_path(name), threads=1, **{"context": 256, **options})


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_a_completion_is_the_expected_one(kind):
    with load(f"successor-{kind}") as model:
        completion = model.complete(CYCLE[:5], max_tokens=40)
        assert completion.text == (CYCLE * 3)[5:45]
        assert (completion.finish_reason, completion.usage.prompt_tokens, len(completion.tokens)) == ("length", 5, 40)


def test_a_stream_yields_the_text_of_the_completion():
    with load("successor-hybrid") as model:
        texts = list(model.stream(CYCLE[:5], max_tokens=20))
        assert len(texts) == 20
        assert "".join(texts) == model.complete(CYCLE[:5], max_tokens=20).text


def test_a_closed_stream_frees_the_model():
    with load("successor-attention") as model:
        stream = model.stream(CYCLE[:5], max_tokens=100)
        next(stream)
        stream.close()
        assert model.complete(CYCLE[:5], max_tokens=3).text == CYCLE[5:8]


def test_a_prompt_can_be_tokens():
    with load("successor-attention") as model:
        assert model.complete(model.tokenize(CYCLE[:5]), max_tokens=3).text == CYCLE[5:8]


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_an_error(prompt):
    with load("attention") as model, pytest.raises(InvalidArgument, match="prompt"):
        model.complete(prompt)


def test_a_prompt_that_fills_the_context_gives_one_token():
    with load("successor-attention") as model:
        prompt = model.tokenize((CYCLE * 20)[: model.context_length])
        completion = model.complete(prompt, max_tokens=50)
        assert len(prompt) == model.context_length == 256
        assert (len(completion.tokens), completion.finish_reason) == (1, "length")
        with pytest.raises(PromptTooLong) as caught:
            model.complete([*prompt, 30])
        assert (caught.value.cells, caught.value.limit) == (257, 256)


def test_a_completion_ends_if_the_context_is_full():
    with load("successor-attention") as model:
        prompt = model.tokenize((CYCLE * 20)[:250])
        assert len(model.complete(prompt, max_tokens=50).tokens) == 7  # six cells, and the token after the last cell


def test_a_completion_can_have_no_tokens():
    with load("attention") as model:
        assert model.complete("the", max_tokens=0).tokens == ()
        with pytest.raises(InvalidArgument, match="max_tokens"):
            model.complete("the", max_tokens=-1)


def test_c17_a_model_reports_its_info_and_capabilities():
    with load("hybrid-mtp") as model:
        assert (model.is_loaded, model.is_active, model.state) == (True, True, "active")
        assert model.info.memory_kind == "hybrid"
        assert model.supports("kv_cache")
        assert model.supports("hidden_state")
        assert not model.supports("trim")
        assert "partial_state" in model.capabilities
        assert model.context_length == 256
        assert model.backend.startswith("llama.cpp b11549")
        assert model.settings[1].cells == 4 * 256
    with load("recurrent", sequences=1, engine=EngineSettings(speculation="off")) as model:
        assert not model.supports("kv_cache")
        assert model.supports("hidden_state")
        assert not model.supports("multi_sequence")
        assert not model.supports("speculative_decoding")


CAPABILITIES_OF_OTHER_ENGINES = (
    *("kv_cache", "hidden_state", "streaming", "raw_completion", "grammar", "lora_adapters", "multi_sequence"),
    *("tokenizer", "log_probs", "vision", "audio", "speculative_decoding", "prompt_caching"),
)


@pytest.mark.parametrize("swa_full", [False, True])
def test_c17_a_window_model_that_keeps_all_cells_can_trim(swa_full):
    with load("window", context=512, swa_full=swa_full) as model:
        assert model.supports("trim") == swa_full


def test_c17_the_capability_names_of_other_engines_are_known_and_unknown_names_are_errors():
    with load("attention") as model:
        supported = {name for name in CAPABILITIES_OF_OTHER_ENGINES if model.supports(name)}
        assert set(CAPABILITIES_OF_OTHER_ENGINES) - supported == {"hidden_state", "lora_adapters", "vision", "audio"}
        assert model.capabilities < CAPABILITIES
        with pytest.raises(InvalidArgument, match=r"kv_cache.*not 'kvcache'"):
            model.supports("kvcache")
    with load("embedding") as model:
        assert model.capabilities - {"gpu"} == {"embeddings", "tokenizer"}


@pytest.mark.parametrize("name", ["embedding", *MEMORY_KINDS])
def test_embeddings_are_normalized_and_depend_on_the_text(name, list_own_handles):
    with load(name) as model:
        assert model.supports("embeddings")
        cat = model.embed("the cat sat")
        assert cat.shape == (model.info.embedding_length,)
        assert np.linalg.norm(cat) == pytest.approx(1.0, abs=1e-4)
        model.clear_cache()
        assert np.array_equal(model.embed(model.tokenize("the cat sat", bos=True)), cat)
        assert not np.allclose(model.embed("a heron on the river"), cat, atol=1e-3)
        with pytest.raises(InvalidArgument, match="text"):
            model.embed([])
        with pytest.raises(PromptTooLong):
            model.embed([30] * (model.max_embedding_tokens + 1))
        model.deactivate()
        assert len(list_own_handles()) == 1  # the weights


def test_a_model_can_be_unloaded_and_activated_again(list_own_handles):
    with load("successor-attention", state="cold") as model:
        with pytest.raises(WrongState):
            model.complete("a")
        model.warm()
        assert model.count_tokens("abc") == 3
        model.activate()
        assert model.complete(CYCLE[:5], max_tokens=3).text == CYCLE[5:8]
        model.unload()
        assert not model.is_loaded
    with pytest.raises(Closed):
        model.activate()
    assert not list_own_handles()


def test_c14_threads_and_asyncio_tasks_share_the_model():
    with load("successor-attention") as model:
        from_threads = []
        threads = [
            threading.Thread(
                target=lambda n=n: from_threads.append(model.complete(CYCLE[: 3 + n], max_tokens=30).text[:1])
            )
            for n in range(6)
        ]

        async def get_first_character(n: int) -> str:
            return "".join([text async for text in model.stream_async(CYCLE[: 3 + n], max_tokens=30)])[:1]

        async def run_tasks() -> list[str]:
            return await asyncio.gather(*(get_first_character(n) for n in range(6)))

        for thread in threads:
            thread.start()
        from_tasks = asyncio.run(run_tasks())
        for thread in threads:
            thread.join()
        assert sorted(from_threads) == sorted(from_tasks) == list(CYCLE[3:9])


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c14_several_choices_share_one_prefill(kind):
    with load(kind) as model:
        prompt = "the rain in spain and the thin heron"
        completion = model.complete(prompt, n=3, temperature=1.5, seed=4, max_tokens=10)
        assert len({choice.tokens for choice in completion.choices}) > 1
        length = model.count_tokens(prompt)
        assert [usage.cached_tokens for usage in completion.usages] == [0, length - 1, length - 1]


def test_c14_a_seed_repeats_a_completion():
    with load("attention") as model:

        def sample(seed):
            return model.complete("the rain", temperature=3.0, seed=seed, max_tokens=12).tokens

        assert sample(1) == sample(1) != sample(2)
        assert sample(None) != sample(None)


def test_c14_on_token_is_called_once_for_each_token():
    with load("successor-attention") as model:
        tokens: list[int] = []
        completion = model.complete(CYCLE[:5], max_tokens=9, on_token=tokens.append)
        assert tuple(tokens) == completion.tokens


def test_c14_a_cancel_event_ends_the_request():
    with load("successor-attention", context=4096) as model:
        cancel_event = threading.Event()
        threading.Timer(0.1, cancel_event.set).start()
        with pytest.raises(Cancelled):
            model.complete(CYCLE[:5], max_tokens=4000, cancel=cancel_event)
        assert model.complete(CYCLE[:5], max_tokens=3).text == CYCLE[5:8]


def test_c14_a_cancel_event_ends_a_stream_and_tokens_are_reported():
    with load("successor-attention", context=4096) as model:
        cancel_event, tokens = threading.Event(), list[int]()
        stream = model.stream(CYCLE[:5], max_tokens=4000, on_token=tokens.append, cancel=cancel_event)
        next(stream)
        cancel_event.set()
        with pytest.raises(Cancelled):
            list(stream)
        assert 1 <= len(tokens) < 4000

        async def read() -> None:
            async for _ in model.stream_async(CYCLE[:5], max_tokens=4000, cancel=cancel_event):
                pass

        with pytest.raises(Cancelled):
            asyncio.run(read())


def test_wrong_callbacks_and_options_of_other_methods_are_named():
    with load("successor-attention", context=256) as model:
        for call in (model.complete, model.chat, lambda *args, **options: list(model.stream(*args, **options))):
            with pytest.raises(InvalidArgument, match=r"`on_token` must be a function of a token, not 5"):
                call("hi", on_token=5)
            with pytest.raises(InvalidArgument, match=r"`cancel` must be an event such as threading\.Event, not 5"):
                call("hi", cancel=5)
        with pytest.raises(InvalidArgument, match=r"`n` is not an option; valid names are"):
            model.stream("hi", n=2)


def test_c14_a_cancel_event_ends_a_chat_and_its_stream():
    with load("successor-attention", context=4096) as model:
        cancel_event = threading.Event()

        def read() -> None:
            for _ in model.chat("hi", stream=True, cancel=cancel_event):
                cancel_event.set()

        async def read_async() -> None:
            async for _ in model.chat("hi", stream=True, cancel=cancel_event):
                cancel_event.set()

        with pytest.raises(Cancelled):
            read()
        cancel_event.clear()
        with pytest.raises(Cancelled):
            asyncio.run(read_async())
        with pytest.raises(Cancelled):
            asyncio.run(model.chat_async("hi", cancel=cancel_event))
        with pytest.raises(Cancelled):
            model.chat("hi", cancel=cancel_event)
        chat = Conversation(model)
        with pytest.raises(Cancelled):
            list(chat.stream("hi", cancel=cancel_event))
        assert chat.messages == []


def test_c14_on_token_is_called_once_for_each_token_of_a_chat():
    with load("successor-attention") as model:
        tokens: list[int] = []
        response = model.chat("hi", max_tokens=9, n=2, on_token=tokens.append)
        assert tokens == [token.token for token in response.tokens]
        tokens.clear()
        stream = model.chat("hi", max_tokens=9, stream=True, on_token=tokens.append)
        assert tokens == []
        assert tokens == [token.token for token in stream.result().tokens] != []
        asyncio.run(model.chat_async("hi", max_tokens=3, on_token=tokens.append))
        assert len(tokens) == 12


def test_temperature_beside_sampling_is_rejected():
    with load("attention") as model:
        for generate in (model.complete, model.chat, model.stream):
            with pytest.raises(InvalidArgument, match="temperature"):
                generate("the rain", sampling=Sampling(temperature=0.5), temperature=0.5)
        assert model.build_request("the rain", sampling=Sampling(temperature=0.5), seed=3).sampling.seed == 3


def test_a_drafter_without_speculation_is_rejected():
    with pytest.raises(InvalidArgument, match=r'draft.*speculation is "off"'):
        load("successor-attention", draft="mtp", engine=EngineSettings(speculation="off"))
    with pytest.raises(InvalidArgument, match=r"draft.*deterministic"):
        load("successor-attention", draft="mtp", engine=EngineSettings(deterministic=True))
    with pytest.raises(InvalidArgument, match="draft"):
        load("successor-attention", draft="mtp", host="process", speculation="off")


def test_drafters_that_exclude_the_drafter_are_rejected():
    for drafters, draft, name in (
        ((), "mtp", "mtp"),
        (("ngram",), models.get_path("successor-attention"), "draft"),
    ):
        with pytest.raises(InvalidArgument, match=f"`draft` has no effect: .* without '{name}'"):
            load("successor-attention", draft=draft, engine=EngineSettings(drafters=drafters))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("disk_cache", {"disk_cache": True}),
        ("shared_cache", {"shared_cache": "s3://bucket/path"}),
        ("disk_cache_directory", {"engine": EngineSettings(disk_cache_directory=models.get_path("attention").parent)}),
    ],
)
def test_a_disk_cache_without_a_ram_cache_is_rejected(name, options):
    with pytest.raises(InvalidArgument, match=f"`{name}` has no effect: `ram_cache_bytes` is 0"):
        afterglow.load(models.get_path("attention"), ram_cache_bytes=0, **options)


def test_a_ram_cache_of_0_bytes_needs_no_other_option():
    with afterglow.load(models.get_path("attention"), context=512, ram_cache_bytes=0) as model:
        assert model.complete("the rain", max_tokens=1).text is not None


def test_clearing_an_unknown_or_busy_sequence_is_an_error():
    with load("successor-attention", context=4096) as model:
        for sequence in (-1, 4):
            with pytest.raises(InvalidArgument, match="from 0 to 3"):
                model.clear_cache(sequence)
        stream = model.stream(CYCLE[:5], max_tokens=4000, sequence=2)
        next(stream)
        with pytest.raises(InvalidArgument, match="2 is in use"):
            model.clear_cache(2)
        stream.close()
        model.complete(CYCLE[:9], max_tokens=4, sequence=1)
        model.clear_cache(1)
        assert model.complete(CYCLE[:9], max_tokens=1, sequence=1).usage.cached_tokens == 0


def test_c14_an_explicit_sequence_is_used():
    with load("successor-attention") as model:
        model.complete(CYCLE[:9], max_tokens=4, sequence=3)
        again = model.complete(CYCLE[:9], max_tokens=4, sequence=3)
        assert again.usage.cached_tokens == 9
        with pytest.raises(InvalidArgument, match="sequence"):
            model.complete(CYCLE[:5], sequence=4)


def test_stop_strings_are_removed_and_reported():
    with load("successor-attention") as model:
        completion = model.complete(CYCLE[:5], max_tokens=40, stop=["klm", "zzz"])
        assert (completion.text, completion.finish_reason, completion.choices[0].stop_reason) == (
            "fghij",
            "stop",
            "klm",
        )
        assert "".join(model.stream(CYCLE[:5], max_tokens=40, stop=["klm"])) == "fghij"
        partial = model.complete(CYCLE[:5], max_tokens=3, stop=["ghz"])
        assert partial.text == "fgh"  # the start of a stop string that did not complete


def test_logprobs_come_with_a_completion():
    with load("attention") as model:
        choice = model.complete("the rain", max_tokens=5, logprobs=2).choices[0]
        assert len(choice.logprobs) == len(choice.alternatives) == 5
        assert all(pair[0][0] == token for pair, token in zip(choice.alternatives, choice.tokens, strict=True))
        assert model.complete("the rain", max_tokens=5).choices[0].logprobs == ()


def test_a_deadline_ends_generation_early():
    with load("successor-attention", context=4096) as model:
        completion = model.complete(CYCLE[:5], max_tokens=4000, deadline=0.1)
        assert completion.finish_reason == "deadline"
        assert 0 < len(completion.tokens) < 4000


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c17_a_restored_snapshot_is_a_prefix_hit(kind, tmp_path):
    prompt = "the rain in spain and the thin heron"
    with load(kind) as model:
        first = model.complete(prompt, max_tokens=6)
        model.snapshot("spain")
        model.save_snapshot("spain", tmp_path / "spain.state")
        turn = [*model.tokenize(prompt), *first.tokens, 60, 61]
        expected = model.complete(turn, max_tokens=6).tokens
        model.clear_cache()
        assert model.complete(turn, max_tokens=6, use_prefix_cache=False).usage.cached_tokens == 0
        model.clear_cache()
        model.restore("spain")
        completion = model.complete(turn, max_tokens=6)
        assert completion.usage.cached_tokens == len(turn) - 3
        assert completion.tokens == expected
    with load(kind) as model:  # from the file, in another model object
        model.load_snapshot("again", tmp_path / "spain.state")
        model.restore("again")
        assert model.complete(turn, max_tokens=6).usage.cached_tokens == len(turn) - 3
        with pytest.raises(InvalidArgument, match="no snapshot"):
            model.restore("never taken")


def test_c17_a_damaged_or_foreign_snapshot_is_rejected(tmp_path):
    path = tmp_path / "one.state"
    with load("attention") as model:
        model.complete("the rain in spain", max_tokens=4)
        model.snapshot("one")
        model.save_snapshot("one", path)
    with load("successor-attention") as model:
        model.load_snapshot("one", path)
        with pytest.raises(InvalidState, match="another model"):
            model.restore("one")
        assert model.complete(CYCLE[:5], max_tokens=3).text == CYCLE[5:8]
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(InvalidState):
            model.load_snapshot("two", path)


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c17_a_fork_is_a_new_sequence(kind):
    with load(kind) as model:
        first = model.complete("the rain in spain", max_tokens=6)
        fork = model.fork()
        turn = [*model.tokenize("the rain in spain"), *first.tokens, 70, 71]
        completion = model.complete(turn, max_tokens=4, sequence=fork)
        assert completion.usage.cached_tokens == len(turn) - 3


def test_explain_reports_the_divergence_and_the_cause():
    with load("hybrid") as model:
        prompt = model.tokenize("the rain in spain and the thin heron on the river")
        first = model.complete(prompt, max_tokens=2)
        edited = [*prompt[:10], 99, *prompt[11:]]
        explained = model.explain(edited)
        assert (explained.shared_entries, explained.reused_entries, explained.cause) == (10, 0, "no checkpoint")
        assert (explained.next_prompt_entry, explained.next_cached_entry) == (99, prompt[10])
        assert explained.computed_entries == len(edited)
        assert model.explain([*prompt, first.tokens[0], 9]).cause == "fully reused"
        assert model.explain([7, 8, 9]).cause == "nothing in common"
        model.clear_cache()
        evicted = model.explain(prompt)
        assert (evicted.cause, evicted.reused_entries, evicted.lost_entries) == ("evicted", 0, len(prompt) - 1)


def test_the_pooling_option_chooses_the_embedding():
    with load("attention") as model, load("attention", pooling="last") as other:
        mean, last = (loaded.embed("the cat sat") for loaded in (model, other))
        assert np.linalg.norm(last) == pytest.approx(1.0, abs=1e-4)
        assert not np.allclose(mean, last, atol=1e-3)
        assert model.complete("the cat", max_tokens=4).tokens == other.complete("the cat", max_tokens=4).tokens


def test_an_embedding_model_does_not_complete():
    with load("embedding", context=256) as model, pytest.raises(InvalidArgument, match="embeddings"):
        model.complete("the cat")


def test_an_unknown_name_suggests_a_command():
    with pytest.raises(ModelNotFound, match="afterglow models pull"):
        afterglow.load("smollm3")


def test_detokenize_reverses_tokenize():
    with load("attention") as model:
        text = "naïve <|im_start|> 🌍"
        assert model.detokenize(model.tokenize(text)) == text
        assert model.count_tokens(text) == len(model.tokenize(text))


# --- effects of options (see tests/test_options.py)


def test_sampling_changes_the_completion():
    with afterglow.load(models.get_path("successor-attention"), context=256) as model:
        expected = model.complete([60], max_tokens=4).tokens
        banned = Sampling(temperature=0, logit_bias={expected[0]: float("-inf")})
        assert model.complete([60], max_tokens=4, sampling=banned).tokens[0] != expected[0]


def test_boundaries_priority_and_ignore_eos_reach_the_engine():
    with afterglow.load(models.get_path("successor-attention"), context=256) as model:
        request = model.build_request([1, 2, 3], boundaries=[2], priority=5, ignore_eos=True, min_tokens=7)
    assert (request.boundaries, request.priority, request.ignore_eos) == (frozenset({2}), 5, True)
    assert request.min_tokens == 7


def test_stop_tokens_end_a_completion():
    third = models.get_successor(models.get_successor(models.get_successor(60)))
    with afterglow.load(models.get_path("successor-attention"), context=256) as model:
        request = replace(model.build_request([60], max_tokens=9), stop_tokens=frozenset({third}))
        events = list(model._get_host().submit(request))
    assert (events[-1].finish_reason, events[-1].stop_reason, events[-1].usage.generated_tokens) == ("stop", third, 3)


def test_load_passes_its_context_settings():
    with afterglow.load(models.get_path("attention"), context=512, sequences=3, threads=1, kv_unified=True) as model:
        context = model.settings[1]
        assert (context.sequences, context.threads, context.kv_unified) == (3, 1, True)
        assert model.context_length >= 512


@pytest.mark.parametrize("name", MEMORY_KINDS)
def test_the_disk_cache_gives_prefix_hits_after_a_restart(name, tmp_path, monkeypatch):
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    prompt = [1 + n % 200 for n in range(200)]
    with afterglow.load(models.get_path(name), context=512, disk_cache=True) as model:
        first = model.complete(prompt, max_tokens=5)
        assert first.usage.cached_tokens == 0
    with afterglow.load(models.get_path(name), context=512, disk_cache=True) as model:
        again = model.complete(prompt, max_tokens=5)
        other_tenant = model.complete(prompt, max_tokens=5, salt="another tenant")
    assert again.usage.cached_tokens >= 128
    assert again.tokens == first.tokens == other_tenant.tokens
    assert other_tenant.usage.cached_tokens == 0
    with afterglow.load(models.get_path(name), context=512, disk_cache=False) as model:
        assert model.complete(prompt, max_tokens=5).usage.cached_tokens == 0


@pytest.mark.parametrize("host", ["thread", "process"])
@pytest.mark.parametrize("disk_cache", [True, False])
def test_a_model_works_without_a_cache_directory(host, disk_cache, tmp_path, monkeypatch):
    path = models.get_path("attention")
    (tmp_path / "file").touch()
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path / "file" / "cache"))  # cannot be created
    with afterglow.load(path, context=512, host=host, disk_cache=disk_cache) as model:
        assert model.chat("one two three", max_tokens=2).usage.generated_tokens == 2


def test_a_pinned_prompt_is_not_evicted_until_it_is_unpinned():
    """There is one sequence and RAM for about three prompts; every other prompt would be evicted."""
    prompts = [[1 + (7 * number + n * (number + 1)) % 200 for n in range(100)] for number in range(12)]

    def load_small(nbytes: int | None) -> afterglow.Model:
        engine = EngineSettings(ram_cache_bytes=nbytes)
        return load("attention", sequences=1, disk_cache=False, engine=engine)

    with load_small(None) as model:
        for prompt in prompts[:2]:
            model.complete(prompt, max_tokens=1)
        used_bytes = model._get_host().call(lambda engine: engine.prefix_cache.store.ram.budget.used_bytes)
    with load_small(3 * used_bytes) as model:
        model.pin(prompts[0])
        for _ in range(2):
            for prompt in prompts:
                model.complete(prompt, max_tokens=1)
            assert model.complete([*prompts[0], 5], max_tokens=1).usage.cached_tokens == 100
        assert model.complete([*prompts[1], 5], max_tokens=1).usage.cached_tokens < 100
        assert model.unpin(prompts[0])
        assert not model.unpin(prompts[0])
        for prompt in prompts[1:]:
            model.complete(prompt, max_tokens=1)
        assert model.complete([*prompts[0], 5], max_tokens=1).usage.cached_tokens < 100
        model.pin(prompts[0])
        with pytest.raises(InvalidArgument, match=r"`prompt` needs [\d,]+ bytes to pin"):
            model.pin(prompts[1] + prompts[2])
        with pytest.raises(PromptTooLong):
            model.pin([1] * 1000)
        with pytest.raises(InvalidArgument, match="prompt"):
            model.pin([])


@pytest.mark.parametrize("ram_cache_bytes", [0, 2**16])
def test_a_pin_that_cannot_be_kept_is_rejected_right_after_the_load(ram_cache_bytes):
    with load("attention", disk_cache=False, context=1024, ram_cache_bytes=ram_cache_bytes) as model:
        with pytest.raises(InvalidArgument, match=r"`prompt` (cannot be pinned|needs [\d,]+ bytes to pin)"):
            model.pin([5] * 900)
        assert not model.unpin([5] * 900)


def test_a_pin_is_of_one_salt():
    with load("attention", disk_cache=False) as model:
        model.pin([1, 2, 3], salt="one")
        assert not model.unpin([1, 2, 3])
        assert not model.unpin([1, 2, 3], salt="other")
        assert model.unpin([1, 2, 3], salt="one")


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_clear_cache_clears_all_tiers(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    prompt = [1 + n % 200 for n in range(150)]
    with load(kind, disk_cache=True) as model:
        for _ in range(2):
            assert model.complete(prompt, max_tokens=1).usage.cached_tokens == 0
            model.clear_cache()
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".cells", ".state", ".logits")]


# --- crashes


def crash_engine(model: afterglow.Model) -> None:
    """Make the next decode raise an unexpected error, which crashes the engine."""

    def fail(*_: object) -> None:
        raise RuntimeError("the bug")

    model._get_host().call(lambda engine: setattr(engine.backend, "decode", fail))
    with pytest.raises(EngineCrashed, match="the bug"):
        model.complete(CYCLE[:5])


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c12_a_crashed_engine_is_reported_and_the_next_request_replaces_it(kind):
    with load(f"successor-{kind}") as model:
        for crashes in (1, 2):
            crash_engine(model)
            assert (model.state, model.is_loaded, model.is_active) == ("crashed", True, False)
            assert model.complete(CYCLE[:5], max_tokens=3).text == CYCLE[5:8]
            assert (model.state, model.restarts) == ("active", crashes)


def test_c12_a_crashed_model_can_change_its_load_state():
    with load("successor-attention") as model:
        crash_engine(model)
        model.activate()
        assert (model.state, model.restarts) == ("active", 1)
        crash_engine(model)
        model.deactivate()
        assert model.state == "warm"
        model.activate()
        assert model.complete(CYCLE[:5], max_tokens=3).text == CYCLE[5:8]
        crash_engine(model)
        model.unload()
        assert model.state == "cold"
    with pytest.raises(InvalidArgument, match="must be one of active, warm, cold, not"):
        load("successor-attention", state="crashed")


def test_many_threads_restart_a_crashed_engine_once():
    with load("successor-attention") as model:
        crash_engine(model)
        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(lambda _: model.complete(CYCLE[:5], max_tokens=3).text, range(8)))
        assert set(texts) == {CYCLE[5:8]}
        assert model.restarts == 1


# --- prompts that exceed the context


def test_shift_keeps_the_bos_token_and_the_end_of_a_prompt():
    with load("successor-attention") as model:
        bos = model.vocabulary.special_tokens["bos"]
        prompt = [bos, *model.tokenize(CYCLE * 30)]
        completion = model.complete(prompt, max_tokens=16, overflow="shift")
        assert completion.usage.prompt_tokens == 240
        assert completion.text == CYCLE[:16]
        assert completion.truncation.dropped_tokens == len(prompt) - 240
        request = model.build_request(prompt, max_tokens=16, overflow="shift")
        assert request.entries[0] == bos
        assert len("".join(model.stream(prompt, max_tokens=16, overflow="truncate_middle"))) == 16
        with pytest.raises(PromptTooLong):
            model.complete(prompt, max_tokens=16)


def test_overflow_of_a_rendered_conversation_or_an_unknown_policy_is_refused():
    with load("successor-attention") as model:
        with pytest.raises(InvalidArgument, match="chat"):
            model.complete(model.apply_chat_template("hi"), overflow="shift")
        for generate in (model.complete, model.chat, model.stream):
            with pytest.raises(InvalidArgument, match="overflow"):
                generate("hi", overflow="drop")


def test_a_chat_drops_its_oldest_turns_on_request():
    messages = [(role, f"{number} " + "x" * 20) for number in range(10) for role in ("user", "assistant")][:-1]
    with load("successor-attention") as model:
        with pytest.raises(PromptTooLong):
            model.chat(messages)
        response = model.chat(messages, overflow="shift")
        assert response.truncation.dropped_messages > 4
        assert response.truncation.dropped_messages % 2 == 0
        assert response.usage.prompt_tokens <= 192  # a quarter of the context is for the response
        assert response.usage.generated_tokens >= 64
        assert model.chat("hi", max_tokens=4, overflow="shift").truncation is None


def test_a_request_can_have_a_chat_template_of_its_own() -> None:
    templates = [
        f"{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}{number}" for number in range(6)
    ]
    with afterglow.load(models.get_path("successor-attention"), context=64) as model:
        usual = model.apply_chat_template("xy").text
        texts = [model.apply_chat_template("xy", chat_template=template).text for template in [*templates, *templates]]
        assert texts == [f"xy{number}" for number in range(6)] * 2  # more templates than stay open
        assert model.chat("xy", chat_template=templates[0].removesuffix("0"), max_tokens=3, temperature=0).text == "z ."
        assert model.apply_chat_template("xy").text == usual
