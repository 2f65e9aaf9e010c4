"""One request in the engine: `Job` is its progress, `WaitingJob` and `RunningJob` are the two states it can be in."""

from __future__ import annotations

import sys
import time
from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.kvcache.sequence import SavedSequence, Sequence
from afterglow.engine.multimodal.encoder_cache import EncodeTask
from afterglow.engine.sampling.stops import IndentMatcher, StopMatcher
from afterglow.engine.sampling.token_constraints import TokenConstraint
from afterglow.engine.types.adapters import ActiveAdapters, AdapterSet
from afterglow.engine.types.backend import DecodeSpan, Sampler
from afterglow.engine.types.draft_stats import DraftStats
from afterglow.engine.types.entries import Entries
from afterglow.engine.types.media import MediaPart
from afterglow.engine.types.request import FinishCause, PlannedPrefix, PrefillProgress, Request, Usage


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """One request and its progress, also while preempted. Known entries are the prompt and the generated tokens."""

    request: Request
    prompt: Entries
    namespace: str = ""  # of cached state: salt and adapters
    adapters: ActiveAdapters = field(default_factory=ActiveAdapters)
    priority: int = field(init=False)  # of the request, or of a follower that waits for its prefix if that is higher
    media_indices: tuple[int, ...] = ()  # indices of media entries in the prompt
    media_parts: dict[int, MediaPart] = field(default_factory=dict)  # content to encode, by index
    prompt_cells: int = 0
    sampler: Sampler
    stop_matcher: StopMatcher | None
    indent_matcher: IndentMatcher | None = None
    token_constraint: TokenConstraint | None = None
    generated: list[int] = field(default_factory=list)
    finish_cause: FinishCause | None = None  # of a completion that ends when its forced tokens are computed
    draft_stats: DraftStats = field(default_factory=DraftStats)
    checkpoint_positions: list[int] = field(default_factory=list)  # lengths at which a decode has to end
    encode_tasks: dict[int, EncodeTask] = field(default_factory=dict)  # of its next media, by index
    encoded_media: int = 0
    cached_entries: int = 0  # prompt entries that were a prefix hit
    cached_cells: int = 0  # the same in cells
    media_cells: int = 0
    audio_cells: int = 0
    cached_media_cells: int = 0
    failed_decodes: int = 0
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_decoded_at: float = 0.0
    draft_token_count: int = 0  # draft tokens that were verified
    accepted_token_count: int = 0
    draft_steps: int = 0  # decodes with draft tokens
    speculation_seconds_saved: float = 0.0

    def __post_init__(self) -> None:
        self.priority = self.request.priority

    @property
    def is_background(self) -> bool:
        return self.priority < 0

    @property
    def known_length(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def known_entries(self) -> Entries:
        return np.concatenate([self.prompt, np.array(self.generated, dtype=np.int64)])

    @property
    def has_deadline_passed(self) -> bool:
        deadline = self.request.deadline
        return deadline is not None and time.monotonic() - self.submitted_at > deadline

    @property
    def has_line_deadline_passed(self) -> bool:
        deadline = self.request.line_deadline
        return deadline is not None and time.monotonic() - self.first_token_at > deadline

    def build_progress(self, computed_entries: int, plan: PlannedPrefix | None = None) -> PrefillProgress:
        """Return the progress of the prefill, of which `computed_entries` are in the KV cache."""
        return PrefillProgress(
            self.request.id,
            computed_entries,
            len(self.prompt),
            cached_entries=self.cached_entries,
            seconds=time.monotonic() - self.admitted_at if self.admitted_at else 0.0,
            prompt_tokens=self.prompt_cells,
            cached_tokens=self.cached_cells,
            plan=plan,
        )

    @property
    def max_remaining_tokens(self) -> int:
        """Most tokens that may still be generated."""
        limit = self.request.max_tokens
        return sys.maxsize if limit is None else limit - len(self.generated)

    def build_usage(self, sequence: int | None = None) -> Usage:
        """Return the usage of the request up to now. `sequence` is the number of its sequence, if it has one."""
        now = time.monotonic()
        admitted_at = self.admitted_at or now
        first_token_at = self.first_token_at or now
        return Usage(
            prompt_tokens=self.prompt_cells,
            cached_tokens=self.cached_cells,
            media_tokens=self.media_cells,
            audio_tokens=self.audio_cells,
            cached_media_tokens=self.cached_media_cells,
            encoded_media=self.encoded_media,
            generated_tokens=len(self.generated),
            draft_tokens=self.draft_token_count,
            accepted_tokens=self.accepted_token_count,
            draft_steps=self.draft_steps,
            speculation_seconds_saved=self.speculation_seconds_saved,
            queue_seconds=admitted_at - self.submitted_at,
            prefill_seconds=first_token_at - admitted_at,
            decode_seconds=now - first_token_at,
            sequence=sequence,
        )


@dataclass(eq=False, slots=True, kw_only=True)
class WaitingJob:
    """A job without a sequence: a new one, or one that was preempted or lost its KV cache."""

    job: Job
    leader: Job | None = None  # the job that is computing the prefix of this prompt
    leader_position: int = 0
    swapped_state: SavedSequence | None = None  # its sequence while it is swapped out
    is_preempted: bool = False  # it resumes when cells are free again


@dataclass(eq=False, slots=True, kw_only=True)
class RunningJob:
    """A job with a sequence.

    The backlog is the part of the known entries that the KV cache does not hold yet. Every decode reduces the backlog:
    a prefill chunk, one generated token and the draft tokens after it are alike.
    """

    job: Job
    sequence: Sequence
    max_cells: int  # capacity of its sequence
    draft: list[int] = field(default_factory=list)  # draft tokens after the known entries, for the next decode only
    ready_since: int = 0  # number of the decode after which its next entries could be computed
    entries_to_recompute: int = 0  # known entries that were dropped together with rejected draft tokens
    forced_entries: int = 0  # tokens that the grammar forced before the newest one, not computed yet
    # After the known entries, if all were a prefix hit: the next token is sampled from them without a decode.
    last_logits: NDArray[np.float32] | None = None

    @property
    def uncomputed_entries(self) -> int:
        """Number of known entries that the KV cache does not hold."""
        return len(self.job.prompt) + len(self.job.generated) - self.sequence.entry_buffer.length

    @property
    def backlog(self) -> int:
        return self.uncomputed_entries + len(self.draft)

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token, and generated tokens to compute with it, are not in the KV cache."""
        # As `uncomputed_entries == 1 + entries_before_newest`, but without calls: asked for every job at every step.
        job = self.job
        known = len(job.prompt) + len(job.generated)
        uncomputed = known - self.sequence.entry_buffer.length
        return bool(job.generated) and uncomputed == 1 + self.entries_to_recompute + self.forced_entries

    @property
    def entries_before_newest(self) -> int:
        """Number of generated tokens before the newest one that the next decode computes with it."""
        return self.entries_to_recompute + self.forced_entries

    @property
    def free_cells(self) -> int:
        """Cells of the sequence that are left after all known entries."""
        return self.max_cells - self.sequence.cell_count - self.uncomputed_entries

    def continues_after(self, token: int, eog_tokens: Container[int]) -> bool:
        """Return whether the job, while it decodes, has another decode after the sampled `token`, whatever its text is.

        The cells of the decode before are recorded, and the token is not appended yet.
        """
        job, request = self.job, self.job.request
        if job.stop_matcher is not None or job.indent_matcher is not None or job.token_constraint is not None:
            return False
        if request.line_deadline is not None or request.needs_logprobs:
            return False
        if job.has_deadline_passed or not job.generated or job.max_remaining_tokens < 2:
            return False
        has_cells = self.sequence.cell_count + 2 <= self.max_cells
        return has_cells and not request.ends_with(token, eog_tokens)

    @property
    def adapter_set(self) -> AdapterSet:
        """Adapters that its next entry is computed with."""
        return self.job.adapters.find_at(self.sequence.entry_buffer.length)

    @property
    def is_full(self) -> bool:
        """Whether the known entries without the newest token fill the sequence. Draft tokens beyond do not count."""
        cells = self.sequence.cell_count
        return cells >= self.max_cells and cells - (len(self.sequence) - self.job.known_length + 1) >= self.max_cells

    def pop_last_logits(self, index: int) -> NDArray[np.float32]:
        """Return the stored logits after the known entries, once. Draft tokens (`index` above 0) have none."""
        assert self.last_logits is not None
        assert index == 0
        logits, self.last_logits = self.last_logits, None
        return logits

    def get_pending(self, count: int) -> Entries | list[int]:
        """Return the next `count` entries to compute."""
        start = self.sequence.entry_buffer.length
        generated_start = start - len(self.job.prompt)
        if generated_start >= 0:
            known = self.job.generated[generated_start : generated_start + count]
            return known + self.draft[: count - len(known)] if self.draft else known
        return self.job.prompt[start : start + count]

    def build_span(self, count: int, max_media_rows: int) -> DecodeSpan:
        """Return the next `count` entries as a span, with logits after the last known entry and each draft token.

        Of a media entry that can be split, the span holds the next `max_media_rows` rows only.
        """
        known = self.uncomputed_entries
        if count == known == 1 and self.job.generated and not self.draft:  # fast path: plain decoding
            span = DecodeSpan(self.sequence.seq_id, self.job.generated[-1:], self.sequence.position, 1)
            span.adapters = self.job.adapters.tail
            return span
        if self.draft:
            self.draft = self.draft[: max(0, count - known)]
        span = DecodeSpan(self.sequence.seq_id, self.get_pending(count), self.sequence.position, 0)
        span.outputs = count - known + 1 if count >= known else 0
        span.adapters = self.adapter_set
        if self.job.encode_tasks and len(self.sequence) in self.job.encode_tasks:
            self._attach_embedding(span, len(self.sequence), max_media_rows)
        return span

    def _attach_embedding(self, span: DecodeSpan, index: int, max_media_rows: int) -> None:
        """Turn the span into that of a media entry, or of a part of it."""
        embeddings = self.job.encode_tasks[index].embeddings
        assert embeddings is not None
        embedding, start = embeddings[self.job.media_parts[index].piece_index], self.sequence.partial_media_rows
        span.embedding = embedding if embedding.non_causal else embedding.slice_rows(start, start + max_media_rows)
        span.completes_entry = embedding.non_causal or start + max_media_rows >= len(embedding.rows)
        span.outputs = span.outputs if span.completes_entry else 0

    def record_decode(self, span: DecodeSpan, started_at: float) -> int:
        """Record that the KV cache holds a span now. Return how many of its entries were recomputed."""
        self.job.last_decoded_at = started_at
        if not span.completes_entry:  # more rows of this media entry follow
            self.sequence.partial_media_rows += span.rows
            return 0
        self.sequence.append_decoded(span.entries)
        if not self.entries_to_recompute and not self.forced_entries:
            return 0
        computed, remaining = len(span.entries) - 1, max(0, self.uncomputed_entries - 1)
        recomputed = min(self.entries_to_recompute, computed)
        self.entries_to_recompute = min(remaining, self.entries_to_recompute - recomputed)
        self.forced_entries = remaining - self.entries_to_recompute
        return recomputed

    def get_chunk_limit(self) -> int:
        """Return the entries of the next chunk.

        It ends at the next checkpoint position, change of adapters or media entry, which is itself one chunk.
        """
        length = len(self.sequence)
        end = self.job.known_length if length >= len(self.job.prompt) else len(self.job.prompt)
        stops = [*self.job.checkpoint_positions, self.job.adapters.start]
        stop = min([position for position in stops if position > length], default=end)
        for index in self.job.media_indices:
            if index >= length:
                return min(stop, max(index, length + 1)) - length
        return stop - length
