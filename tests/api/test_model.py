"""The public face on tiny models: loading, states, completion."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

import afterglow
from afterglow import Sampling
from afterglow.errors import (
    Cancelled,
    Closed,
    InvalidArgument,
    InvalidState,
    ModelNotFound,
    PromptTooLong,
    WrongState,
)
from afterglow.llama.handle import list_open_handles
from afterglow.testing import models

CYCLE = models.CYCLE.decode()
MEMORIES = ("attention", "window", "recurrent", "hybrid")


def load(name: str, **options) -> afterglow.Model:
    return afterglow.load(models.get_path(name), threads=1, **{"context": 256, **options})


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_completion_is_the_one_known_by_construction(kind):
    with load(f"successor-{kind}") as model:
        answer = model.complete(CYCLE[:5], max_tokens=40)
        assert answer.text == (CYCLE * 3)[5:45]
        assert (answer.finish_reason, answer.usage.prompt_tokens, len(answer.tokens)) == ("length", 5, 40)


def test_a_stream_yields_the_same_text_in_pieces():
    with load("successor-hybrid") as model:
        pieces = list(model.stream(CYCLE[:5], max_tokens=20))
        assert len(pieces) == 20
        assert "".join(pieces) == model.complete(CYCLE[:5], max_tokens=20).text


def test_an_abandoned_stream_leaves_the_model_free_for_the_next():
    with load("successor-attention") as model:
        stream = model.stream(CYCLE[:5], max_tokens=100)
        next(stream)
        stream.close()
        assert model.complete(CYCLE[:5], max_tokens=3).text == CYCLE[5:8]


def test_tokens_are_a_prompt_too():
    with load("successor-attention") as model:
        assert model.complete(model.tokenize(CYCLE[:5]), max_tokens=3).text == CYCLE[5:8]


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_an_error(prompt):
    with load("attention") as model, pytest.raises(InvalidArgument, match="prompt"):
        model.complete(prompt)


def test_a_prompt_that_exactly_fills_the_context_gives_one_token_and_ends_by_length():
    with load("successor-attention") as model:
        prompt = model.tokenize((CYCLE * 20)[: model.context_length])
        answer = model.complete(prompt, max_tokens=50)
        assert len(prompt) == model.context_length == 256
        assert (len(answer.tokens), answer.finish_reason) == (1, "length")
        with pytest.raises(PromptTooLong) as caught:
            model.complete([*prompt, 30])
        assert (caught.value.cells, caught.value.limit) == (257, 256)


def test_an_answer_stops_where_the_context_is_full():
    with load("successor-attention") as model:
        prompt = model.tokenize((CYCLE * 20)[:250])
        assert len(model.complete(prompt, max_tokens=50).tokens) == 7  # six cells, and the token after the last


def test_no_tokens_is_an_answer():
    with load("attention") as model:
        assert model.complete("the", max_tokens=0).tokens == ()
        with pytest.raises(InvalidArgument, match="max_tokens"):
            model.complete("the", max_tokens=-1)


def test_c17_a_model_says_what_it_is_and_can():
    with load("hybrid-mtp") as model:
        assert (model.is_loaded, model.is_active, model.state) == (True, True, "active")
        assert model.info.memory_kind == "hybrid"
        assert model.supports("kv_cache")
        assert model.supports("hidden_state")
        assert not model.supports("trim")
        assert "partial_state" in model.capabilities
        assert model.context_length == 256
        assert model.backend.startswith("llama.cpp b11549")
        assert model.settings[1].cells == 5 * 256  # four sequences, and one for scoring
    with load("recurrent") as model:
        assert not model.supports("kv_cache")
        assert model.supports("hidden_state")


def test_a_model_goes_cold_and_comes_back():
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
    assert not list_open_handles()


def test_c14_threads_and_asyncio_tasks_share_the_model():
    with load("successor-attention") as model:
        answers = []
        threads = [
            threading.Thread(target=lambda n=n: answers.append(model.complete(CYCLE[: 3 + n], max_tokens=30).text[:1]))
            for n in range(6)
        ]

        async def piece(n: int) -> str:
            return "".join([text async for text in model.stream_async(CYCLE[: 3 + n], max_tokens=30)])[:1]

        async def tasks() -> list[str]:
            return await asyncio.gather(*(piece(n) for n in range(6)))

        for thread in threads:
            thread.start()
        asked = asyncio.run(tasks())
        for thread in threads:
            thread.join()
        assert sorted(answers) == sorted(asked) == list(CYCLE[3:9])


@pytest.mark.parametrize("kind", MEMORIES)
def test_c14_several_answers_share_one_prompt(kind):
    with load(kind) as model:
        prompt = "the rain in spain and the thin heron"
        answer = model.complete(prompt, n=3, temperature=1.5, seed=4, max_tokens=10)
        assert len({choice.tokens for choice in answer.choices}) > 1
        length = model.count_tokens(prompt)
        assert [usage.cached_tokens for usage in answer.usages] == [0, length - 1, length - 1]


def test_c14_a_seed_repeats_an_answer_and_its_absence_does_not():
    with load("attention") as model:

        def draw(seed):
            return model.complete("the rain", temperature=3.0, seed=seed, max_tokens=12).tokens

        assert draw(1) == draw(1) != draw(2)
        assert draw(None) != draw(None)


def test_c14_on_token_is_called_once_for_each_token():
    with load("successor-attention") as model:
        seen: list[int] = []
        answer = model.complete(CYCLE[:5], max_tokens=9, on_token=seen.append)
        assert tuple(seen) == answer.tokens


def test_c14_a_cancel_flag_ends_the_work():
    with load("successor-attention", context=4096) as model:
        flag = threading.Event()
        threading.Timer(0.1, flag.set).start()
        with pytest.raises(Cancelled):
            model.complete(CYCLE[:5], max_tokens=4000, cancel=flag)
        assert model.complete(CYCLE[:5], max_tokens=3).text == CYCLE[5:8]


def test_c14_an_explicit_sequence_is_used():
    with load("successor-attention") as model:
        model.complete(CYCLE[:9], max_tokens=4, sequence=3)
        again = model.complete(CYCLE[:9], max_tokens=4, sequence=3)
        assert again.usage.cached_tokens == 8
        with pytest.raises(InvalidArgument, match="sequence"):
            model.complete(CYCLE[:5], sequence=4)


def test_stop_texts_never_show_and_are_reported():
    with load("successor-attention") as model:
        answer = model.complete(CYCLE[:5], max_tokens=40, stop=["klm", "zzz"])
        assert (answer.text, answer.finish_reason, answer.choices[0].stop_reason) == ("fghij", "stop", "klm")
        assert "".join(model.stream(CYCLE[:5], max_tokens=40, stop=["klm"])) == "fghij"
        partial = model.complete(CYCLE[:5], max_tokens=3, stop=["ghz"])
        assert partial.text == "fgh"  # what looked like a stop and was none


def test_logprobs_come_with_an_answer():
    with load("attention") as model:
        choice = model.complete("the rain", max_tokens=5, logprobs=2).choices[0]
        assert len(choice.logprobs) == len(choice.alternatives) == 5
        assert all(pair[0][0] == token for pair, token in zip(choice.alternatives, choice.tokens, strict=True))
        assert model.complete("the rain", max_tokens=5).choices[0].logprobs == ()


def test_a_deadline_s_answer_is_what_there_is():
    with load("successor-attention", context=4096) as model:
        answer = model.complete(CYCLE[:5], max_tokens=4000, deadline=0.1)
        assert answer.finish_reason == "deadline"
        assert 0 < len(answer.tokens) < 4000


@pytest.mark.parametrize("kind", MEMORIES)
def test_c17_a_named_snapshot_is_really_used_by_the_next_request(kind, tmp_path):
    prompt = "the rain in spain and the thin heron"
    with load(kind) as model:
        first = model.complete(prompt, max_tokens=6)
        model.snapshot("spain")
        model.save_snapshot("spain", tmp_path / "spain.state")
        turn = [*model.tokenize(prompt), *first.tokens, 60, 61]
        expected = model.complete(turn, max_tokens=6).tokens
        model.clear_cache()
        assert model.complete(turn, max_tokens=6, reuse=False).usage.cached_tokens == 0
        model.clear_cache()
        model.restore("spain")
        answer = model.complete(turn, max_tokens=6)
        assert answer.usage.cached_tokens == len(turn) - 3
        assert answer.tokens == expected
    with load(kind) as model:  # another life, from the file
        model.load_snapshot("again", tmp_path / "spain.state")
        model.restore("again")
        assert model.complete(turn, max_tokens=6).usage.cached_tokens == len(turn) - 3
        with pytest.raises(InvalidArgument, match="no snapshot"):
            model.restore("never taken")


def test_c17_a_damaged_or_foreign_snapshot_is_refused(tmp_path):
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


@pytest.mark.parametrize("kind", MEMORIES)
def test_c17_a_fork_is_a_sequence_of_its_own(kind):
    with load(kind) as model:
        first = model.complete("the rain in spain", max_tokens=6)
        twin = model.fork()
        turn = [*model.tokenize("the rain in spain"), *first.tokens, 70, 71]
        answer = model.complete(turn, max_tokens=4, sequence=twin)
        assert answer.usage.cached_tokens == len(turn) - 3


def test_explain_says_where_a_prompt_parts_from_memory_and_why():
    with load("hybrid") as model:
        prompt = model.tokenize("the rain in spain and the thin heron on the river")
        first = model.complete(prompt, max_tokens=2)
        edited = [*prompt[:10], 99, *prompt[11:]]
        explained = model.explain(edited)
        assert (explained.shared_entries, explained.reused_entries, explained.cause) == (10, 0, "no checkpoint")
        assert (explained.next_prompt_entry, explained.next_cached_entry) == (99, prompt[10])
        assert explained.computed_entries == len(edited)
        assert model.explain([*prompt, first.tokens[0], 9]).cause == "all of it"
        assert model.explain([7, 8, 9]).cause == "nothing in common"
        model.clear_cache()
        gone = model.explain(prompt)
        assert (gone.cause, gone.reused_entries, gone.lost_entries) == ("evicted", 0, len(prompt) - 1)


def test_an_embedding_model_does_not_complete():
    with load("embedding", context=256) as model, pytest.raises(InvalidArgument, match="embeddings"):
        model.complete("the cat")


def test_an_unknown_name_says_what_to_do():
    with pytest.raises(ModelNotFound, match="afterglow models pull"):
        afterglow.load("smollm3")


def test_text_survives_tokenizing():
    with load("attention") as model:
        text = "naïve <|im_start|> 🌍"
        assert model.detokenize(model.tokenize(text)) == text
        assert model.count_tokens(text) == len(model.tokenize(text))


# --- what options do (see tests/test_options.py)


def test_sampling_reaches_the_answer():
    with afterglow.load(models.get_path("successor-attention"), context=256) as model:
        plain = model.complete([60], max_tokens=4).tokens
        banned = Sampling(temperature=0, logit_bias={plain[0]: float("-inf")})
        assert model.complete([60], max_tokens=4, sampling=banned).tokens[0] != plain[0]


def test_boundaries_priority_and_ends_reach_the_engine():
    with afterglow.load(models.get_path("successor-attention"), context=256) as model:
        request = model.build_request([1, 2, 3], boundaries=[2], priority=5, ignore_eos=True)
    assert (request.boundaries, request.priority, request.ignore_eos) == (frozenset({2}), 5, True)


def test_stop_tokens_end_an_answer():
    third = models.get_successor(models.get_successor(models.get_successor(60)))
    with afterglow.load(models.get_path("successor-attention"), context=256) as model:
        request = replace(model.build_request([60], max_tokens=9), stop_tokens=frozenset({third}))
        events = list(model._get_host().submit(request))
    assert (events[-1].finish_reason, events[-1].stop_reason, events[-1].usage.generated_tokens) == ("stop", third, 3)


def test_what_load_is_told_is_what_is_loaded():
    with afterglow.load(models.get_path("attention"), context=512, sequences=3, threads=1, kv_unified=True) as model:
        context = model.settings[1]
        assert (context.sequences, context.threads, context.kv_unified) == (4, 1, True)  # one more, for scoring
        assert model.context_length >= 512


@pytest.mark.parametrize("name", ["attention", "window", "recurrent", "hybrid"])
def test_what_is_on_disk_makes_the_next_start_warm(name, tmp_path, monkeypatch):
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    prompt = [1 + n % 200 for n in range(200)]
    with afterglow.load(models.get_path(name), context=512, disk_cache=True) as model:
        first = model.complete(prompt, max_tokens=5)
        assert first.usage.cached_tokens == 0
    with afterglow.load(models.get_path(name), context=512, disk_cache=True) as model:
        again = model.complete(prompt, max_tokens=5)
        stranger = model.complete(prompt, max_tokens=5, salt="another tenant")
    assert again.usage.cached_tokens >= 128
    assert again.tokens == first.tokens == stranger.tokens
    assert stranger.usage.cached_tokens == 0
    with afterglow.load(models.get_path(name), context=512, disk_cache=False) as model:
        assert model.complete(prompt, max_tokens=5).usage.cached_tokens == 0
