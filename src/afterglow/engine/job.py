"""A request while it runs: what is known of it, and how much of that memory still lacks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from afterglow.engine.backend import Sampler, Span
from afterglow.engine.entries import Ids, last_edge
from afterglow.engine.guide import Guide
from afterglow.engine.pictures import Encoding, Part
from afterglow.engine.request import Request, Usage
from afterglow.engine.sequence import Saved, Sequence
from afterglow.engine.speculation import Guessing
from afterglow.engine.stops import StopMatcher


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """Known entries are the prompt and what was generated; the backlog is what memory does not hold yet.

    Work is a gap to close: a chunk of the prompt, one generated token and guesses behind it are the same thing.
    """

    request: Request
    prompt: Ids
    media: tuple[int, ...] = ()  # where in the prompt pictures and sounds stand
    parts: dict[int, Part] = field(default_factory=dict)  # what they are, where they have to be encoded
    prompt_cells: int = 0  # that it fills
    sampler: Sampler
    stops: StopMatcher | None
    guide: Guide | None = None
    room: int  # entries that its sequence can hold
    sequence: Sequence | None = None
    generated: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)  # guesses behind it, for the coming decode only
    replay: int = 0  # entries that memory had to drop with wrong guesses: they are computed again
    guessing: Guessing = field(default_factory=Guessing)
    cuts: list[int] = field(default_factory=list)  # depths at which its memory has to stand still
    parked: Saved | None = None  # its memory, while it had to make room
    leader: Job | None = None  # who is computing the beginning of this prompt right now
    leader_depth: int = 0
    encodings: dict[int, Encoding] = field(default_factory=dict)  # of its coming pictures, by where they stand
    encoded: int = 0
    regular: int = 0  # leading entries whose chunks were those of the deterministic grid
    cached: int = 0  # cells that were in memory
    media_cells: int = 0  # of pictures and sounds
    audio_cells: int = 0
    media_cached: int = 0
    attempts: int = 0  # decodes that failed under it
    disappointed: bool = False  # by a stored state that did not load
    aside: bool = False  # it made room for others, and comes back when there is room again
    submitted: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first_token: float = 0.0
    decoded_at: float = 0.0
    drafted: int = 0  # guesses that were computed
    accepted: int = 0  # and those of them that were right
    drafts: int = 0  # decodes that had guesses
    seconds_saved: float = 0.0  # by guesses

    @property
    def held(self) -> Sequence:
        """The sequence of a job that runs."""
        assert self.sequence is not None
        return self.sequence

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def missing(self) -> int:
        """Known entries that memory lacks."""
        held = 0 if self.sequence is None else self.sequence.record.length
        return len(self.prompt) + len(self.generated) - held

    @property
    def backlog(self) -> int:
        return self.missing + len(self.draft)

    @property
    def generating(self) -> bool:
        """Whether memory lacks only the newest token, and what is replayed: somebody is waiting for the next."""
        return bool(self.generated) and self.missing == 1 + self.replay

    @property
    def full(self) -> bool:
        """Whether all that is known but its newest token fills the room, whatever guesses memory holds beyond it."""
        cells = self.held.cells
        return cells >= self.room and cells - (len(self.held) - self.known + 1) >= self.room

    def pending(self, count: int) -> Ids | list[int]:
        """The next `count` entries that memory lacks."""
        assert self.sequence is not None
        start = self.sequence.record.length
        said = start - len(self.prompt)
        if said >= 0:
            known = self.generated[said : said + count]
            return known + self.draft[: count - len(known)] if self.draft else known
        return self.prompt[start : start + count]

    def span(self, count: int, rows: int) -> Span:
        """The next `count` entries for a decode, with logits after the last known entry, and after each guess.

        Of a picture only the next `rows` rows, where it can be cut.
        """
        assert self.sequence is not None
        known = self.missing
        if count == known == 1 and self.generated and not self.draft:  # what most are, at every step
            return Span(self.sequence.number, self.generated[-1:], self.sequence.position, 1)
        if self.draft:
            self.draft = self.draft[: max(0, count - known)]
        span = Span(self.sequence.number, self.pending(count), self.sequence.position, 0)
        span.outputs = count - known + 1 if count >= known else 0
        if self.encodings and len(self.sequence) in self.encodings:
            self._cut(span, len(self.sequence), rows)
        return span

    def _cut(self, span: Span, place: int, rows: int) -> None:
        """Make it the span of a picture, or of a part of one."""
        embeddings = self.encodings[place].embeddings
        assert embeddings is not None
        whole, start = embeddings[self.parts[place].piece], self.held.ahead
        span.embedding = whole if whole.whole else whole.cut(start, start + rows)
        span.ends = whole.whole or start + rows >= len(whole.rows)
        span.outputs = span.outputs if span.ends else 0

    def computed(self, span: Span, started: float) -> int:
        """Note that memory took a span; how many of its entries were replayed."""
        assert self.sequence is not None
        self.decoded_at = started
        if not span.ends:  # rows of a picture, and more of them come
            self.sequence.ahead += span.rows
            return 0
        self.sequence.decoded(span.ids)
        if not self.replay:
            return 0
        replayed = min(self.replay, len(span.ids) - 1)
        self.replay = max(0, self.missing - 1)
        return replayed

    def next_stop(self) -> int:
        """How many entries can be decoded before memory has to stand still. A picture goes alone."""
        length = len(self.held)
        end = self.known if length >= len(self.prompt) else len(self.prompt)
        stop = min([cut for cut in self.cuts if cut > length], default=end)
        for place in self.media:
            if place >= length:
                return min(stop, max(place, length + 1)) - length
        return stop - length

    def note_chunk(self, count: int, grid: int) -> None:
        """In the deterministic mode: `count` entries were computed together. Up to where all chunks were the grid's,
        and one ends, its sequence can be used again."""
        length = len(self.held)
        if length <= len(self.prompt) and length - count == self.regular:
            self.regular = length
            if last_edge(length, self.prompt, grid) == length:
                self.held.aligned = length

    @property
    def next_is_media(self) -> bool:
        return len(self.held) in self.media

    @property
    def deadline_passed(self) -> bool:
        limit = self.request.deadline
        return limit is not None and time.monotonic() - self.submitted > limit

    def usage(self) -> Usage:
        now = time.monotonic()
        admitted = self.admitted or now
        first = self.first_token or now
        return Usage(
            prompt=self.prompt_cells,
            cached=self.cached,
            media=self.media_cells,
            audio=self.audio_cells,
            media_cached=self.media_cached,
            encoded=self.encoded,
            generated=len(self.generated),
            drafted=self.drafted,
            accepted=self.accepted,
            drafts=self.drafts,
            seconds_saved=self.seconds_saved,
            queue_time=admitted - self.submitted,
            prefill_time=first - admitted,
            decode_time=now - first,
        )
