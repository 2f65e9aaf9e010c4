"""What is asked of the engine and what it answers: plain values that can cross a process border."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.constraint import Constraint
from afterglow.engine.entries import Entry
from afterglow.engine.pictures import Part
from afterglow.engine.thought import ThoughtBudget
from afterglow.errors import AfterglowError, InvalidArgument
from afterglow.llama.arguments import integer, real
from afterglow.llama.sampling import Sampling

Reason: TypeAlias = Literal["stop", "length", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked. It never changes."""

    id: str
    entries: Sequence[Entry] | NDArray[np.int64]
    contents: Mapping[bytes, Part] = field(default_factory=dict)  # of the media among the entries, by their digests
    boundaries: frozenset[int] = frozenset()  # where a later prompt may diverge: the ends of messages
    system: int = 0  # entries that its system messages and tools are: other requests begin so, too
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None  # None: until the model ends or memory does
    stop: tuple[bytes, ...] = ()  # texts that end the answer, wherever they fall among tokens
    stop_tokens: frozenset[int] = frozenset()
    constraint: Constraint | None = None  # what the answer may be
    thought: ThoughtBudget | None = None  # how long it may think
    ignore_ends: bool = False  # go on after the model's own end tokens
    logprobs: int | None = None  # how many alternatives to report with each token; None: no logprobs at all
    priority: int = 0  # higher goes first
    deadline: float | None = None  # seconds from submission; the answer so far is the answer then
    reuse: bool = True
    sequence: int | None = None  # the slot of memory to use, where the caller wants a certain one
    salt: str = ""  # whose prompt it is: what was computed for one salt is never used, nor seen, with another

    @property
    def guided(self) -> bool:
        """Whether something leads the choice of tokens that has to be compiled first."""
        return self.constraint is not None or self.thought is not None

    def check(self) -> None:
        """`InvalidArgument` where a field is of another kind: it would be found out in the middle of a step."""
        for name in ("max_tokens", "logprobs", "sequence"):
            if (value := getattr(self, name)) is not None:
                integer(name, value, 0)
        integer("priority", self.priority)
        integer("system", self.system, 0, len(self.entries))
        if not isinstance(self.salt, str):
            raise InvalidArgument("salt", f"must be text, not {self.salt!r}")
        if self.deadline is not None:
            real("deadline", self.deadline, 0)
        for name, kind in (("stop", bytes), ("stop_tokens", int), ("boundaries", int)):
            values = getattr(self, name)
            if not isinstance(values, tuple | frozenset) or not all(isinstance(value, kind) for value in values):
                raise InvalidArgument(name, f"must be a tuple or frozenset of {kind.__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request took. Times in seconds."""

    prompt: int = 0  # tokens, and the cells of pictures and sounds
    cached: int = 0  # those of them that were not computed again
    media: int = 0  # cells of pictures and sounds in the prompt
    audio: int = 0  # of these, the cells of sounds
    media_cached: int = 0  # of these, the cells that were in memory
    encoded: int = 0  # pictures and sounds that had to be encoded
    generated: int = 0
    drafted: int = 0  # tokens that were guessed and computed before they were drawn
    accepted: int = 0  # and those of them that were drawn: as many decodes were saved
    drafts: int = 0  # decodes that had guesses
    seconds_saved: float = 0.0  # by guesses, as far as measured; less than 0 where they lost
    queue_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0

    @property
    def draft_length(self) -> float:
        """How many tokens were guessed at a time, on average."""
        return self.drafted / self.drafts if self.drafts else 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """So many of the prompt's entries are in memory."""

    id: str
    done: int
    total: int


class Token(NamedTuple):
    """The next token of an answer. `alternatives` are the likeliest tokens here with their log-probabilities.

    A tuple, since there are so many: they are made and sent on in half the time.
    """

    id: str
    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete. `stop` is the text or token that ended it, where one did."""

    id: str
    reason: Reason
    usage: Usage
    stop: bytes | int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no answer, or only the part that came before."""

    id: str
    error: AfterglowError
    usage: Usage


Event: TypeAlias = Progress | Token | Finished | Failed
EndEvent: TypeAlias = Finished | Failed
