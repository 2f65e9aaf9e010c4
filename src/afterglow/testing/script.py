"""Scripted answers: a loaded model writes given texts instead of what it would sample."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from operator import attrgetter
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from afterglow.api.model import Model
from afterglow.chat.messages import ToolCall
from afterglow.chat.tools.text_tools import format_call
from afterglow.errors import InvalidArgument, InvalidGrammar
from afterglow.llama.sampling import Sampling


@contextmanager
def script_answers(model: Model, answers: Sequence[str]) -> Iterator[None]:
    """Let each request of a model write the next of these answers, in the order in which the requests begin.

    Only the sampling is replaced: the template, the prefix cache, the parsers and the token constraints are the real
    ones. An answer that a constraint forbids raises `InvalidGrammar`; a request without an answer `InvalidArgument`.

    >>> import afterglow
    >>> from afterglow.testing import models
    >>> with afterglow.load(models.get_path("attention")) as model, script_answers(model, ["Paris."]):
    ...     model.chat("What is the capital of France?").text
    'Paris.'
    """
    numbers = count()

    def create_sampler(sampling: Sampling) -> ScriptedSampler:
        number = next(numbers)
        if number >= len(answers):
            raise InvalidArgument("answers", f"must be one per request, but are only {len(answers)}")
        end_token = min(model.vocabulary.eog_tokens)
        return ScriptedSampler(answers[number], [*model.tokenize(answers[number]), end_token])

    backend = model._get_host().call(attrgetter("backend"))
    with mock.patch.object(backend, "create_sampler", create_sampler):
        yield


def write_call(name: str, **arguments: object) -> str:
    """Return a tool call as the tiny models write it: their template has no format of its own.

    >>> print(write_call("weather", city="Paris"))
    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>
    """
    return format_call(ToolCall(id="", name=name, arguments=json.dumps(arguments, ensure_ascii=False)))


class ScriptedSampler:
    """Returns the tokens of one answer, whatever the logits are."""

    def __init__(self, answer: str, tokens: Sequence[int]) -> None:
        self._answer, self._tokens, self._accepted = answer, tokens, 0

    def sample(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int:
        """Return the next token of the answer, or its end token after the end."""
        token = self._tokens[min(self._accepted, len(self._tokens) - 1)]
        if allowed is not None and token not in allowed:
            raise InvalidGrammar(f"token {self._accepted} of the scripted answer {self._answer!r} is not allowed")
        return token

    def sample_and_accept(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int:
        """Return the next token of the answer and advance."""
        token = self.sample(logits, allowed)
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Advance by one token."""
        self._accepted += 1

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
