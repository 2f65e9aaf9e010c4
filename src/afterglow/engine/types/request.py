"""What is asked of the engine and what it answers: plain values that can cross a process border."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.types.constraints import GrammarConstraint, ReasoningBudget
from afterglow.engine.types.entries import Entry
from afterglow.engine.types.media import MediaPart
from afterglow.errors import AfterglowError, InvalidArgument
from afterglow.llama.checks import check_float, check_integer
from afterglow.llama.sampling import Sampling

FinishReason: TypeAlias = Literal["stop", "length", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked. It never changes."""

    id: str
    entries: Sequence[Entry] | NDArray[np.int64]
    media: Mapping[bytes, MediaPart] = field(default_factory=dict)  # of the media among the entries, by their digests
    boundaries: frozenset[int] = frozenset()  # where a later prompt may diverge: the ends of messages
    system_length: int = 0  # entries that its system messages and tools are: other requests begin so, too
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None  # None: until the model ends or memory does
    stop: tuple[bytes, ...] = ()  # texts that end the answer, wherever they fall among tokens
    stop_tokens: frozenset[int] = frozenset()
    constraint: GrammarConstraint | None = None  # what the answer may be
    reasoning_budget: ReasoningBudget | None = None  # how long it may think
    ignore_eos: bool = False  # go on after the model's own end tokens
    logprobs: int | None = None  # how many alternatives to report with each token; None: no logprobs at all
    priority: int = 0  # higher goes first
    deadline: float | None = None  # seconds from submission; the answer so far is the answer then
    use_prefix_cache: bool = True
    sequence: int | None = None  # the slot of memory to use, where the caller wants a certain one
    salt: str = ""  # whose prompt it is: what was computed for one salt is never used, nor seen, with another

    @property
    def is_constrained(self) -> bool:
        """Whether something leads the choice of tokens that has to be compiled first."""
        return self.constraint is not None or self.reasoning_budget is not None

    def check(self) -> None:
        """`InvalidArgument` where a field is of another kind: it would be found out in the middle of a step."""
        for name in ("max_tokens", "logprobs", "sequence"):
            if (value := getattr(self, name)) is not None:
                check_integer(name, value, 0)
        check_integer("priority", self.priority)
        check_integer("system_length", self.system_length, 0, len(self.entries))
        if not isinstance(self.salt, str):
            raise InvalidArgument("salt", f"must be text, not {self.salt!r}")
        if self.deadline is not None:
            check_float("deadline", self.deadline, 0)
        for name, kind in (("stop", bytes), ("stop_tokens", int), ("boundaries", int)):
            values = getattr(self, name)
            if not isinstance(values, tuple | frozenset) or not all(isinstance(value, kind) for value in values):
                raise InvalidArgument(name, f"must be a tuple or frozenset of {kind.__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request took. Times in seconds."""

    prompt_tokens: int = 0  # tokens, and the cells of pictures and sounds
    cached_tokens: int = 0  # those of them that were not computed again
    media_tokens: int = 0  # cells of pictures and sounds in the prompt
    audio_tokens: int = 0  # of these, the cells of sounds
    cached_media_tokens: int = 0  # of these, the cells that were in memory
    encoded_media: int = 0  # pictures and sounds that had to be encoded
    generated_tokens: int = 0
    draft_tokens: int = 0  # tokens that were guessed and computed before they were drawn
    accepted_tokens: int = 0  # and those of them that were drawn: as many decodes were saved
    draft_steps: int = 0  # decodes that had guesses
    speculation_seconds_saved: float = 0.0  # by guesses, as far as measured; less than 0 where they lost
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def mean_draft_length(self) -> float:
        """How many tokens were guessed at a time, on average."""
        return self.draft_tokens / self.draft_steps if self.draft_steps else 0.0


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """So many of the prompt's entries are in memory."""

    request_id: str
    computed_entries: int
    prompt_entries: int


class Token(NamedTuple):
    """The next token of an answer. `alternatives` are the likeliest tokens here with their log-probabilities.

    A tuple, since there are so many: they are made and sent on in half the time.
    """

    request_id: str
    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete. `stop` is the text or token that ended it, where one did."""

    request_id: str
    finish_reason: FinishReason
    usage: Usage
    stop_reason: bytes | int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no answer, or only the part that came before."""

    request_id: str
    error: AfterglowError
    usage: Usage


EngineEvent: TypeAlias = PrefillProgress | Token | Finished | Failed
EndEvent: TypeAlias = Finished | Failed
