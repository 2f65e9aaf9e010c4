"""Calls that a type checker must reject: one error on each line that ends with `# error`. They are never run."""

from __future__ import annotations

import afterglow
from afterglow.api.options import ChatGenerationOptions, GenerationOptions, LoadOptions, check_options

afterglow.load("model", contxt=512)  # error
afterglow.load("model", context="512")  # error
afterglow.load("model", threads="2")  # error
afterglow.load("model", cache_type_k="q9_0")  # error
afterglow.load("model", tensor_split=3)  # error
afterglow.load("model", speculation="always")  # error
afterglow.load("model", projector=True)  # error
afterglow.load("model", ram_cache_bytes="4GiB")  # error
afterglow.load("model", state="nonsense")  # error
afterglow.load("model", engine={"grid": 32})  # error
afterglow.load(3)  # error

shared: LoadOptions = {"contxt": 512}  # error
one: GenerationOptions = {"max_tokens": "3"}  # error
two: GenerationOptions = {"stop": "END"}  # error
both: ChatGenerationOptions = {"reasoning": 0.5}  # error
context: str = check_options(LoadOptions, {})["context"]  # error

model: afterglow.Model = afterglow.load("model")
model.chat("Why?", max_tokns=3)  # error
model.chat("Why?", max_tokens="3")  # error
model.chat("Why?", reasoning=0.5)  # error
model.complete("Why?", temprature=1)  # error
model.complete("Why?", stop="END")  # error
model.complete("Why?", reasoning=True)  # error
model.stream("Why?", overflow="shfit")  # error
model.apply_chat_template("Why?", temperature=1)  # error
model.chat("Why?", host="process")  # error
afterglow.load("model", host="fiber")  # error
afterglow.Conversation(model, temprature=1)  # error
afterglow.Conversation(model).ask("Why?", max_tokns=1)  # error
