"""Requests to the engine and the events it returns: plain values that can be sent between processes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.types.adapters import AdapterSet
from afterglow.engine.types.constraints import GrammarConstraint, ReasoningBudget
from afterglow.engine.types.entries import Entry
from afterglow.engine.types.media import MediaPart
from afterglow.errors import AfterglowError, InvalidArgument
from afterglow.llama.checks import check_float, check_integer
from afterglow.llama.sampling import Sampling

LONG_PREFILL_ENTRIES = 256
FinishReason: TypeAlias = Literal["stop", "length", "deadline"]
FinishCause: TypeAlias = tuple[FinishReason, bytes | int | None]  # and the stop text or token
PlanKind: TypeAlias = Literal["continue", "fork", "restore", "load", "fresh"]


class RetainedPrefix(NamedTuple):
    """Leading entries of a prompt that stay pinned for a time after the request."""

    length: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Generation request: one prompt and the options of its generation. Immutable.

    >>> Request(id="1", entries=[3, 1, 4], max_tokens=16).use_prefix_cache
    True
    """

    id: str  # identifies the request in events; unique among the requests of an engine that have not ended
    entries: Sequence[Entry] | NDArray[np.int64]  # prompt: token ids, and one `Media` entry per image or audio clip
    media: Mapping[bytes, MediaPart] = field(default_factory=dict)  # content of the media entries, by digest
    boundaries: frozenset[int] = frozenset()  # ends of messages: later prompts may diverge there; checkpoint positions
    retained: tuple[RetainedPrefix, ...] = ()  # pinned when the request has finished
    system_length: int = 0  # leading entries of system messages and tools, which other requests are likely to share
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None  # to generate. None: until the model ends the text or its sequence is full
    min_tokens: int = 0  # end-of-generation and stop tokens are forbidden until this many are generated
    stop: tuple[bytes, ...] = ()  # texts that end the generation; they may start or end inside a token
    stop_tokens: frozenset[int] = frozenset()
    constraint: GrammarConstraint | None = None  # grammar that the generated text must match
    reasoning_budget: ReasoningBudget | None = None  # limit on the number of reasoning tokens
    ignore_eos: bool = False  # continue after the model's end-of-generation tokens
    logprobs: int | None = None  # number of alternatives returned with each token. None: no log-probabilities at all
    logprob_tokens: tuple[int, ...] = ()  # tokens whose log-probabilities come after those of the alternatives
    priority: int = 0  # requests with a higher priority are scheduled first; below 0: background work
    is_transient: bool = False  # no later prompt continues it: its KV cache is evicted first and stored in no tier
    deadline: float | None = None  # seconds after submission at which it finishes with the tokens generated so far
    line_deadline: float | None = None  # seconds after the first token from which on the next line end finishes it
    min_indent: int = 0  # a line after the first with less indentation finishes it; 0: none does
    use_prefix_cache: bool = True  # reuse the computed prefixes of other requests. False: compute the whole prompt
    sequence: int | None = None  # number of the sequence (slot) to use. None: the planner chooses
    salt: str = ""  # of the tenant: cached state is never shared between, nor visible to, requests of different salts
    explained: bool = False  # whether its first progress says how it starts, and why not more of it is reused
    adapters: AdapterSet = ()  # LoRA adapters to compute with; requests with other sets share no cached state

    @property
    def is_background(self) -> bool:
        """Whether the request gives way to all that have the default priority."""
        return self.priority < 0

    @property
    def is_constrained(self) -> bool:
        """Whether the request has a token constraint, which must be compiled before it starts."""
        has_grammar = self.constraint is not None or bool(self.sampling.grammar)
        return has_grammar or self.reasoning_budget is not None or self.min_tokens > 0

    def ends_with(self, token: int, eog_tokens: Container[int]) -> bool:
        """Return whether this token ends the completion, whatever its text is."""
        return token in self.stop_tokens or (token in eog_tokens and not self.ignore_eos)

    @property
    def needs_logprobs(self) -> bool:
        """Whether every token is returned with log-probabilities."""
        return self.logprobs is not None or bool(self.logprob_tokens)

    def check(self) -> None:
        """Raise `InvalidArgument` if a field has a wrong type or range, before an engine step could fail on it."""
        for name in ("max_tokens", "logprobs", "sequence"):
            if (value := getattr(self, name)) is not None:
                check_integer(name, value, 0)
        check_integer("min_tokens", self.min_tokens, 0)
        check_integer("priority", self.priority)
        check_integer("system_length", self.system_length, 0, len(self.entries))
        check_integer("min_indent", self.min_indent, 0)
        has_grammar = self.constraint is not None or bool(self.sampling.grammar)
        if self.constraint is not None and self.sampling.grammar:
            raise InvalidArgument("sampling.grammar", "must be empty if the output has another constraint")
        if not isinstance(self.salt, str) or "\0" in self.salt:
            raise InvalidArgument("salt", f"must be text without a NUL character, not {self.salt!r}")
        if "infill" in self.sampling.samplers and (has_grammar or self.min_tokens):
            raise InvalidArgument("samplers", "must not have `infill` with a grammar or `min_tokens`: it ends the text")
        for name in ("deadline", "line_deadline"):
            if (seconds := getattr(self, name)) is not None:
                check_float(name, seconds, 0)
        for name, kind in (("stop", bytes), ("stop_tokens", int), ("boundaries", int), ("logprob_tokens", int)):
            values = getattr(self, name)
            if not isinstance(values, tuple | frozenset) or not all(isinstance(value, kind) for value in values):
                raise InvalidArgument(name, f"must be a tuple or frozenset of {kind.__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens and time that one request used.

    An image or audio clip counts as the KV cells that it occupies. The three times are consecutive: `queue_seconds`
    until the request gets a sequence, `prefill_seconds` until its first token, `decode_seconds` until its end.
    """

    prompt_tokens: int = 0  # including media
    cached_tokens: int = 0  # prompt tokens that were a prefix hit and not computed, including media
    replayed_tokens: int = 0  # prompt tokens of the model's own messages, as it sampled them
    replay_misses: tuple[tuple[int, str], ...] = ()  # other messages of the assistant, with why they were not replayed
    media_tokens: int = 0  # prompt tokens that are images or audio
    audio_tokens: int = 0  # media tokens that are audio
    cached_media_tokens: int = 0  # media tokens that were a prefix hit
    encoded_media: int = 0  # images and audio clips that had to be encoded
    generated_tokens: int = 0
    draft_tokens: int = 0  # draft tokens that were decoded for verification
    accepted_tokens: int = 0  # draft tokens that were accepted; each one saved a decode
    draft_steps: int = 0  # decodes that contained draft tokens
    speculation_seconds_saved: float = 0.0  # measured; negative if speculative decoding cost time
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    sequence: int | None = None  # that the request had at its end; None if it had none

    @property
    def mean_draft_length(self) -> float:
        """Average number of draft tokens per draft step."""
        return self.draft_tokens / self.draft_steps if self.draft_steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrefix:
    """How the prefill of a request starts, and where its prompt differs from the nearest cached prefix."""

    kind: PlanKind
    tier: str  # slowest tier that the prefix comes from: "device", "ram", "disk", "shared"; "none" for a miss
    reused_entries: int
    seconds_saved: float  # estimated time to compute them, less that to load them; negative if loading takes longer
    shared_entries: int  # this and the next two as in `Explanation`
    evicted_entries: int
    cause: str
    common_length: int  # entries that the prompt shares with the nearest cached prefix, which may be evicted
    cached_entries: tuple[int, ...]  # first entries of that prefix after those; negative entries are media


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Number of prompt entries in the KV cache: as soon as the plan is known, and after each chunk but the last.

    >>> PrefillProgress("1", computed_entries=300, prompt_entries=400, cached_entries=100, seconds=2.0).seconds_left
    1.0
    """

    request_id: str
    computed_entries: int  # including cached ones
    prompt_entries: int
    cached_entries: int = 0  # prefix hit
    seconds: float = 0.0  # since the prefill began
    prompt_tokens: int = 0  # as in `Usage`
    cached_tokens: int = 0  # as in `Usage`
    plan: PlannedPrefix | None = None  # of the first progress of a request that is `explained`

    @property
    def is_long(self) -> bool:
        """Whether the rest of the prefill may take seconds."""
        return self.prompt_entries - self.computed_entries > LONG_PREFILL_ENTRIES

    @property
    def share(self) -> float:
        """Share of the prompt that is in the KV cache, from 0 to 1."""
        return self.computed_entries / self.prompt_entries

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time until the first token, at the speed of this prefill. None if nothing is computed yet."""
        computed = self.computed_entries - self.cached_entries
        return self.seconds * (self.prompt_entries - self.computed_entries) / computed if computed > 0 else None


class Token(NamedTuple):
    """Next generated token. `alternatives` are the most likely tokens at its position with their log-probabilities.

    The `logprob_tokens` of the request follow them.

    A named tuple because tokens are frequent: it is created and sent in half the time of a dataclass.
    """

    request_id: str
    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation is complete. `stop_reason` is the stop text or token that ended it, if any."""

    request_id: str
    finish_reason: FinishReason
    usage: Usage
    stop_reason: bytes | int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error. Tokens sent before it remain valid."""

    request_id: str
    error: AfterglowError
    usage: Usage


EngineEvent: TypeAlias = PrefillProgress | Token | Finished | Failed
EndEvent: TypeAlias = Finished | Failed
