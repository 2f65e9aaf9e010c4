"""Conversations that real templates are tried with: what people, tools and models write, in OpenAI's dictionaries."""

from __future__ import annotations

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place & a day, <now> if none is given.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "A town, such as Zürich"},
                    "days": {"type": "integer", "description": "How many"},
                },
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "remember",
            "description": "Keeps a note",
            "parameters": {
                "type": "object",
                "properties": {"note": {"type": "string", "description": "What to keep"}},
                "required": ["note"],
            },
        },
    },
]

SYSTEM = {"role": "system", "content": "Be brief.\nSay what you know."}
QUESTION = {"role": "user", "content": 'What\'s the weather in Zürich? "Dry" & <warm>?'}
AGAIN = {"role": "user", "content": "And tomorrow?"}


def call(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call(1, "weather", '{"place": "Zürich", "days": 2}')],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"sky": "clear"}'}
TWO_CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call(1, "weather", '{"place": "Zürich"}'), call(2, "remember", '{"note": "it\'s \\"dry\\""}')],
}
SECOND_RESULT = {"role": "tool", "tool_call_id": "call00002", "name": "remember", "content": "kept"}
ANSWER = {"role": "assistant", "content": "It is dry."}
THOUGHT = {"role": "assistant", "content": "It is dry.", "reasoning_content": "They ask about the sky."}
THOUGHT_CALL = {**CALL, "reasoning_content": "I should look."}

# Name: the messages, and whether tools are offered.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "a question": ([QUESTION], False),
    "several turns": ([SYSTEM, QUESTION, ANSWER, AGAIN], False),
    "tools offered": ([SYSTEM, QUESTION], True),
    "a call and its result": ([SYSTEM, QUESTION, CALL, RESULT], True),
    "two calls and then a turn": ([QUESTION, TWO_CALLS, RESULT, SECOND_RESULT, ANSWER, AGAIN], True),
    "reasoning in an earlier turn": ([SYSTEM, QUESTION, THOUGHT, AGAIN], False),
    "reasoning before a call": ([SYSTEM, QUESTION, THOUGHT_CALL, RESULT], True),
}

# What llama.cpp's server gives every template, given by name so that both sides have the same.
ARGUMENTS = {"enable_thinking": True, "date_string": "26 Jul 2024", "datetime": "Jul 26 2024"}
TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}  # of the tiny model
