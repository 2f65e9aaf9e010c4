"""Concurrent requests with asyncio: they are batched, and their common prefix is prefilled once."""

import asyncio

import afterglow

SYSTEM = "You are a careful assistant who answers questions about cities in one short sentence. " * 4
CITIES = ["Paris", "Rome", "Vienna", "Lisbon"]


async def ask(model: afterglow.Model, city: str) -> str:
    prompt = model.apply_chat_template([("system", SYSTEM), ("user", f"In which country is {city}?")])
    return "".join([text async for text in model.stream_async(prompt, max_tokens=24)])


async def main() -> None:
    with afterglow.load("smollm2", fetch=True) as model:
        answers = await asyncio.gather(*(ask(model, city) for city in CITIES))
        for city, answer in zip(CITIES, answers, strict=True):
            print(f"{city}: {answer.strip()}")


asyncio.run(main())
