"""Guesses of a model's own multi-token-prediction heads: `MtpSession` drives them beside their model.

A head reads a token and the hidden state that the model had before it, and says what comes after. So it has to see
every decode of the model (`process`), and its memory follows the model's. It computes what it saw only when it is
asked for guesses: while nobody guesses, plain decoding hardly notices it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument, UnsupportedOperation, WrongState
from afterglow.llama.checks import check_float, check_integer
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.loader import get_library

MAX_HIDDEN_STATES = 64  # hidden states of one sequence that are kept: at the ends of its last decodes
MAX_BACKLOG_ENTRIES = 512  # newest entries of a sequence that wait to be computed; what is older the heads do without
HiddenState = NDArray[np.float32]
logger = logging.getLogger("afterglow.engine.speculation.mtp.session")


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSettings:
    """How a session guesses, as it was made."""

    sequences: int
    n_draft_max: int
    n_min: int = 0  # fewer guesses than this are not worth a decode, and are dropped
    p_min: float = 0.0  # a guess less likely than this ends the draft

    need_embd: bool = False  # embeddings are of no use to the heads
    need_embd_pre_norm: bool = True  # hidden states before the last norm are

    def __post_init__(self) -> None:
        check_integer("sequences", self.sequences, 1)
        check_integer("n_draft_max", self.n_draft_max, 1)
        check_integer("n_min", self.n_min, 0, self.n_draft_max)
        check_float("p_min", self.p_min, 0, 1)


@dataclass(slots=True)
class MtpStats:
    """What a session did so far."""

    draft_steps: int = 0  # drafts of one sequence that had a guess in them
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The share of guesses that were right."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


@dataclass(slots=True)
class HeadBacklog:
    """Entries that the heads have seen and not computed: tokens from a position on, and the state before each."""

    first_position: int = 0
    tokens: list[int] = field(default_factory=list)
    hidden_states: list[HiddenState] = field(default_factory=list)

    def add(self, first_position: int, tokens: list[int], hidden_states: list[HiddenState]) -> None:
        if self.first_position + len(self.tokens) != first_position:  # what waited leads elsewhere
            self.first_position, self.tokens, self.hidden_states = first_position, [], []
        self.tokens += tokens
        self.hidden_states += hidden_states
        self.drop(len(self.tokens) - MAX_BACKLOG_ENTRIES)

    def drop(self, count: int) -> None:
        """Forget the oldest."""
        if count > 0:
            del self.tokens[:count], self.hidden_states[:count]
            self.first_position += count

    def truncate(self, position: int) -> None:
        keep = max(0, position - self.first_position)
        del self.tokens[keep:], self.hidden_states[keep:]


class MtpSession:
    """The heads of a model, for people who drive its context themselves.

    >>> session = MtpSession(target, heads, sequences=1, n_draft_max=3)
    >>> target.decode()                          # the prompt
    >>> session.process()                        # after every decode of the target
    >>> guesses = session.draft({0: token})[0]   # behind the token that was sampled last
    >>> target.decode()                          # the token and the guesses, an output after each
    >>> session.process()
    >>> session.accept(0, right)                 # how many guesses were right; the others leave both memories
    """

    def __init__(
        self,
        target: LlamaContext,
        draft: LlamaContext,
        *,
        sequences: int,
        n_draft_max: int,
        n_min: int = 0,
        p_min: float = 0.0,
        restores_states: bool = False,
    ) -> None:
        """`replays`: wrong guesses leave the target because the caller puts a saved state back, not by `accept`."""
        self.settings = MtpSettings(sequences=sequences, n_draft_max=n_draft_max, n_min=n_min, p_min=p_min)
        _check_contexts(target, draft, self.settings)
        if not restores_states:
            _check_rollback(target, n_draft_max)
        self.target, self.draft_context = target, draft  # kept alive as long as the session
        self.stats = MtpStats()
        self._head_count = draft.model.info.mtp_layer_count
        width = target.model.embedding_width
        self._zero_state: HiddenState = np.zeros(width, dtype=np.float32)
        # By sequence: the position of the next entry → the hidden state before it.
        self._hidden_states: list[dict[int, HiddenState]] = [{} for _ in range(sequences)]
        self._backlogs = [HeadBacklog() for _ in range(sequences)]
        self._unverified: dict[int, int] = {}  # sequences with guesses that were not accepted or rejected yet
        self._recomputed_positions: dict[
            int, int
        ] = {}  # the position that a sequence computes again though the heads know it
        self._processed_decodes = target.decode_count
        target.enable_hidden_states(every_row=True)
        draft.enable_hidden_states(every_row=False)

    def begin(self, sequence: int) -> None:
        """Forget what the heads know of a sequence; it starts with the next `process`, wherever it stands."""
        self._check_sequence(sequence)
        self.draft_context.memory.remove(sequence)
        self._hidden_states[sequence] = {}
        self._backlogs[sequence] = HeadBacklog()
        self._unverified.pop(sequence, None)
        self._recomputed_positions.pop(sequence, None)

    def process(self) -> None:
        """Show the heads the rows that the target has just decoded. Once after every decode of the target."""
        if self.target.decode_count == self._processed_decodes:
            raise WrongState("process", "processed already", "decoded again first")
        self._processed_decodes = self.target.decode_count
        hidden = self.target.get_hidden_states()
        batch = self.target.batch
        for sequence, start, stop in self._find_runs(len(hidden)):
            first, rows = int(batch.positions[start]), self._hidden_states[sequence]
            skipped = max(
                stop - start - MAX_BACKLOG_ENTRIES, int(self._recomputed_positions.pop(sequence, -1) == first), 0
            )
            states = list(hidden[start + max(skipped - 1, 0) : stop - 1].copy())
            before = states if skipped else [rows.get(first, self._zero_state), *states]
            self._backlogs[sequence].add(first + skipped, batch.tokens[start + skipped : stop].tolist(), before)
            for back in range(min(stop - start, self.settings.n_draft_max + 1)):
                rows[first + stop - start - back] = hidden[stop - 1 - back].copy()  # a view would keep them all
            while len(rows) > MAX_HIDDEN_STATES:
                del rows[next(iter(rows))]

    def draft(self, last_tokens: Mapping[int, int], limits: Mapping[int, int] | None = None) -> dict[int, list[int]]:
        """Guesses behind the newest token of each sequence, which no memory holds yet; all in one batch.

        `limits` are the most guesses that a sequence wants, where that is fewer than `n_draft_max`.
        """
        most = self.settings.n_draft_max
        wanted = {one: check_integer("limit", (limits or {}).get(one, most), 0, most) for one in last_tokens}
        for sequence, token in last_tokens.items():
            self._check_sequence(sequence)
            self.target.model.vocabulary.check_token(token)
        drafts: dict[int, list[int]] = {sequence: [] for sequence in last_tokens}
        self._draft_tokens(dict(last_tokens), wanted, drafts)
        for sequence, guesses in drafts.items():
            if len(guesses) < self.settings.n_min:
                guesses.clear()
            self._unverified[sequence] = len(guesses)
            self.stats.draft_steps += bool(guesses)
            self.stats.draft_tokens += len(guesses)
        return drafts

    def accept(self, sequence: int, count: int) -> None:
        """The first `count` guesses about a sequence were right, 0 to all; the others leave both memories."""
        self._check_sequence(sequence)
        if sequence not in self._unverified:
            raise WrongState("accept", f"without guesses about sequence {sequence}", "drafted for first")
        drafted = self._unverified[sequence]
        check_integer("count", count, 0, drafted)
        if self._processed_decodes != self.target.decode_count:
            raise WrongState("accept", "decoded and not processed", "processed first")
        held = self.target.memory.get_position_range(sequence)
        end = held[1] + 1 - (drafted - count) if held else 0
        if not self.target.memory.remove(sequence, start=end):
            raise UnsupportedOperation("accept", f"sequence {sequence} cannot drop its last {drafted - count} entries")
        self.truncate(sequence, end)
        del self._unverified[sequence]
        self.stats.accepted_tokens += count
        logger.debug("sequence %d: %d of %d guesses were right; %s", sequence, count, drafted, self.stats)

    def truncate(self, sequence: int, position: int) -> None:
        """The target has dropped everything from `position` on."""
        self._recomputed_positions.pop(sequence, None)
        self._truncate_heads(sequence, position)
        self._backlogs[sequence].truncate(position)
        self._hidden_states[sequence] = {
            end: row for end, row in self._hidden_states[sequence].items() if end <= position
        }

    def expect_recompute(self, sequence: int, position: int) -> None:
        """The target has dropped its last entry, at `position`, to compute it again: the heads know it already, and
        get to see the hidden state after it."""
        self._recomputed_positions[sequence] = position

    def get_hidden_state(self, sequence: int, position: int) -> HiddenState | None:
        """The hidden state before `position`, where it is known: the first guess after it needs it."""
        return self._hidden_states[sequence].get(position)

    def set_hidden_state(self, sequence: int, position: int, hidden_state: HiddenState | None) -> None:
        """Put back a hidden state that was kept elsewhere."""
        if hidden_state is not None:
            self._hidden_states[sequence][position] = hidden_state

    # --- the heads' decodes

    def _find_runs(self, count: int) -> list[tuple[int, int, int]]:
        """The rows of each sequence in the target's batch, as (sequence, start, stop)."""
        sequences = self.target.batch.sequences[:count]
        edges = [0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist(), count]
        runs = [(int(sequences[start]), start, stop) for start, stop in itertools.pairwise(edges)]
        if len({sequence for sequence, _, _ in runs}) < len(runs):
            raise InvalidArgument("batch", "must hold the rows of each sequence one after the other")
        return [run for run in runs if run[0] < self.settings.sequences]

    def count_backlog(self, sequence: int) -> int:
        """Entries of a sequence that the heads have seen and not computed."""
        return len(self._backlogs[sequence].tokens)

    def catch_up(self, sequences: Iterable[int]) -> None:
        """Let the heads compute what they have seen of these sequences; otherwise they do when asked for guesses."""
        batch = self.draft_context.batch
        left = [sequence for sequence in sequences if self._backlogs[sequence].tokens]
        while left:
            batch.clear()
            parts: list[tuple[int, int]] = []
            for sequence in left:
                if batch.count < batch.capacity:
                    parts.append((sequence, self._fill_backlog_batch(sequence)))
            for head in range(self._head_count):
                if head:  # every head of a chain has cells of its own at the same positions
                    for sequence, first in parts:
                        self._truncate_heads(sequence, first)
                self._decode_head(head)
            left = [sequence for sequence in left if self._backlogs[sequence].tokens]

    def _fill_backlog_batch(self, sequence: int) -> int:
        """Put what waits, as much of it as fits, into the batch; the position it begins at."""
        batch, waiting = self.draft_context.batch, self._backlogs[sequence]
        row, first = batch.count, waiting.first_position
        count = min(len(waiting.tokens), batch.capacity - row)
        self._align_head_cache(sequence, first)
        batch.add(waiting.tokens[:count], position=first, sequence=sequence)
        assert batch.hidden_states is not None
        batch.hidden_states[row : row + count] = waiting.hidden_states[:count]
        waiting.drop(count)
        return first

    def _align_head_cache(self, sequence: int, position: int) -> None:
        """Let the heads' memory end right before `first`, or be empty: a sequence may start anywhere."""
        memory = self.draft_context.memory
        held = memory.get_position_range(sequence)
        if held is not None and held[1] + 1 != position:
            self._truncate_heads(sequence, position if held[1] >= position else 0)

    def _truncate_heads(self, sequence: int, position: int) -> None:
        """Drop what the heads hold from `position` on; all of it where their memory is a window that has passed."""
        memory = self.draft_context.memory
        if not memory.remove(sequence, start=position or None):
            memory.remove(sequence)

    def _decode_head(self, head: int) -> None:
        if self._head_count > 1:
            self.draft_context.set_mtp_head(head)
        self.draft_context.decode()
        if self._head_count > 1:
            self.draft_context.set_mtp_head(0)

    def _draft_tokens(self, last_tokens: dict[int, int], limits: dict[int, int], drafts: dict[int, list[int]]) -> None:
        """Fill `drafts`, one guess of every sequence in each decode."""
        ends = {sequence: self._find_end(sequence) for sequence in last_tokens}
        self.catch_up(last_tokens)
        rows = {sequence: [self._hidden_states[sequence].get(end, self._zero_state)] for sequence, end in ends.items()}
        for sequence, end in ends.items():
            self._align_head_cache(sequence, end)
        context = self.draft_context
        most = (
            self._head_count if self._head_count > 1 else self.settings.n_draft_max
        )  # a chain is as long as it has heads
        for step in range(min(most, max(limits.values(), default=0))):
            active = [sequence for sequence in last_tokens if limits[sequence] > step == len(drafts[sequence])]
            if not active:
                break
            self._fill_draft_batch(active, last_tokens, rows, ends, drafts, step)
            self._decode_head(step if self._head_count > 1 else 0)
            last = -1
            for sequence in active:
                last += 1 + (step if self._head_count > 1 else 0)
                guess = self._pick_token(last)
                if guess is None:
                    continue
                drafts[sequence].append(guess)
                rows[sequence].append(context.get_hidden_state(last).copy())
        for sequence, end in ends.items():
            self._truncate_heads(sequence, end)

    def _fill_draft_batch(
        self,
        active: list[int],
        last_tokens: dict[int, int],
        hidden_states: dict[int, list[HiddenState]],
        ends: dict[int, int],
        drafts: dict[int, list[int]],
        step: int,
    ) -> None:
        """The rows of one round of guesses. A single head goes on from its own state; in a chain the next head reads
        everything again."""
        batch = self.draft_context.batch
        batch.clear()
        assert batch.hidden_states is not None
        for sequence in active:
            row = batch.count
            if self._head_count == 1:
                token = drafts[sequence][-1] if step else last_tokens[sequence]
                batch.add_row(token, position=ends[sequence] + step, sequence=sequence, output=True)
            else:
                self._truncate_heads(sequence, ends[sequence])
                batch.add(
                    [last_tokens[sequence], *drafts[sequence]], position=ends[sequence], sequence=sequence, outputs=1
                )
            batch.hidden_states[row : batch.count] = hidden_states[sequence][row - batch.count :]

    def _pick_token(self, row: int) -> int | None:
        """The head's guess after a row; None where it is not likely enough."""
        logits = self.draft_context.get_logits(row)
        guess = int(logits.argmax())
        if self.settings.p_min > 0:
            probability = 1.0 / float(np.exp(logits - logits[guess]).sum())
            if probability < self.settings.p_min:
                return None
        return guess

    def _find_end(self, sequence: int) -> int:
        held = self.target.memory.get_position_range(sequence)
        if held is None:
            raise WrongState("draft", f"empty in sequence {sequence}", "decoded first")
        return held[1] + 1

    def _check_sequence(self, sequence: int) -> None:
        check_integer("sequence", sequence, 0, self.settings.sequences - 1)


