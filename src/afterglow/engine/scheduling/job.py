"""A request while it runs: what is known of it, and how much of that memory still lacks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from afterglow.engine.kvcache.sequence import SavedSequence, Sequence
from afterglow.engine.multimodal.encoder_cache import EncodeTask
from afterglow.engine.sampling.stops import StopMatcher
from afterglow.engine.sampling.token_constraints import TokenConstraint
from afterglow.engine.types.backend import DecodeSpan, Sampler
from afterglow.engine.types.draft_stats import DraftStats
from afterglow.engine.types.entries import Entries, round_down_to_grid
from afterglow.engine.types.media import MediaPart
from afterglow.engine.types.request import Request, Usage


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """Known entries are the prompt and what was generated; the backlog is what memory does not hold yet.

    Work is a gap to close: a chunk of the prompt, one generated token and guesses behind it are the same thing.
    """

    request: Request
    prompt: Entries
    media_indices: tuple[int, ...] = ()  # where in the prompt pictures and sounds stand
    media_parts: dict[int, MediaPart] = field(default_factory=dict)  # what they are, where they have to be encoded
    prompt_cells: int = 0  # that it fills
    sampler: Sampler
    stop_matcher: StopMatcher | None
    token_constraint: TokenConstraint | None = None
    max_cells: int  # entries that its sequence can hold
    sequence: Sequence | None = None
    generated: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)  # guesses behind it, for the coming decode only
    entries_to_recompute: int = 0  # entries that memory had to drop with wrong guesses: they are computed again
    draft_stats: DraftStats = field(default_factory=DraftStats)
    checkpoint_positions: list[int] = field(default_factory=list)  # depths at which its memory has to stand still
    swapped_state: SavedSequence | None = None  # its memory, while it had to make room
    leader: Job | None = None  # who is computing the beginning of this prompt right now
    leader_position: int = 0
    encode_tasks: dict[int, EncodeTask] = field(default_factory=dict)  # of its coming pictures, by where they stand
    encoded_media: int = 0
    on_grid_length: int = 0  # leading entries whose chunks were those of the deterministic grid
    cached_cells: int = 0  # cells that were in memory
    media_cells: int = 0  # of pictures and sounds
    audio_cells: int = 0
    cached_media_cells: int = 0
    failed_decodes: int = 0  # decodes that failed under it
    stored_load_failed: bool = False  # by a stored state that did not load
    is_preempted: bool = False  # it made room for others, and comes back when there is room again
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_decoded_at: float = 0.0
    draft_token_count: int = 0  # guesses that were computed
    accepted_token_count: int = 0  # and those of them that were right
    draft_steps: int = 0  # decodes that had guesses
    speculation_seconds_saved: float = 0.0  # by guesses

    @property
    def running_sequence(self) -> Sequence:
        """The sequence of a job that runs."""
        assert self.sequence is not None
        return self.sequence

    @property
    def known_length(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def uncomputed_entries(self) -> int:
        """Known entries that memory lacks."""
        held = 0 if self.sequence is None else self.sequence.entry_buffer.length
        return len(self.prompt) + len(self.generated) - held

    @property
    def backlog(self) -> int:
        return self.uncomputed_entries + len(self.draft)

    @property
    def is_decoding(self) -> bool:
        """Whether memory lacks only the newest token, and what is replayed: somebody is waiting for the next."""
        return bool(self.generated) and self.uncomputed_entries == 1 + self.entries_to_recompute

    @property
    def is_full(self) -> bool:
        """Whether all that is known but its newest token fills the room, whatever guesses memory holds beyond it."""
        cells = self.running_sequence.cell_count
        return (
            cells >= self.max_cells and cells - (len(self.running_sequence) - self.known_length + 1) >= self.max_cells
        )

    def get_pending(self, count: int) -> Entries | list[int]:
        """The next `count` entries that memory lacks."""
        assert self.sequence is not None
        start = self.sequence.entry_buffer.length
        said = start - len(self.prompt)
        if said >= 0:
            known = self.generated[said : said + count]
            return known + self.draft[: count - len(known)] if self.draft else known
        return self.prompt[start : start + count]

    def build_span(self, count: int, max_media_rows: int) -> DecodeSpan:
        """The next `count` entries for a decode, with logits after the last known entry, and after each guess.

        Of a picture only the next `rows` rows, where it can be cut.
        """
        assert self.sequence is not None
        known = self.uncomputed_entries
        if count == known == 1 and self.generated and not self.draft:  # what most are, at every step
            return DecodeSpan(self.sequence.seq_id, self.generated[-1:], self.sequence.position, 1)
        if self.draft:
            self.draft = self.draft[: max(0, count - known)]
        span = DecodeSpan(self.sequence.seq_id, self.get_pending(count), self.sequence.position, 0)
        span.outputs = count - known + 1 if count >= known else 0
        if self.encode_tasks and len(self.sequence) in self.encode_tasks:
            self._attach_embedding(span, len(self.sequence), max_media_rows)
        return span

    def _attach_embedding(self, span: DecodeSpan, index: int, max_media_rows: int) -> None:
        """Make it the span of a picture, or of a part of one."""
        embeddings = self.encode_tasks[index].embeddings
        assert embeddings is not None
        whole, start = embeddings[self.media_parts[index].piece_index], self.running_sequence.partial_media_rows
        span.embedding = whole if whole.non_causal else whole.slice_rows(start, start + max_media_rows)
        span.completes_entry = whole.non_causal or start + max_media_rows >= len(whole.rows)
        span.outputs = span.outputs if span.completes_entry else 0

    def record_decode(self, span: DecodeSpan, started_at: float) -> int:
        """Note that memory took a span; how many of its entries were replayed."""
        assert self.sequence is not None
        self.last_decoded_at = started_at
        if not span.completes_entry:  # rows of a picture, and more of them come
            self.sequence.partial_media_rows += span.rows
            return 0
        self.sequence.append_decoded(span.entries)
        if not self.entries_to_recompute:
            return 0
        replayed = min(self.entries_to_recompute, len(span.entries) - 1)
        self.entries_to_recompute = max(0, self.uncomputed_entries - 1)
        return replayed

    def get_chunk_limit(self) -> int:
        """How many entries can be decoded before memory has to stand still. A picture goes alone."""
        length = len(self.running_sequence)
        end = self.known_length if length >= len(self.prompt) else len(self.prompt)
        stop = min([cut for cut in self.checkpoint_positions if cut > length], default=end)
        for place in self.media_indices:
            if place >= length:
                return min(stop, max(place, length + 1)) - length
        return stop - length

    def record_chunk(self, count: int, grid: int) -> None:
        """In the deterministic mode: `count` entries were computed together. Up to where all chunks were the grid's,
        and one ends, its sequence can be used again."""
        length = len(self.running_sequence)
        if length <= len(self.prompt) and length - count == self.on_grid_length:
            self.on_grid_length = length
            if round_down_to_grid(length, self.prompt, grid) == length:
                self.running_sequence.aligned = length

    @property
    def is_next_media(self) -> bool:
        return len(self.running_sequence) in self.media_indices

    @property
    def has_deadline_passed(self) -> bool:
        limit = self.request.deadline
        return limit is not None and time.monotonic() - self.submitted_at > limit

    def build_usage(self) -> Usage:
        now = time.monotonic()
        admitted = self.admitted_at or now
        first = self.first_token_at or now
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
            queue_seconds=admitted - self.submitted_at,
            prefill_seconds=first - admitted,
            decode_seconds=now - first,
        )
