"""Guesses of a second, smaller model with the same vocabulary, whose sequences mirror those of the model itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from afterglow.engine.kvcache.prefix_cache import PrefixCache
from afterglow.engine.kvcache.sequence import Sequence as Slot
from afterglow.engine.scheduling.job import Job
from afterglow.engine.speculation.speculator import INITIAL_ACCEPTANCE_RATE, DraftRequest
from afterglow.engine.types.backend import Backend, BackendState, DecodeSpan
from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError, InvalidArgument
from afterglow.llama.vocabulary import Vocabulary

MAX_VOCABULARY_SIZE_DIFFERENCE = 128  # tokens that one vocabulary may have more: some pad theirs
FIRST_COMPARED_TOKEN = 5  # first tokens that may differ: unknown, start, end
MAX_FREE_CATCH_UP_ENTRIES = 16  # entries that are computed along with a guess
CLOSE_TIMEOUT_SECONDS = 1.0  # seconds that an end waits for what is worth keeping


def check_vocabularies(target: Vocabulary, draft: Vocabulary) -> None:
    """`InvalidArgument` where a token of one model means something else to the other."""
    if abs(target.size - draft.size) > MAX_VOCABULARY_SIZE_DIFFERENCE:
        raise InvalidArgument("draft", f"has {draft.size} tokens and the model {target.size}: they are other ones")
    for name in ("bos", "eos"):
        if target.special_tokens.get(name) != draft.special_tokens.get(name):
            ours, theirs = target.special_tokens.get(name), draft.special_tokens.get(name)
            raise InvalidArgument("draft", f"has {theirs} as its `{name}` token and the model {ours}")
    for token in range(FIRST_COMPARED_TOKEN, min(target.size, draft.size)):
        if target.get_text(token) != draft.get_text(token):
            raise InvalidArgument(
                "draft", f"says {draft.get_text(token)!r} with token {token} and the model {target.get_text(token)!r}"
            )


@dataclass(frozen=True, slots=True)
class MirrorSequence:
    """The sequence that mirrors a job's, and where it has to stand still for checkpoints."""

    slot: Slot
    checkpoint_positions: list[int]


def _get_known_entries(job: Job) -> Entries:
    return np.concatenate([job.prompt, np.array(job.generated, dtype=np.int64)])


