"""Conversion of llama-server's prompts to tokens."""

from __future__ import annotations

from collections.abc import Sequence

from afterglow.api.model import Model
from afterglow.server.errors import invalid_request_error
from afterglow.server.llamacpp.schema import LlamaPrompt, PromptObject

SinglePrompt = str | PromptObject | Sequence[int | str]


def list_prompts(prompt: LlamaPrompt) -> list[SinglePrompt]:
    """Return the prompts of a request. A list that contains a token is one prompt, any other a list of prompts.

    >>> list_prompts([1, "two"]), list_prompts(["one", [2, 3]])
    ([[1, 'two']], ['one', [2, 3]])
    """
    if not isinstance(prompt, list):
        return [prompt]
    if any(isinstance(part, int) for part in prompt):
        if not all(isinstance(part, int | str) for part in prompt):
            raise invalid_request_error("prompt", "`prompt` must not mix tokens and whole prompts in one list")
        return [[part for part in prompt if isinstance(part, int | str)]]
    return [part for part in prompt if not isinstance(part, int)]


def tokenize_prompt(model: Model, prompt: SinglePrompt, *, special: bool = True, bos: bool = True) -> list[int]:
    """Tokenize a prompt. With `special`, control tokens in texts are parsed.

    With `bos`, a text at its start gets the special tokens that start a prompt.
    """
    if isinstance(prompt, PromptObject):
        prompt = prompt.prompt_string
    parts: Sequence[int | str] = [prompt] if isinstance(prompt, str) else prompt
    tokens: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            tokens += model.tokenize(part, special=special, bos=bos and index == 0)
        else:
            tokens += map(int, model.vocabulary.check_tokens([part]))
    return tokens
