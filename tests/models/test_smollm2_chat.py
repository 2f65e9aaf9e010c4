"""Chat on SmolLM2: responses, streams, formats, tools, conversations, reasoning."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from pydantic import BaseModel

from afterglow import Conversation, TextDelta, ToolCallDelta
from afterglow.errors import Cancelled, InvalidArgument, UnsupportedOption
from support.greedy import load_greedy

pytestmark = pytest.mark.model
SYSTEM = "You are a helpful assistant."
FRANCE = [("system", SYSTEM), ("user", "What is the capital of France?")]
# A model without reasoning training still reasons if its prompt ends inside a reasoning block.
REASONING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}"
)


class Person(BaseModel):
    name: str
    age: int


def test_a_text_is_a_user_message(model):
    assert "4" in model.chat("What is 2+2?").text


def test_the_second_turn_of_a_conversation_is_a_prefix_hit(model):
    first = model.chat(FRANCE)
    assert (first.text, first.finish_reason) == ("The capital of France is Paris.", "stop")
    second = model.chat([*FRANCE, first.message, ("user", "And of Italy?")])
    assert "Rome" in second.text
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.generated_tokens - 1


def test_stream_and_response_have_the_same_text(model):
    stream = model.chat(FRANCE, stream=True)
    parts = list(stream)
    assert len(parts) > 3
    assert "".join(part.text for part in parts) == stream.response.text == model.chat(FRANCE).text


def test_asyncio_can_wait_and_stream(model):
    async def ask() -> tuple[str, str]:
        response = await model.chat_async(FRANCE)
        parts = [part.text async for part in model.chat(FRANCE, stream=True)]
        return response.text, "".join(parts)

    text, streamed = asyncio.run(ask())
    assert text == streamed == "The capital of France is Paris."


def test_a_chat_can_have_several_responses(model):
    response = model.chat("Name an animal.", n=3, temperature=1.2, seed=5, max_tokens=12)
    assert len({response.text, *(alternative.text for alternative in response.alternatives)}) == 3
    with pytest.raises(InvalidArgument, match="`n`"):
        model.chat("Name an animal.", n=2, stream=True)


def test_a_stop_string_ends_a_response_and_is_reported(model):
    response = model.chat(FRANCE, stop=["France"])
    assert (response.text, response.stop_reason, response.finish_reason) == ("The capital of ", "France", "stop")


def test_max_tokens_ends_a_response(model):
    assert model.chat(FRANCE, max_tokens=3).finish_reason == "length"


def test_logprobs_come_with_the_tokens(model):
    response = model.chat(FRANCE, logprobs=2)
    assert all(token.logprob is not None and len(token.alternatives) == 2 for token in response.tokens)


def test_a_chat_can_be_cancelled(model):
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        model.chat("Tell me a long story.", cancel=cancel)
    assert model.complete("Then", max_tokens=1).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_pydantic_response_format_is_parsed(model, temperature):
    for seed in range(3):
        response = model.chat(
            [("system", SYSTEM), ("user", "Bob is 42 years old.")],
            response_format=Person,
            temperature=temperature,
            seed=seed,
            max_tokens=200,
        )
        if response.finish_reason == "stop":
            assert isinstance(response.parsed, Person)
        else:
            assert response.parsed is None


def test_a_response_format_can_be_streamed(model):
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3}
    format = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}
    stream = model.chat("List three numbers.", response_format=format, max_tokens=80, stream=True)
    text = "".join(part.text for part in stream)
    assert json.loads(text) == stream.response.parsed


def test_a_response_format_does_not_affect_other_requests(model):
    unconstrained = model.submit_chat(FRANCE)[0]
    constrained = model.submit_chat(FRANCE, response_format={"type": "regex", "pattern": "[0-9]{5}"})[0]
    assert unconstrained.result().text == "The capital of France is Paris."
    assert constrained.result().text.isdigit()


def weather(city: str, days: int = 1) -> str:
    """Look the weather up.

    Args:
        city: Where.
        days: How many days ahead.
    """
    return f"sunny in {city} for {days} days"


def test_a_function_can_be_a_tool(model):
    response = model.chat("How is the weather in Paris?", tools=[weather], tool_choice="required", max_tokens=200)
    assert response.tool_calls[0].name == "weather"
    assert set(json.loads(response.tool_calls[0].arguments)) <= {"city", "days"}


def test_required_calls_end_when_the_model_would_write_text(model):
    response = model.chat("How is the weather in Paris?", tools=[weather], tool_choice="required", max_tokens=800)
    assert response.finish_reason == "tool_calls"
    assert len(response.tool_calls) == 1
    assert response.usage.generated_tokens < 100


def test_streamed_tool_calls_add_up(model):
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
    assert "".join(part.arguments for part in parts) == stream.response.tool_calls[0].arguments
    assert stream.response.finish_reason == "tool_calls"


def test_a_conversation_calls_its_functions_and_continues(model, monkeypatch):
    chat = Conversation(model, system=SYSTEM, tools=[weather], max_tokens=200)
    overrides = iter([{"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": "none"}])
    original = model.chat
    monkeypatch.setattr(model, "chat", lambda *args, **options: original(*args, **{**options, **next(overrides)}))
    chat.ask("How is the weather in Paris?")
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.messages[3].content.startswith("sunny in ")
    assert chat.messages[3].tool_call_id == chat.messages[2].tool_calls[0].id


def test_a_conversation_forks_rewinds_regenerates_and_saves(model, tmp_path):
    chat = Conversation(model, system=SYSTEM, max_tokens=20)
    first = chat.ask("What is the capital of France?").text
    branch = chat.fork()
    branch.ask("And of Italy?")
    assert (len(chat.messages), len(branch.messages)) == (3, 5)
    branch.rewind(3)
    assert branch.messages == chat.messages
    assert chat.regenerate().text == first
    assert chat.last_response.usage.cached_tokens > 0
    chat.edit(1, "What is the capital of Italy?")
    assert "Rom" in chat.regenerate().text
    chat.save(tmp_path / "chat.json")
    other = Conversation(model)
    other.load(tmp_path / "chat.json")
    assert other.messages == chat.messages


def test_a_closed_stream_leaves_the_conversation_unchanged(model):
    chat = Conversation(model, system=SYSTEM)
    for part in chat.stream("Tell me a story."):
        assert isinstance(part, TextDelta)
        break
    assert [message.role for message in chat.messages] == ["system"]
    assert model.complete("Then", max_tokens=1).tokens  # the closed response has ended by now


def test_a_conversation_supports_asyncio(model):
    chat = Conversation(model, system=SYSTEM, max_tokens=20)
    response = asyncio.run(chat.ask_async("What is the capital of France?"))
    assert "Paris" in response.text
    assert len(chat.messages) == 3


# --- reasoning


@pytest.fixture(scope="module")
def reasoning_model(smollm2):
    with load_greedy(smollm2, context=2048, sequences=2, chat_template=REASONING_TEMPLATE) as reasoning_model:
        yield reasoning_model


def test_reasoning_ends_at_its_budget_and_the_answer_follows(reasoning_model):
    response = reasoning_model.chat("What is 2+2?", reasoning=3, max_tokens=40)
    assert response.reasoning
    assert reasoning_model.count_tokens(response.reasoning) <= 4
    assert response.text
    assert "think>" not in response.text + response.reasoning


def test_reasoning_can_be_turned_off(reasoning_model):
    assert reasoning_model.chat("What is 2+2?", reasoning=False, max_tokens=20).reasoning == ""


def test_a_response_format_applies_after_reasoning(reasoning_model):
    response = reasoning_model.chat("What is 2+2?", reasoning=8, response_format={"type": "regex", "pattern": "[0-9]+"})
    assert response.reasoning
    assert response.text.isdigit()


def test_a_tool_is_called_after_reasoning(reasoning_model):
    response = reasoning_model.chat(
        "How is the weather?", tools=[weather], tool_choice="required", parallel_tool_calls=False, reasoning=8
    )
    assert response.reasoning
    assert response.tool_calls[0].name == "weather"


def test_reasoning_is_rejected_for_a_model_without_it(model):
    with pytest.raises(UnsupportedOption, match="reasoning"):
        model.chat("What is 2+2?", reasoning=True)


def test_chat_template_kwargs_reach_the_template(reasoning_model):
    assert reasoning_model.apply_chat_template("Hi", chat_template_kwargs={"enable_thinking": False}).text.endswith(
        "</think>\n\n"
    )
    assert reasoning_model.apply_chat_template("Hi").text.endswith("<think>\n")
