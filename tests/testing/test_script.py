"""Scripted answers test agents: everything but the sampling is real."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import afterglow
from afterglow import Conversation, Model
from afterglow.errors import InvalidArgument, InvalidGrammar
from afterglow.testing import models
from afterglow.testing.script import script_answers, write_call

pytestmark = pytest.mark.native


@pytest.fixture
def model() -> Iterator[Model]:
    with afterglow.load(models.get_path("attention")) as model:
        yield model


def weather(city: str) -> str:
    """Tell the weather."""
    return f"Rain in {city}."


def test_requests_get_the_answers_in_order(model: Model) -> None:
    with script_answers(model, ["one", "two “2”", ""]):
        assert model.chat("a").text == "one"
        assert "".join(part.text for part in model.chat("b", stream=True)) == "two “2”"  # type: ignore[union-attr]
        assert model.complete("c").text == ""
    assert model.complete("c", max_tokens=1).finish_reason == "length"


def test_a_scripted_call_runs_the_tool_and_its_result_is_in_the_next_prompt(model: Model) -> None:
    conversation = Conversation(model, tools=[weather])
    with script_answers(model, ["Let me see. " + write_call("weather", city="Paris"), "Take an umbrella."]):
        assert conversation.ask("How is Paris?").text == "Take an umbrella."
    assert [message.role for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[2].content == "Rain in Paris."
    assert conversation.last_response.usage.cached_tokens > 0


def test_a_request_without_an_answer_is_an_error(model: Model) -> None:
    with script_answers(model, ["one"]):
        model.chat("a")
        with pytest.raises(InvalidArgument, match="only 1"):
            model.chat("b")


def test_an_answer_that_the_response_format_forbids_is_an_error(model: Model) -> None:
    with script_answers(model, ["maybe", "yes"]):
        yes_or_no = {"type": "choice", "choices": ["yes", "no"]}
        with pytest.raises(InvalidGrammar, match="'maybe' is not allowed"):
            model.chat("a", response_format=yes_or_no)
        assert model.chat("a", response_format=yes_or_no).text == "yes"


def test_a_call_with_arguments_that_the_schema_forbids_is_an_error(model: Model) -> None:
    with script_answers(model, [write_call("weather", town="Paris")]), pytest.raises(InvalidGrammar):
        model.chat("a", tools=[weather])
