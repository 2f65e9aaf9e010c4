"""Calls that a type checker must accept. They are never run."""

from __future__ import annotations

from pathlib import Path

import afterglow
from afterglow.api.options import ChatGenerationOptions, GenerationOptions, LoadOptions, check_options
from afterglow.engine.host.lifecycle import LoadState
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.sampling import Sampling

afterglow.load("model")
afterglow.load(Path("model.gguf"), context=512, sequences=2, threads=None, gpu_layers=-1, cache_type_k="q8_0")
afterglow.load("model", tensor_split=(3, 1), mmap=False, flash_attention=None, rope_scaling="yarn", yarn_ext_factor=0.5)
afterglow.load("model", draft="mtp", speculation=4, projector=False, chat_template=Path("template.jinja"))
afterglow.load("model", ram_cache_bytes=2**30, deterministic=True, engine=EngineSettings(grid=32), state="warm")
afterglow.load("model", draft=Path("draft.gguf"), speculation="off", state=LoadState.COLD, fetch=True)

shared: LoadOptions = {"context": 512, "strip_media": True}
afterglow.load("model", **shared)
one: GenerationOptions = {"max_tokens": None, "sampling": Sampling(top_k=1), "stop": ["END"], "boundaries": (3, 4)}
both: ChatGenerationOptions = {
    "temperature": 0,
    "tool_choice": "auto",
    "response_format": list[int],
    "reasoning": False,
}
context: int | None = check_options(LoadOptions, {})["context"]

model: afterglow.Model = afterglow.load("model")
model.chat("Why?", max_tokens=3, tool_choice={"type": "function"}, response_format={"type": "text"}, reasoning="low")
model.complete("Why?", max_tokens=None, temperature=0.5, seed=3, stop=("a", "b"), logprobs=2, overflow="shift")
model.stream("Why?", **one)
