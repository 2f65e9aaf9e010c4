"""N-gram drafter: proposes what followed the last occurrence of the newest three tokens.

The prompts and completions of a conversation share one index, so a completion finds what earlier turns contained, also
text that an edited prompt no longer has. Each token costs one table lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from sys import getsizeof

import numpy as np

from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.scheduling.job import Job, RunningJob
from afterglow.engine.speculation.speculator import DraftRequest
from afterglow.engine.types.draft_stats import AcceptanceEstimator
from afterglow.engine.types.entries import Entries, EntryBuffer, common_prefix_length, strip_labels

NGRAM_TOKENS = 3  # two match too often, four too late
BITS_PER_TOKEN = 21  # of a key; three tokens fit into 64 bits
TOKEN_MASK = (1 << BITS_PER_TOKEN) - 1
MAX_IDLE_INDEXES = 16  # indexes of conversations without a running job
MAX_IDLE_FRACTION = 1 / 8  # of the RAM budget, for these indexes
MAX_INDEX_ENTRIES = 1 << 17  # a longer index is rebuilt from the current prompt
BYTES_PER_NGRAM = 68  # key and value as Python integers
DECAY_PER_TOKEN = 0.99  # weight of a token relative to the next one
MATCH_PRIOR_WEIGHT_TOKENS = 16


@dataclass(slots=True)
class MatchKind:
    """Drafts after at least `min_matched_tokens` tokens that equalled the matched text.

    Every generated token shows whether a draft token would have been accepted, so the acceptance rate is learned
    without drafting.
    """

    min_matched_tokens: int
    name: str
    prior_acceptance: float  # measured with ten answers of SmolLM2 to much the same question
    acceptance: AcceptanceEstimator = field(
        default_factory=lambda: AcceptanceEstimator(decay=DECAY_PER_TOKEN, prior_weight=MATCH_PRIOR_WEIGHT_TOKENS)
    )

    @property
    def acceptance_rate(self) -> float:
        return self.acceptance.estimate(self.prior_acceptance)


class NgramIndex:
    """All entries of a conversation in order of arrival, and the last position of each three-token sequence.

    >>> index = NgramIndex()
    >>> index.add_prompt(np.array([7, 1, 2, 3, 4, 5, 1, 2, 3]))
    >>> index.draft(2)
    [4, 5]
    """

    def __init__(self) -> None:
        self._entries: list[int] = []  # the log
        self._current = EntryBuffer()  # the current prompt and completion, synchronized lazily with the log
        self._synced_entries = 0  # log entries that are in `_current`, or do not belong to it
        self._positions: dict[int, int] = {}  # three tokens as one integer → position in the log after them
        self._match_position: int | None = None  # position in the log of the next draft token
        self.matched_tokens = 0  # consecutive tokens that equalled the log there
        self.generated_tokens = 0  # tokens since the prompt

    @property
    def nbytes(self) -> int:
        """Bytes of the log and of the table. It is the same until an entry is added."""
        log_bytes = (getsizeof(0) + 2 * self._current.entries.itemsize) * len(self._entries)
        table_bytes = getsizeof(self._positions) + BYTES_PER_NGRAM * len(self._positions)
        return log_bytes + getsizeof(self._entries) + table_bytes

    def match_prefix(self, prompt: Entries) -> int:
        """Return the length of the common prefix with the current prompt and completion."""
        self._current.extend(np.array(self._entries[self._synced_entries :], dtype=np.int64))
        self._synced_entries = len(self._entries)
        return common_prefix_length(self._current.entries, prompt)

    def add_prompt(self, prompt: Entries) -> None:
        """Continue with a prompt: the common prefix stays, the rest is appended."""
        start = self.match_prefix(prompt)
        if start < len(self._current):  # diverges: repeat a few tokens, so that the n-gram at the divergence is indexed
            self._current.truncate(max(0, start - NGRAM_TOKENS))
        start = len(self._current)
        if len(self._entries) + len(prompt) - start > MAX_INDEX_ENTRIES:
            self._entries, self._positions, start = [], {}, 0
            self._current.truncate(0)
        self._current.extend(prompt[start:])
        log_start = len(self._entries)
        self._entries += prompt[start:].tolist()
        self._synced_entries = len(self._entries)
        self.generated_tokens = 0
        # Index the n-grams of the new entries. The last three are looked up before they are indexed.
        first = max(log_start - NGRAM_TOKENS + 1, 0)
        log = np.array(self._entries[first:], dtype=np.int64) & TOKEN_MASK
        self._match_position, self.matched_tokens = None, 0
        if len(log) >= NGRAM_TOKENS:
            keys = (log[:-2] << 2 * BITS_PER_TOKEN | log[1:-1] << BITS_PER_TOKEN | log[2:]).tolist()
            self._positions.update(zip(keys[:-1], range(first + NGRAM_TOKENS, len(self._entries)), strict=True))
            self._match_position = self._positions.get(keys[-1])
            self._positions[keys[-1]] = len(self._entries)

    def add_token(self, token: int) -> bool | None:
        """Append a generated token. Return whether it equals the matched text, None if there was no match."""
        log, match_position, length = self._entries, self._match_position, len(self._entries)
        log.append(token)
        self.generated_tokens += 1
        if length < NGRAM_TOKENS - 1:
            return None
        key = (log[-3] & TOKEN_MASK) << 2 * BITS_PER_TOKEN | (log[-2] & TOKEN_MASK) << BITS_PER_TOKEN | token
        last_position = self._positions.get(key)
        self._positions[key] = length + 1
        if match_position is not None and match_position < length and log[match_position] == token:
            # Stay in the text that is being copied, even if its n-grams also occur elsewhere.
            self._match_position, self.matched_tokens = match_position + 1, self.matched_tokens + 1
            return True
        self._match_position, self.matched_tokens = last_position, 0
        return None if match_position is None or match_position >= length else False

    @property
    def has_match(self) -> bool:
        """Whether the newest three tokens occurred before."""
        return self._match_position is not None and self._match_position < len(self._entries)

    def draft(self, limit: int) -> list[int]:
        """Return up to `limit` tokens that followed the match, repeated if the match reaches the end of the log."""
        if not self.has_match:
            return []
        assert self._match_position is not None
        tokens = list(islice(cycle(self._entries[self._match_position : self._match_position + limit]), limit))
        # Media entries are negative and cannot be drafted.
        return tokens if min(tokens) >= 0 else tokens[: next(i for i, token in enumerate(tokens) if token < 0)]


class NgramDrafter:
    """Drafter without a model: uses only the entries of the conversation. Indexes are not shared between salts."""

    name = "ngram"

    def __init__(self, ram: RamTier | None = None) -> None:
        """Idle indexes count in the budget of `ram`, up to `MAX_IDLE_FRACTION` of it."""
        self._ram = ram
        self._idle_indexes: list[tuple[str, NgramIndex]] = []  # with their salt, least recently used first
        self._indexes: dict[Job, NgramIndex] = {}
        self._match_kinds = (
            MatchKind(16, "ngram, 16 matched", 0.98),
            MatchKind(4, "ngram, 4 matched", 0.9),
            MatchKind(1, "ngram, 1 matched", 0.83),
            MatchKind(0, "ngram", 0.58),
        )

    def can_draft(self, running: RunningJob) -> bool:
        return self._update_index(running.job).has_match

    def get_draft_kind(self, running: RunningJob) -> str:
        return self._find_match_kind(self._indexes[running.job].matched_tokens).name

    def estimate_acceptance(self, running: RunningJob) -> float:
        return self._find_match_kind(self._indexes[running.job].matched_tokens).acceptance_rate

    def estimate_catch_up_entries(self, running: RunningJob) -> float:
        return 0.0

    def catch_up(self, jobs: Sequence[RunningJob]) -> None:
        """Do nothing: there is nothing to compute."""

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._update_index(running.job).draft(limit) for running, limit in draft_requests]

    def release(self, job: Job) -> None:
        """Keep the index of a job that has ended for the next turn of the conversation."""
        if job not in self._indexes:
            return
        index = self._update_index(job)
        del self._indexes[job]
        while self._idle_indexes and (len(self._idle_indexes) == MAX_IDLE_INDEXES or not self._fits(index)):
            self._pop_idle(0)
        if self._ram is None or (self._fits(index) and self._ram.reserve("ngrams", index.nbytes)):
            self._idle_indexes.append((job.request.salt, index))

    def _fits(self, index: NgramIndex) -> bool:
        """Return whether an index can become idle within the share of the RAM budget."""
        if self._ram is None:
            return True
        budget = self._ram.budget
        return budget.get("ngrams") + index.nbytes <= budget.limit * MAX_IDLE_FRACTION

    def _pop_idle(self, number: int) -> NgramIndex:
        index = self._idle_indexes.pop(number)[1]
        if self._ram is not None:
            self._ram.budget.remove("ngrams", index.nbytes)
        return index

    def run_idle_task(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: there are no resources to free."""

    def _update_index(self, job: Job) -> NgramIndex:
        """Return the job's index with all known entries in it."""
        index = self._indexes.get(job)
        if index is None:
            index = self._indexes[job] = self._open_index(job)
        for token in job.generated[index.generated_tokens :]:
            matched_tokens = index.matched_tokens
            is_match = index.add_token(token)
            if is_match is not None:
                self._find_match_kind(matched_tokens).acceptance.update(1, is_match)
        return index

    def _find_match_kind(self, matched_tokens: int) -> MatchKind:
        for kind in self._match_kinds:  # the last one always matches; `next` would take twice as long per token
            if matched_tokens >= kind.min_matched_tokens:
                break
        return kind

    def _open_index(self, job: Job) -> NgramIndex:
        """Continue the idle index with the longest common prefix, or create a new one."""
        prompt = strip_labels(job.prompt)
        candidates = [number for number, (salt, _) in enumerate(self._idle_indexes) if salt == job.request.salt]
        best = max(candidates, key=lambda number: self._idle_indexes[number][1].match_prefix(prompt), default=None)
        index = NgramIndex()
        if best is not None and self._idle_indexes[best][1].match_prefix(prompt) >= NGRAM_TOKENS:
            index = self._pop_idle(best)
        index.add_prompt(prompt)
        return index
