"""Structured output: a pydantic class, a regular expression, a choice."""

from pydantic import BaseModel, Field

import afterglow


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


with afterglow.load("smollm2", fetch=True) as model:
    print(model.chat("Bob is 42 years old.", response_format=Person, max_tokens=80).parsed)
    print(model.chat("When was Rome founded?", response_format={"type": "regex", "pattern": "[0-9]{3,4} BC"}).text)
    print(model.chat("Is snow black?", response_format={"type": "choice", "choices": ["yes", "no"]}).text)
