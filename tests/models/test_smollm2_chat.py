"""Chat with a real model, from end to end."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from pydantic import BaseModel

import afterglow
from afterglow import Conversation, TextDelta, ToolCallDelta
from afterglow.errors import Cancelled, InvalidArgument, UnsupportedOption

SYSTEM = "You are a helpful assistant."
FRANCE = [("system", SYSTEM), ("user", "What is the capital of France?")]
# A model that was never taught to think does so when its prompt ends in a thought.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}"
)


class Person(BaseModel):
    name: str
    age: int


def test_a_text_is_a_question(model):
    assert "4" in model.chat("What is 2+2?").text


def test_a_conversation_is_answered_and_the_second_turn_is_mostly_cached(model):
    first = model.chat(FRANCE)
    assert (first.text, first.finish_reason) == ("The capital of France is Paris.", "stop")
    second = model.chat([*FRANCE, first.message, ("user", "And of Italy?")])
    assert "Rome" in second.text
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.generated_tokens - 1


def test_stream_and_whole_are_the_same(model):
    stream = model.chat(FRANCE, stream=True)
    parts = list(stream)
    assert len(parts) > 3
    assert "".join(part.text for part in parts) == stream.turn.text == model.chat(FRANCE).text


def test_asyncio_has_both(model):
    async def ask() -> tuple[str, str]:
        whole = await model.chat_async(FRANCE)
        pieces = [part.text async for part in model.chat(FRANCE, stream=True)]
        return whole.text, "".join(pieces)

    whole, streamed = asyncio.run(ask())
    assert whole == streamed == "The capital of France is Paris."


def test_several_answers_share_one_prompt(model):
    turn = model.chat("Name an animal.", n=3, temperature=1.2, seed=5, max_tokens=12)
    assert len({turn.text, *(other.text for other in turn.alternatives)}) == 3
    with pytest.raises(InvalidArgument, match="`n`"):
        model.chat("Name an animal.", n=2, stream=True)


def test_stops_end_an_answer_and_are_named(model):
    turn = model.chat(FRANCE, stop=["France"])
    assert (turn.text, turn.stop_reason, turn.finish_reason) == ("The capital of ", "France", "stop")


def test_max_tokens_ends_an_answer(model):
    assert model.chat(FRANCE, max_tokens=3).finish_reason == "length"


def test_logprobs_come_with_the_tokens(model):
    turn = model.chat(FRANCE, logprobs=2)
    assert all(token.logprob is not None and len(token.alternatives) == 2 for token in turn.tokens)


def test_a_chat_can_be_cancelled(model):
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        model.chat("Tell me a long story.", cancel=cancel)
    assert model.complete("Then", max_tokens=1).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_pydantic_class_comes_back_filled(model, temperature):
    for seed in range(3):
        turn = model.chat(
            [("system", SYSTEM), ("user", "Bob is 42 years old.")],
            response_format=Person,
            temperature=temperature,
            seed=seed,
            max_tokens=200,
        )
        if turn.finish_reason == "stop":
            assert isinstance(turn.parsed, Person)
        else:
            assert turn.parsed is None


def test_a_response_format_streams(model):
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3}
    format = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}
    stream = model.chat("List three numbers.", response_format=format, max_tokens=80, stream=True)
    text = "".join(part.text for part in stream)
    assert json.loads(text) == stream.turn.parsed


def test_a_format_of_one_request_does_not_touch_its_neighbours(model):
    free = model.submit_chat(FRANCE)[0]
    led = model.submit_chat(FRANCE, response_format={"type": "regex", "pattern": "[0-9]{5}"})[0]
    assert free.result().text == "The capital of France is Paris."
    assert led.result().text.isdigit()


def weather(city: str, days: int = 1) -> str:
    """Look the weather up.

    Args:
        city: Where.
        days: How many days ahead.
    """
    return f"sunny in {city} for {days} days"


def test_a_function_is_a_tool(model):
    turn = model.chat("How is the weather in Paris?", tools=[weather], tool_choice="required", max_tokens=200)
    assert turn.tool_calls[0].name == "weather"
    assert set(json.loads(turn.tool_calls[0].arguments)) <= {"city", "days"}


def test_calls_stream_as_pieces_that_add_up(model):
    stream = model.chat(
        "How is the weather in Paris?",
        tools=[weather],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        stream=True,
    )
    parts = list(stream)
    assert all(isinstance(part, ToolCallDelta) for part in parts)
    assert parts[0].name == "weather"
    assert len(parts) > 3
    assert "".join(part.arguments for part in parts) == stream.turn.calls[0].arguments
    assert stream.turn.finish == "tool_calls"


def test_a_conversation_calls_its_functions_and_goes_on(model, monkeypatch):
    talk = Conversation(model, system=SYSTEM, tools=[weather], max_tokens=200)
    answers = iter([{"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": "none"}])
    chat = model.chat
    monkeypatch.setattr(model, "chat", lambda *args, **options: chat(*args, **{**options, **next(answers)}))
    talk.ask("How is the weather in Paris?")
    assert [message.role for message in talk.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert talk.messages[3].content.startswith("sunny in ")
    assert talk.messages[3].tool_call_id == talk.messages[2].tool_calls[0].id


def test_a_conversation_remembers_forks_rewinds_and_regenerates(model, tmp_path):
    talk = Conversation(model, system=SYSTEM, max_tokens=20)
    first = talk.ask("What is the capital of France?").text
    twin = talk.fork()
    twin.ask("And of Italy?")
    assert (len(talk.messages), len(twin.messages)) == (3, 5)
    twin.rewind(3)
    assert twin.messages == talk.messages
    assert talk.regenerate().text == first
    assert talk.last_response.usage.cached_tokens > 0
    talk.edit(1, "What is the capital of Italy?")
    assert "Rom" in talk.regenerate().text
    talk.save(tmp_path / "talk.json")
    other = Conversation(model)
    other.load(tmp_path / "talk.json")
    assert other.messages == talk.messages


def test_an_answer_that_is_abandoned_leaves_the_conversation_as_it_was(model):
    talk = Conversation(model, system=SYSTEM)
    for part in talk.stream("Tell me a story."):
        assert isinstance(part, TextDelta)
        break
    assert [message.role for message in talk.messages] == ["system"]
    assert model.complete("Then", max_tokens=1).tokens  # by now the abandoned answer has ended


def test_a_conversation_is_for_asyncio_too(model):
    talk = Conversation(model, system=SYSTEM, max_tokens=20)
    turn = asyncio.run(talk.ask_async("What is the capital of France?"))
    assert "Paris" in turn.text
    assert len(talk.messages) == 3


# --- thoughts


@pytest.fixture(scope="module")
def thinker(smollm2):
    with afterglow.load(smollm2, context=2048, sequences=2, chat_template=THINKING) as thinker:
        yield thinker


def test_a_thought_is_closed_after_its_budget_and_the_answer_follows(thinker):
    turn = thinker.chat("What is 2+2?", reasoning=3, max_tokens=40)
    assert turn.reasoning
    assert thinker.count_tokens(turn.reasoning) <= 4
    assert turn.text
    assert "think>" not in turn.text + turn.reasoning


def test_thoughts_can_be_turned_off(thinker):
    assert thinker.chat("What is 2+2?", reasoning=False, max_tokens=20).reasoning == ""


def test_a_format_holds_after_a_thought(thinker):
    turn = thinker.chat("What is 2+2?", reasoning=8, response_format={"type": "regex", "pattern": "[0-9]+"})
    assert turn.reasoning
    assert turn.text.isdigit()


def test_a_tool_is_called_after_a_thought(thinker):
    turn = thinker.chat(
        "How is the weather?", tools=[weather], tool_choice="required", parallel_tool_calls=False, reasoning=8
    )
    assert turn.reasoning
    assert turn.tool_calls[0].name == "weather"


def test_a_model_without_thoughts_refuses_to_think(model):
    with pytest.raises(UnsupportedOption, match="reasoning"):
        model.chat("What is 2+2?", reasoning=True)


def test_arguments_reach_the_template(thinker):
    assert thinker.apply_chat_template("Hi", arguments={"enable_thinking": False}).text.endswith("</think>\n\n")
    assert thinker.apply_chat_template("Hi").text.endswith("<think>\n")
