"""The public face on tiny models: loading, states, completion."""

from __future__ import annotations

import threading

import pytest

import afterglow
from afterglow import tiny
from afterglow.errors import Closed, InvalidArgument, ModelNotFound, PromptTooLong, WrongState
from afterglow.llama.handle import open_handles

CYCLE = tiny.CYCLE.decode()
MEMORIES = ("attention", "window", "recurrent", "hybrid")


def load(name: str, **options) -> afterglow.Model:
    return afterglow.load(tiny.path(name), threads=1, **{"context": 256, **options})


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_completion_is_the_one_known_by_construction(kind):
    with load(f"successor-{kind}") as model:
        answer = model.complete(CYCLE[:5], max_tokens=40)
        assert answer.text == (CYCLE * 3)[5:45]
        assert (answer.finish, answer.prompt_tokens, len(answer.tokens)) == ("length", 5, 40)


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
        assert (len(answer.tokens), answer.finish) == (1, "length")
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
        assert model.info.memory == "hybrid"
        assert model.supports("kv_cache")
        assert model.supports("hidden_state")
        assert not model.supports("trim")
        assert "partial_state" in model.capabilities
        assert model.context_length == 256
        assert model.backend.startswith("llama.cpp b11549")
        assert model.settings[1].cells == 512
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
    assert not open_handles()


def test_threads_wait_for_each_other():
    with load("successor-attention") as model:
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(model.complete(CYCLE[:5], max_tokens=30).text))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [(CYCLE * 2)[5:35]] * 6


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