def _check_contexts(target: LlamaContext, draft: LlamaContext, settings: MtpSettings) -> None:
    """A typed error for every pair of contexts that would not work, or abort."""
    if not get_library().supports_mtp:
        raise UnsupportedOperation("MTP", "this build of llama.cpp does not export its calls")
    if target.is_mtp or not target.model.info.mtp_layer_count:
        raise UnsupportedOperation("MTP", "the target's model has no MTP heads, or is itself the heads' context")
    if not draft.is_mtp or draft.model is not target.model:
        raise InvalidArgument("draft", "must be a context of the same model made with `mtp_of=target`")
    for name, context in (("target", target), ("draft", draft)):
        if context.sequences < settings.sequences:
            raise InvalidArgument("sequences", f"must be at most {context.sequences}, those of the {name}")
    if draft.batch.capacity < target.batch.capacity:
        raise InvalidArgument("draft", f"must take batches of {target.batch.capacity} rows, as the target does")
    if draft.max_outputs < settings.sequences:
        raise InvalidArgument("draft", f"must give an output for each of {settings.sequences} sequences")


def _check_rollback(target: LlamaContext, n_draft_max: int) -> None:
    if target.memory.kind in ("recurrent", "hybrid") and target.max_rollback < n_draft_max:
        raise InvalidArgument(
            "n_draft_max",
            f"must be at most {target.max_rollback}, the target's `rollback`: its memory could not drop wrong guesses",
        )
