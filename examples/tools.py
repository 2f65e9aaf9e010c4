"""Python functions as tools: the model can only generate valid calls. One complete response, one stream."""

import json

import afterglow

STOCK = {"apples": 12, "pears": 0}


def in_stock(fruit: str) -> int:
    """How many pieces of a fruit there are.

    Args:
        fruit: Its plural, e.g. apples.
    """
    return STOCK.get(fruit, 0)


with afterglow.load("smollm2", fetch=True) as model:
    response = model.chat(
        "How many apples are in stock?",
        tools=[in_stock],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
        temperature=0,
    )
    (call,) = response.tool_calls
    print(call.name, call.arguments, "gives", in_stock(**json.loads(call.arguments)))

    parts = model.chat(
        "How many pears are in stock?",
        tools=[in_stock],
        tool_choice={"type": "function", "function": {"name": "in_stock"}},
        parallel_tool_calls=False,
        max_tokens=80,
        temperature=0,
        stream=True,
    )
    print([part.arguments for part in parts])
