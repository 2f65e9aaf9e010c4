"""Guesses copied from what was said before: where the newest tokens stood already, what followed them then.

Prompts and answers of one conversation share a history, so an answer finds what earlier turns said, also what an
edited prompt no longer contains. A token costs one look into a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import numpy as np

from afterglow.engine.scheduling.job import Job
from afterglow.engine.speculation.speculator import DraftRequest
from afterglow.engine.types.draft_stats import AcceptanceEstimator
from afterglow.engine.types.entries import Entries, EntryBuffer, common_prefix_length

NGRAM_TOKENS = 3  # tokens that have to agree: two agree too often, four too late
BITS_PER_TOKEN = 21  # of one token in a key; three fit into 64
TOKEN_MASK = (1 << BITS_PER_TOKEN) - 1
MAX_IDLE_INDEXES = 16  # histories of conversations that nobody is answering
MAX_INDEX_ENTRIES = 1 << 17  # entries of a history; a longer one begins again with its newest path
DECAY_PER_TOKEN = 0.99  # what a token before the last counts for
MATCH_PRIOR_WEIGHT_TOKENS = 16  # tokens that what is usual counts for


@dataclass(slots=True)
class MatchKind:
    """Guesses after so many tokens that came as they stood elsewhere. Every token shows whether one would have been
    right, so nothing has to be guessed to find out."""

    min_matched_tokens: int
    name: str
    prior_acceptance: float  # share that is right: of ten answers of SmolLM2 to much the same question
    acceptance: AcceptanceEstimator = field(
        default_factory=lambda: AcceptanceEstimator(decay=DECAY_PER_TOKEN, prior_weight=MATCH_PRIOR_WEIGHT_TOKENS)
    )

    @property
    def acceptance_rate(self) -> float:
        return self.acceptance.estimate(self.prior_acceptance)


class NgramIndex:
    """Everything that was said in a conversation, in the order in which it came, and where each three tokens stood.

    >>> history = History()
    >>> history.follow(np.array([7, 1, 2, 3, 4, 5, 1, 2, 3]))
    >>> history.guess(2)
    [4, 5]
    """

    def __init__(self) -> None:
        self._entries: list[int] = []
        self._current = (
            EntryBuffer()
        )  # the prompt and the answer that it stands at the end of, but for what is only logged
        self._synced_entries = 0  # entries of the log that are in the path, or are not of it
        self._positions: dict[int, int] = {}  # three tokens, as one number → where what follows them stands in the log
        self._match_position: int | None = None  # where in the log the next guess stands
        self.matched_tokens = 0  # tokens that came as they stood there
        self.generated_tokens = 0  # tokens since the prompt

    def match_prefix(self, prompt: Entries) -> int:
        """How many entries the prompt has in common with what was last said here."""
        self._current.extend(np.array(self._entries[self._synced_entries :], dtype=np.int64))
        self._synced_entries = len(self._entries)
        return common_prefix_length(self._current.entries, prompt)

    def add_prompt(self, prompt: Entries) -> None:
        """Go on with a prompt: what it has in common with the last stays, the rest is added."""
        keep = self.match_prefix(prompt)
        if keep < len(self._current):  # it leaves the path: a few tokens again, so that it is known where
            self._current.truncate(max(0, keep - NGRAM_TOKENS))
        keep = len(self._current)
        if len(self._entries) + len(prompt) - keep > MAX_INDEX_ENTRIES:
            self._entries, self._positions, keep = [], {}, 0
            self._current.truncate(0)
        self._current.extend(prompt[keep:])
        start = len(self._entries)
        self._entries += prompt[keep:].tolist()
        self._synced_entries = len(self._entries)
        self.generated_tokens = 0
        self._index_ngrams(max(start - NGRAM_TOKENS + 1, 0))

    def _index_ngrams(self, start: int) -> None:
        """Note where the tokens from `start` on stand, all but the last three: those are to be found elsewhere."""
        log = np.array(self._entries[start:], dtype=np.int64) & TOKEN_MASK
        self._match_position, self.matched_tokens = None, 0
        if len(log) < NGRAM_TOKENS:
            return
        keys = (log[:-2] << 2 * BITS_PER_TOKEN | log[1:-1] << BITS_PER_TOKEN | log[2:]).tolist()
        self._positions.update(zip(keys[:-1], range(start + NGRAM_TOKENS, len(self._entries)), strict=True))
        self._match_position = self._positions.get(keys[-1])
        self._positions[keys[-1]] = len(self._entries)

    def add_token(self, token: int) -> bool | None:
        """A token was said; whether it was the one that stood there, None where nothing did."""
        log, source, length = self._entries, self._match_position, len(self._entries)
        log.append(token)
        self.generated_tokens += 1
        if length < NGRAM_TOKENS - 1:
            return None
        key = (log[-3] & TOKEN_MASK) << 2 * BITS_PER_TOKEN | (log[-2] & TOKEN_MASK) << BITS_PER_TOKEN | token
        earlier = self._positions.get(key)
        self._positions[key] = length + 1
        if source is not None and source < length and log[source] == token:
            # A text that is being copied is followed where it is, also where its words stand elsewhere, too.
            self._match_position, self.matched_tokens = source + 1, self.matched_tokens + 1
            return True
        self._match_position, self.matched_tokens = earlier, 0
        return None if source is None or source >= length else False

    @property
    def has_match(self) -> bool:
        """Whether the newest tokens stood somewhere before."""
        return self._match_position is not None and self._match_position < len(self._entries)

    def draft(self, limit: int) -> list[int]:
        """What followed the newest tokens before; where that was so recent that it ends here, again and again."""
        if not self.has_match:
            return []
        assert self._match_position is not None
        guesses = list(islice(cycle(self._entries[self._match_position : self._match_position + limit]), limit))
        return guesses if min(guesses) >= 0 else guesses[: next(i for i, one in enumerate(guesses) if one < 0)]


class NgramDrafter:
    """The drafter that needs nothing but what was said."""

    name = "lookup"

    def __init__(self) -> None:
        self._idle_indexes: list[tuple[str, NgramIndex]] = []  # the longest idle first, and whose they are
        self._indexes: dict[Job, NgramIndex] = {}
        self._match_kinds = (
            MatchKind(16, "lookup, copying", 0.98),
            MatchKind(4, "lookup, following", 0.9),
            MatchKind(1, "lookup, again", 0.83),
            MatchKind(0, "lookup", 0.58),
        )

    def can_draft(self, job: Job) -> bool:
        return self._update_index(job).has_match

    def get_draft_kind(self, job: Job) -> str:
        return self._find_match_kind(self._indexes[job].matched_tokens).name

    def estimate_acceptance(self, job: Job) -> float:
        return self._find_match_kind(self._indexes[job].matched_tokens).acceptance_rate

    def estimate_catch_up_entries(self, job: Job) -> float:
        return 0.0

    def catch_up(self, jobs: Sequence[Job]) -> None:
        """Nothing to compute."""

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._update_index(job).draft(limit) for job, limit in draft_requests]

    def release(self, job: Job) -> None:
        """The job has ended; the next turn goes on with its history."""
        if job in self._indexes:
            self._update_index(job)
            self._idle_indexes.append((get_salt(job), self._indexes.pop(job)))
            del self._idle_indexes[:-MAX_IDLE_INDEXES]

    def run_idle_task(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to give back."""

    def _update_index(self, job: Job) -> NgramIndex:
        """The job's history with everything in it that is known."""
        history = self._indexes.get(job)
        if history is None:
            history = self._indexes[job] = self._open_index(job)
        for token in job.generated[history.generated_tokens :]:
            followed = history.matched_tokens
            right = history.add_token(token)
            if right is not None:
                self._find_match_kind(followed).acceptance.update(1, right)
        return history

    def _find_match_kind(self, matched_tokens: int) -> MatchKind:
        for kind in self._match_kinds:  # the last has no least; `next` would take twice as long, for every token
            if matched_tokens >= kind.min_matched_tokens:
                break
        return kind

    def _open_index(self, job: Job) -> NgramIndex:
        """Go on with the conversation that the prompt continues, or begin a new one."""
        own = [place for place, (owner, _) in enumerate(self._idle_indexes) if owner == get_salt(job)]
        best = max(own, key=lambda place: self._idle_indexes[place][1].match_prefix(job.prompt), default=None)
        history = NgramIndex()
        if best is not None and self._idle_indexes[best][1].match_prefix(job.prompt) >= NGRAM_TOKENS:
            history = self._idle_indexes.pop(best)[1]
        history.add_prompt(job.prompt)
        return history


def get_salt(job: Job) -> str:
    """Whose prompt it is: nobody's guesses come from what somebody else said."""
    return job.request.salt
