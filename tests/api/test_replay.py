"""Replay in Python: a conversation that is sent back costs only its new tokens, on every kind of memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import afterglow
from afterglow.api.model import Model
from afterglow.testing import models

pytestmark = pytest.mark.native

LETTERS = {"type": "regex", "pattern": "[a-z ]{20,40}"}  # random bytes are no text
KINDS = ("attention", "window", "recurrent", "hybrid")
QUESTION = {"role": "user", "content": "one two three"}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with afterglow.load(models.get_path(request.param), context=1024, sequences=2) as loaded:
        yield loaded


def test_the_next_turn_computes_only_the_new_tokens(model: Model) -> None:
    messages, computed = [QUESTION], 0
    for turn in range(4):
        response = model.chat(messages, max_tokens=24, temperature=1.0, seed=turn, response_format=LETTERS)
        assert response.usage.cached_tokens == computed
        assert response.usage.replay_misses == ()
        computed = response.usage.prompt_tokens + response.usage.generated_tokens - 1
        messages += [{"role": "assistant", "content": response.text}, QUESTION]


def test_an_answer_that_ends_inside_a_character_is_not_computed_again(model: Model) -> None:
    stars = {"type": "regex", "pattern": "🌟{8}"}  # each has four tokens
    first = model.chat([QUESTION], max_tokens=6, response_format=stars)
    assert (first.text, first.finish_reason) == ("🌟�", "length")
    messages = [QUESTION, {"role": "assistant", "content": first.text}, QUESTION]
    usage = model.chat(messages, max_tokens=1).usage
    assert usage.replay_misses == ()
    assert usage.replayed_tokens == 6
    assert usage.cached_tokens >= first.usage.prompt_tokens + 5


def test_an_answer_before_a_stop_text_is_replayed(model: Model) -> None:
    letters = {"type": "regex", "pattern": "[a-z ]{100}END[a-z]{3}"}
    messages, prompt = [QUESTION], 0
    for turn in range(3):
        response = model.chat(messages, temperature=1.0, seed=turn, response_format=letters, stop=["END"])
        assert (len(response.text), response.stop_reason) == (100, "END")
        assert response.usage.replay_misses == ()
        if turn and model.info.memory_kind in ("attention", "window"):  # others cannot remove the stop text
            new = response.usage.prompt_tokens - response.usage.cached_tokens
            assert new < prompt + len("<|im_end|>\n")  # of the end, the question and the start of the answer
        prompt = prompt or response.usage.prompt_tokens
        messages += [{"role": "assistant", "content": response.text}, QUESTION]


def test_an_answer_that_a_stop_text_ends_inside_a_token_is_replayed(model: Model) -> None:
    """What is before the stop text is tokenized again."""
    assert len(model.tokenize(" the")) == 1
    response = model.chat([QUESTION], response_format={"type": "choice", "choices": ["so the"]}, stop=["he"])
    assert response.text == "so t"
    messages = [QUESTION, {"role": "assistant", "content": response.text}, QUESTION]
    usage = model.chat(messages, max_tokens=1).usage
    assert (usage.replayed_tokens, usage.replay_misses) == (len(model.tokenize("so t")), ())


TURNS = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if KEPT and message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif -%}"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "dropped"])
def test_reasoning_costs_nothing_if_the_template_keeps_it_and_only_what_follows_if_not(
    kind: str, is_kept: bool
) -> None:
    template = TURNS.replace("KEPT", str(is_kept).lower())
    with afterglow.load(models.get_path(f"successor-{kind}"), context=1024, chat_template=template) as model:
        first = model.chat([QUESTION], reasoning=12, max_tokens=40)
        assert first.reasoning
        message = {"role": "assistant", "content": first.text, "reasoning_content": first.reasoning}
        usage = model.chat([QUESTION, message, QUESTION], reasoning=12, max_tokens=4).usage
        if is_kept:
            assert usage.cached_tokens == first.usage.prompt_tokens + first.usage.generated_tokens - 1
            assert usage.replayed_tokens == first.usage.generated_tokens
        else:
            opening = len("<|im_start|>assistant\n<think>\n")  # at most this many tokens
            assert first.usage.prompt_tokens - opening <= usage.cached_tokens < first.usage.prompt_tokens
            assert usage.replayed_tokens == 0


def test_replay_can_be_turned_off_on_load_and_per_request() -> None:
    path = models.get_path("successor-attention")

    def count_replayed_tokens(model: Model, **options: bool) -> int:
        answer = model.chat([QUESTION], max_tokens=6, **options).text  # type: ignore[call-overload]
        messages = [QUESTION, {"role": "assistant", "content": answer}, QUESTION]
        usage = model.chat(messages, max_tokens=1, **options).usage  # type: ignore[call-overload]
        return usage.replayed_tokens

    with afterglow.load(path, context=512, replay=False) as model:
        assert count_replayed_tokens(model) == 0
    with afterglow.load(path, context=512) as model:
        assert count_replayed_tokens(model, replay=False) == 0
        assert count_replayed_tokens(model) == 6


def test_clearing_the_cache_forgets_generated_messages() -> None:
    with afterglow.load(models.get_path("successor-attention"), context=512) as model:
        answer = model.chat([QUESTION], max_tokens=6).text
        history = [QUESTION, {"role": "assistant", "content": answer}, QUESTION]
        assert model.plan_chat(history).prompt.replay.replayed_tokens == 6
        assert model.plan_chat(history, salt="other").prompt.replay.replayed_tokens == 0
        model.clear_cache()
        assert model.plan_chat(history).prompt.replay.replayed_tokens == 0
