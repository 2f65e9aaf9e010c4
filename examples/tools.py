"""Functions as tools, called by the model and by nobody else: what it may write is enforced."""

import afterglow

STOCK = {"apples": 12, "pears": 0}


def in_stock(fruit: str) -> int:
    """How many pieces of a fruit there are.

    Args:
        fruit: Its plural, such as apples.
    """
    return STOCK.get(fruit, 0)


with afterglow.load("smollm2", fetch=True) as model:
    turn = model.chat(
        "How many apples are in stock?",
        tools=[in_stock],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
    )
    (call,) = turn.calls
    print(call.name, call.arguments)
    print(
        [
            part.arguments
            for part in model.chat(
                "How many pears are in stock?",
                tools=[in_stock],
                tool_choice={"type": "function", "function": {"name": "in_stock"}},
                parallel_tool_calls=False,
                max_tokens=80,
                stream=True,
            )
        ]
    )
