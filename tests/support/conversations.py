"""Conversations with which published templates are rendered, as OpenAI dictionaries.

The texts and the names of the conversations are part of the recorded data in tests/data/templates.json.
"""

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
SECOND_QUESTION = {"role": "user", "content": "And tomorrow?"}


def build_call(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [build_call(1, "weather", '{"place": "Zürich", "days": 2}')],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"sky": "clear"}'}
TWO_CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        build_call(1, "weather", '{"place": "Zürich"}'),
        build_call(2, "remember", '{"note": "it\'s \\"dry\\""}'),
    ],
}
SECOND_RESULT = {"role": "tool", "tool_call_id": "call00002", "name": "remember", "content": "kept"}
ANSWER = {"role": "assistant", "content": "It is dry."}
ANSWER_WITH_REASONING = {"role": "assistant", "content": "It is dry.", "reasoning_content": "They ask about the sky."}
CALL_WITH_REASONING = {**CALL, "reasoning_content": "I should look."}

# Messages, and whether tools are passed, by name.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "a question": ([QUESTION], False),
    "several turns": ([SYSTEM, QUESTION, ANSWER, SECOND_QUESTION], False),
    "tools offered": ([SYSTEM, QUESTION], True),
    "a call and its result": ([SYSTEM, QUESTION, CALL, RESULT], True),
    "two calls and then a turn": ([QUESTION, TWO_CALLS, RESULT, SECOND_RESULT, ANSWER, SECOND_QUESTION], True),
    "reasoning in an earlier turn": ([SYSTEM, QUESTION, ANSWER_WITH_REASONING, SECOND_QUESTION], False),
    "reasoning before a call": ([SYSTEM, QUESTION, CALL_WITH_REASONING, RESULT], True),
}

# Variables that llama.cpp's server passes to every template; passed explicitly so that both engines have the same.
TEMPLATE_KWARGS = {"enable_thinking": True, "date_string": "26 Jul 2024", "datetime": "Jul 26 2024"}
SPECIAL_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}  # of the tiny models