class DraftModel:
    """The drafter on a model of its own. It owns the backend it is given.

    It has a prefix memory like the engine's, with checkpoints and with tiers in RAM and on disk, so what it computed of
    a conversation is found again, also after a restart. What it holds of a job is compared with what is known, so it
    needs not hear what becomes of its guesses, nor how the target's memory moves: what agrees stays, the rest goes.
    """

    name = "draft"

    def __init__(self, backend: Backend, settings: EngineSettings | None = None, relative_size: float = 1.0) -> None:
        """`size` is that of its weights, relative to the model it guesses for."""
        self._backend = backend
        self._relative_size = relative_size
        self.prefix_cache = PrefixCache(backend, EntryInterner(), settings or EngineSettings(ram_cache_bytes=0))
        self._mirrors: dict[Job, MirrorSequence] = {}

    def can_draft(self, job: Job) -> bool:
        return not job.media_indices  # it does not see

    def get_draft_kind(self, job: Job) -> str:
        return self.name

    def estimate_acceptance(self, job: Job) -> float:
        return INITIAL_ACCEPTANCE_RATE

    def estimate_catch_up_entries(self, job: Job) -> float:
        mirror = self._mirrors.get(job)
        if mirror is None:
            reuse = self.prefix_cache.plan(_get_known_entries(job), salt=job.request.salt)
            held = 0 if reuse is None else reuse.reuse_length
        else:
            held = len(mirror.slot)
        lacking = job.known_length - 1 - held
        return lacking * self._relative_size if lacking > MAX_FREE_CATCH_UP_ENTRIES else 0.0

    def catch_up(self, jobs: Sequence[Job]) -> None:
        try:
            for job in jobs:
                self._catch_up(job)
        except AfterglowError:
            self._clear_mirrors()

    def draft(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in draft_requests]
        try:
            ready = [index for index, (job, _) in enumerate(draft_requests) if self._catch_up(job)]
            self._draft_tokens(draft_requests, ready, drafts)
        except AfterglowError:  # a guess is not worth an answer: begin anew
            self._clear_mirrors()
            return [[] for _ in draft_requests]
        return drafts

    def _clear_mirrors(self) -> None:
        for mirror in self._mirrors.values():
            mirror.slot.clear()

    def release(self, job: Job) -> None:
        """What it holds of the job is kept for the next turn, without guesses."""
        mirror = self._mirrors.pop(job, None)
        if mirror is not None:
            keep = common_prefix_length(mirror.slot.entries, _get_known_entries(job))
            if mirror.slot.can_resume_at(keep):
                mirror.slot.truncate(keep)
            self.prefix_cache.release(mirror.slot)

    def run_idle_task(self) -> bool:
        """Write something towards the disk; False: there is nothing."""
        return self.prefix_cache.write_back()

    def close(self) -> None:
        for job in list(self._mirrors):
            self.release(job)
        self.prefix_cache.close(timeout=CLOSE_TIMEOUT_SECONDS)
        self._backend.close()

    def _get_slot(self, job: Job) -> Slot:
        return self._mirrors[job].slot

    def _catch_up(self, job: Job) -> bool:
        """Compute what the job knows but its newest token. False: this model cannot read it, or has no place for it."""
        known = _get_known_entries(job)
        if int(known.min()) < 0 or int(known.max()) >= self._backend.vocabulary_size:
            return False  # a picture, or a token that only the target has
        if len(known) > self._backend.capabilities.cells_per_sequence:
            return False
        mirror = self._open_mirror(job, known)
        if mirror is None:
            return False
        slot, limit = mirror.slot, self._backend.capabilities.batch_cells
        while len(slot) < len(known) - 1:
            stop = min(
                [len(known) - 1, len(slot) + limit, *[cut for cut in mirror.checkpoint_positions if cut > len(slot)]]
            )
            started = time.perf_counter()
            chunk = known[len(slot) : stop]
            self._backend.decode([DecodeSpan(slot.seq_id, chunk, slot.position, 0)])
            slot.append_decoded(chunk)
            self.prefix_cache.cost_model.record_prefill(len(chunk), time.perf_counter() - started)
            if stop in mirror.checkpoint_positions:
                self.prefix_cache.take_checkpoint(slot)
        return True

    def _open_mirror(self, job: Job, known: Entries) -> MirrorSequence | None:
        """The job's sequence, cut back to what agrees, or a new one that begins with the most that is kept."""
        mirror, salt = self._mirrors.get(job), job.request.salt
        if mirror is not None:
            keep = min(common_prefix_length(mirror.slot.entries, known), len(known) - 1)
            if mirror.slot.can_resume_at(keep) and (keep or not len(mirror.slot)):
                mirror.slot.truncate(keep)
                return mirror
            self.release(job)
        reuse = self.prefix_cache.plan(known, salt=salt)
        if reuse is None:  # jobs that had to step aside hold their places in vain
            for other in [other for other in self._mirrors if other.sequence is None]:
                self.release(other)
            reuse = self.prefix_cache.plan(known, salt=salt)
        if reuse is None:
            return None
        slot, _ = self.prefix_cache.acquire(reuse, salt)
        mirror = self._mirrors[job] = MirrorSequence(
            slot, self.prefix_cache.checkpoint_positions(slot, job.prompt, job.request.boundaries)
        )
        return mirror

    def _draft_tokens(self, draft_requests: Sequence[DraftRequest], ready: list[int], drafts: list[list[int]]) -> None:
        """One guess of every job in each decode."""
        saved = self._save_states([self._get_slot(draft_requests[index][0]) for index in ready])
        for step in range(max([draft_requests[index][1] for index in ready], default=0)):
            active = [index for index in ready if self._has_room(draft_requests[index], step)]
            if not active:
                break
            spans: list[DecodeSpan] = []
            for index in active:
                job, slot = draft_requests[index][0], self._get_slot(draft_requests[index][0])
                token = drafts[index][-1] if step else job.generated[-1]
                spans.append(DecodeSpan(slot.seq_id, [token], slot.position, 1))
            self._backend.decode(spans)
            for row, (index, span) in enumerate(zip(active, spans, strict=True)):
                self._get_slot(draft_requests[index][0]).append_decoded(span.entries)
                drafts[index].append(int(self._backend.get_logits(row, 0).argmax()))
        for slot, length, state in saved:
            slot.restore(length, state, 0)

    def _has_room(self, draft_request: DraftRequest, step: int) -> bool:
        job, limit = draft_request
        return step < limit and self._get_slot(job).cell_count < self._backend.capabilities.cells_per_sequence

    def _save_states(self, slots: list[Slot]) -> list[tuple[Slot, int, BackendState]]:
        """Where memory cannot drop a guess: what it is before, to be put back."""
        if self._backend.capabilities.memory_kind in ("attention", "window"):
            return []
        return [(slot, len(slot), self._backend.save(slot.seq_id, "partial")) for slot in slots]
