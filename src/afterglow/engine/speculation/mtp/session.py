"""`MtpSession`: drives the multi-token-prediction heads of a model next to the model's own context.

A head reads a token and the model's hidden state before it, and predicts the token after it. So it has to see every
decode of the model (`process`), and its KV cache follows the model's. It computes what it has seen only when draft
tokens are requested, so it costs plain decoding almost nothing.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import InvalidArgument, UnsupportedOperation, WrongState
from afterglow.llama.batch import Batch
from afterglow.llama.checks import check_float, check_integer
from afterglow.llama.context import LlamaContext
from afterglow.llama.library.loader import get_library

MAX_HIDDEN_STATES = 64  # per sequence, at the ends of its last decodes
MAX_BACKLOG_ENTRIES = 512  # newest entries per sequence; the heads skip older ones
HiddenState = NDArray[np.float32]
logger = logging.getLogger("afterglow.engine.speculation.mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSettings:
    """Configuration of a session."""

    sequences: int
    n_draft_max: int
    n_min: int = 0  # shorter drafts are dropped: not worth a decode
    p_min: float = 0.0  # a draft token less likely than this ends the draft

    need_embd: bool = False  # the heads do not use embeddings
    need_embd_pre_norm: bool = True  # they use the hidden states before the last norm

    def __post_init__(self) -> None:
        check_integer("sequences", self.sequences, 1)
        check_integer("n_draft_max", self.n_draft_max, 1)
        check_integer("n_min", self.n_min, 0, self.n_draft_max)
        check_float("p_min", self.p_min, 0, 1)


@dataclass(slots=True)
class MtpStats:
    """Counters of a session."""

    draft_steps: int = 0  # drafts of one sequence with at least one token
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Share of draft tokens that were accepted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


@dataclass(slots=True)
class HeadBacklog:
    """Entries that the heads have seen and not computed: consecutive tokens, and the hidden state before each."""

    first_position: int = 0
    tokens: list[int] = field(default_factory=list)
    hidden_states: list[HiddenState] = field(default_factory=list)

    def add(self, first_position: int, tokens: list[int], hidden_states: list[HiddenState]) -> None:
        """Append entries. If they do not follow the backlog, they replace it."""
        if self.first_position + len(self.tokens) != first_position:
            self.first_position, self.tokens, self.hidden_states = first_position, [], []
        self.tokens += tokens
        self.hidden_states += hidden_states
        self.drop(len(self.tokens) - MAX_BACKLOG_ENTRIES)

    def drop(self, count: int) -> None:
        """Remove the `count` oldest entries."""
        if count > 0:
            del self.tokens[:count], self.hidden_states[:count]
            self.first_position += count

    def truncate(self, position: int) -> None:
        """Remove the entries from `position` on."""
        length = max(0, position - self.first_position)
        del self.tokens[length:], self.hidden_states[length:]


class MtpSession:
    """The MTP heads of a model, for callers that drive its context themselves.

    >>> session = MtpSession(target, heads, sequences=1, n_draft_max=3)
    >>> target.decode()                          # the prompt
    >>> session.process(target.batch)            # after every decode of the target, the batch that was decoded
    >>> tokens = session.draft({0: token})[0]    # draft tokens after the token that was sampled last
    >>> target.decode()                          # the token and the draft tokens, an output after each
    >>> session.process(target.batch)
    >>> session.accept(0, count)                 # accepted draft tokens; the others leave both KV caches
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
        """`restores_states`: the caller removes rejected draft tokens by restoring a saved state, not with `accept`."""
        self.settings = MtpSettings(sequences=sequences, n_draft_max=n_draft_max, n_min=n_min, p_min=p_min)
        _check_contexts(target, draft, self.settings)
        has_recurrent_state = target.memory.kind in ("recurrent", "hybrid")
        if not restores_states and has_recurrent_state and target.max_rollback < n_draft_max:
            raise InvalidArgument(
                "n_draft_max",
                f"must be at most {target.max_rollback}, the target's `recurrent_snapshots`: "
                "its KV cache could not drop rejected draft tokens",
            )
        self.target, self.draft_context = target, draft  # kept alive as long as the session
        self.stats = MtpStats()
        self._head_count = draft.model.info.mtp_layer_count
        self._zero_state: HiddenState = np.zeros(target.model.embedding_width, dtype=np.float32)
        # Per sequence: position of the next entry → hidden state before it.
        self._hidden_states: list[dict[int, HiddenState]] = [{} for _ in range(sequences)]
        self._backlogs = [HeadBacklog() for _ in range(sequences)]
        self._unverified: dict[int, int] = {}  # sequence → draft tokens that were neither accepted nor rejected yet
        self._recomputed_positions: dict[int, int] = {}  # sequence → position to recompute that the heads have already
        self._processed_decodes = target.decode_count
        target.enable_hidden_states(every_row=True)
        draft.enable_hidden_states(every_row=False)

    def begin(self, sequence: int) -> None:
        """Clear the heads' state of a sequence. It starts again with the next `process`, at any position."""
        self._check_sequence(sequence)
        self.draft_context.memory.remove(sequence)
        self._hidden_states[sequence] = {}
        self._backlogs[sequence] = HeadBacklog()
        self._unverified.pop(sequence, None)
        self._recomputed_positions.pop(sequence, None)

    def process(self, batch: Batch) -> None:
        """Pass `batch`, the rows of the target's last decode, to the heads. Call it once after every decode."""
        if self.target.decode_count == self._processed_decodes:
            raise WrongState("process", "processed already", "decoded again first")
        hidden = self.target.get_hidden_states()
        if batch.count != len(hidden):
            raise InvalidArgument("batch", f"has {batch.count} rows, the target's last decode had {len(hidden)}")
        runs = self._find_runs(batch)
        self._processed_decodes = self.target.decode_count
        for sequence, start, stop in runs:
            first, known_states = int(batch.positions[start]), self._hidden_states[sequence]
            is_recomputed = self._recomputed_positions.pop(sequence, -1) == first
            skipped = max(stop - start - MAX_BACKLOG_ENTRIES, int(is_recomputed), 0)
            states = list(hidden[start + max(skipped - 1, 0) : stop - 1].copy())
            states_before = states if skipped else [known_states.get(first, self._zero_state), *states]
            self._backlogs[sequence].add(first + skipped, batch.tokens[start + skipped : stop].tolist(), states_before)
            for back in range(min(stop - start, self.settings.n_draft_max + 1)):
                known_states[first + stop - start - back] = hidden[stop - 1 - back].copy()  # a view keeps all alive
            while len(known_states) > MAX_HIDDEN_STATES:
                del known_states[next(iter(known_states))]

    def draft(self, last_tokens: Mapping[int, int], limits: Mapping[int, int] | None = None) -> dict[int, list[int]]:
        """Return draft tokens after the newest token of each sequence, which no KV cache holds yet, in one batch.

        `limits` are the most draft tokens of a sequence, if fewer than `n_draft_max`.
        """
        n_draft_max = self.settings.n_draft_max
        checked_limits = {
            sequence: check_integer("limit", (limits or {}).get(sequence, n_draft_max), 0, n_draft_max)
            for sequence in last_tokens
        }
        for sequence, token in last_tokens.items():
            self._check_sequence(sequence)
            self.target.model.vocabulary.check_token(token)
        drafts: dict[int, list[int]] = {sequence: [] for sequence in last_tokens}
        self._draft_tokens(dict(last_tokens), checked_limits, drafts)
        for sequence, tokens in drafts.items():
            if len(tokens) < self.settings.n_min:
                tokens.clear()
            self._unverified[sequence] = len(tokens)
            self.stats.draft_steps += bool(tokens)
            self.stats.draft_tokens += len(tokens)
        return drafts

    def accept(self, sequence: int, count: int) -> None:
        """Accept the first `count` draft tokens of a sequence. The others are removed from both KV caches."""
        self._check_sequence(sequence)
        if sequence not in self._unverified:
            raise WrongState("accept", f"without draft tokens for sequence {sequence}", "drafted for first")
        drafted = self._unverified[sequence]
        check_integer("count", count, 0, drafted)
        if self._processed_decodes != self.target.decode_count:
            raise WrongState("accept", "decoded and not processed", "processed first")
        position_range = self.target.memory.get_position_range(sequence)
        end = position_range[1] + 1 - (drafted - count) if position_range else 0
        if not self.target.memory.remove(sequence, start=end):
            raise UnsupportedOperation("accept", f"sequence {sequence} cannot drop its last {drafted - count} entries")
        self.truncate(sequence, end)
        del self._unverified[sequence]
        self.stats.accepted_tokens += count
        logger.debug("sequence %d: accepted %d of %d draft tokens; %s", sequence, count, drafted, self.stats)

    def truncate(self, sequence: int, position: int) -> None:
        """Follow the target, which has dropped everything from `position` on."""
        self._recomputed_positions.pop(sequence, None)
        self._truncate_heads(sequence, position)
        self._backlogs[sequence].truncate(position)
        self._hidden_states[sequence] = {
            end: state for end, state in self._hidden_states[sequence].items() if end <= position
        }

    def expect_recompute(self, sequence: int, position: int) -> None:
        """Note that the target recomputes the entry at `position`, of which the heads lack only the hidden state."""
        self._recomputed_positions[sequence] = position

    def get_hidden_state(self, sequence: int, position: int) -> HiddenState | None:
        """Return the hidden state before `position`, if known. The first draft token after it needs it."""
        return self._hidden_states[sequence].get(position)

    def set_hidden_state(self, sequence: int, position: int, hidden_state: HiddenState | None) -> None:
        """Set a hidden state that was saved elsewhere."""
        if hidden_state is not None:
            self._hidden_states[sequence][position] = hidden_state

    # --- decodes of the heads

    def _find_runs(self, batch: Batch) -> list[tuple[int, int, int]]:
        """Return the rows of each sequence in a batch, as (sequence, start, stop)."""
        sequences = batch.sequences[: batch.count]
        bounds = [0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist(), batch.count]
        runs = [(int(sequences[start]), start, stop) for start, stop in itertools.pairwise(bounds)]
        if len({sequence for sequence, _, _ in runs}) < len(runs):
            raise InvalidArgument("batch", "must hold the rows of each sequence one after the other")
        return [run for run in runs if run[0] < self.settings.sequences]

    def count_backlog(self, sequence: int) -> int:
        """Return the number of entries of a sequence that the heads have seen and not computed."""
        return len(self._backlogs[sequence].tokens)

    def catch_up(self, sequences: Iterable[int]) -> None:
        """Compute the backlog of these sequences. Otherwise `draft` does so."""
        batch = self.draft_context.batch
        remaining = [sequence for sequence in sequences if self._backlogs[sequence].tokens]
        while remaining:
            batch.clear()
            parts: list[tuple[int, int]] = []
            for sequence in remaining:
                if batch.count < batch.capacity:
                    parts.append((sequence, self._fill_backlog_batch(sequence)))
            for head in range(self._head_count):
                if head:  # every head of a chain has its own cells at the same positions
                    for sequence, first in parts:
                        self._truncate_heads(sequence, first)
                self._decode_head(head)
            remaining = [sequence for sequence in remaining if self._backlogs[sequence].tokens]

    def _fill_backlog_batch(self, sequence: int) -> int:
        """Move as much of a backlog as fits into the batch. Return its first position."""
        batch, backlog = self.draft_context.batch, self._backlogs[sequence]
        row, first = batch.count, backlog.first_position
        count = min(len(backlog.tokens), batch.capacity - row)
        self._align_head_cache(sequence, first)
        batch.add(backlog.tokens[:count], position=first, sequence=sequence)
        assert batch.hidden_states is not None
        batch.hidden_states[row : row + count] = backlog.hidden_states[:count]
        backlog.drop(count)
        return first

    def _align_head_cache(self, sequence: int, position: int) -> None:
        """Make the heads' KV cache end right before `position`, or be empty: a sequence may start anywhere."""
        position_range = self.draft_context.memory.get_position_range(sequence)
        if position_range is not None and position_range[1] + 1 != position:
            self._truncate_heads(sequence, position if position_range[1] >= position else 0)

    def _truncate_heads(self, sequence: int, position: int) -> None:
        """Drop the heads' cells from `position` on, or all of them if a sliding window has moved past it."""
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
        """Fill `drafts`: each decode adds one draft token to every sequence."""
        ends = {sequence: self._find_end(sequence) for sequence in last_tokens}
        self.catch_up(last_tokens)
        hidden_states = {
            sequence: [self._hidden_states[sequence].get(end, self._zero_state)] for sequence, end in ends.items()
        }
        for sequence, end in ends.items():
            self._align_head_cache(sequence, end)
        context, is_chain = self.draft_context, self._head_count > 1
        max_steps = self._head_count if is_chain else self.settings.n_draft_max  # a chain drafts one token per head
        for step in range(min(max_steps, max(limits.values(), default=0))):
            active = [sequence for sequence in last_tokens if limits[sequence] > step == len(drafts[sequence])]
            if not active:
                break
            self._fill_draft_batch(active, last_tokens, hidden_states, ends, drafts, step)
            self._decode_head(step if is_chain else 0)
            row = -1
            for sequence in active:
                row += 1 + (step if is_chain else 0)
                token = self._pick_token(row)
                if token is not None:
                    drafts[sequence].append(token)
                    hidden_states[sequence].append(context.get_hidden_state(row).copy())
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
        """Fill the batch for one draft step. In a chain, the next head reads all draft tokens again."""
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
        """Return the most likely token after a row, or None if it is less likely than `p_min`."""
        logits = self.draft_context.get_logits(row)
        token = int(logits.argmax())
        if self.settings.p_min > 0:
            probability = 1.0 / float(np.exp(logits - logits[token]).sum())
            if probability < self.settings.p_min:
                return None
        return token

    def _find_end(self, sequence: int) -> int:
        position_range = self.target.memory.get_position_range(sequence)
        if position_range is None:
            raise WrongState("draft", f"empty in sequence {sequence}", "decoded first")
        return position_range[1] + 1

    def _check_sequence(self, sequence: int) -> None:
        check_integer("sequence", sequence, 0, self.settings.sequences - 1)


def _check_contexts(target: LlamaContext, draft: LlamaContext, settings: MtpSettings) -> None:
    """Raise a typed error for every pair of contexts that would not work, or abort in llama.cpp."""
    if not get_library().supports_mtp:
        raise UnsupportedOperation("MTP", "this build of llama.cpp does not export its calls")
    if target.is_mtp or not target.model.info.mtp_layer_count:
        raise UnsupportedOperation("MTP", "the target's model has no MTP heads, or is itself the heads' context")
    if not draft.is_mtp or draft.model is not target.model:
        raise InvalidArgument("draft", "must be a context of the same model created with `mtp_target=target`")
    for name, context in (("target", target), ("draft", draft)):
        if context.sequences < settings.sequences:
            raise InvalidArgument("sequences", f"must be at most {context.sequences}, those of the {name}")
    if draft.batch.capacity < target.batch.capacity:
        raise InvalidArgument("draft", f"must take batches of {target.batch.capacity} rows, as the target does")
    if draft.max_outputs < settings.sequences:
        raise InvalidArgument("draft", f"must have an output for each of {settings.sequences} sequences")
