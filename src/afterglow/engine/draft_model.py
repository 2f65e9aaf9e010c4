"""Guesses of a second, smaller model with the same vocabulary, whose sequences mirror those of the model itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from afterglow.engine.backend import Backend, Span, State
from afterglow.engine.drafting import FIRST_ESTIMATE, Wish
from afterglow.engine.entries import Ids, Ledger, common_prefix
from afterglow.engine.job import Job
from afterglow.engine.memory import PrefixMemory
from afterglow.engine.sequence import Sequence as Slot
from afterglow.engine.settings import EngineSettings
from afterglow.errors import AfterglowError, InvalidArgument
from afterglow.llama.vocabulary import Vocabulary

UNEQUAL = 128  # tokens that one vocabulary may have more: some pad theirs
OWN = 5  # first tokens that may differ: unknown, start, end
FEW = 16  # entries that are computed along with a guess
CLOSING = 1.0  # seconds that an end waits for what is worth keeping


def check_vocabularies(target: Vocabulary, draft: Vocabulary) -> None:
    """`InvalidArgument` where a token of one model means something else to the other."""
    if abs(target.size - draft.size) > UNEQUAL:
        raise InvalidArgument("draft", f"has {draft.size} tokens and the model {target.size}: they are other ones")
    for name in ("bos", "eos"):
        if target.special.get(name) != draft.special.get(name):
            ours, theirs = target.special.get(name), draft.special.get(name)
            raise InvalidArgument("draft", f"has {theirs} as its `{name}` token and the model {ours}")
    for token in range(OWN, min(target.size, draft.size)):
        if target.text(token) != draft.text(token):
            raise InvalidArgument(
                "draft", f"says {draft.text(token)!r} with token {token} and the model {target.text(token)!r}"
            )


@dataclass(frozen=True, slots=True)
class Mirror:
    """The sequence that mirrors a job's, and where it has to stand still for checkpoints."""

    slot: Slot
    cuts: list[int]


def _known(job: Job) -> Ids:
    return np.concatenate([job.prompt, np.array(job.generated, dtype=np.int64)])


class DraftModel:
    """The drafter on a model of its own. It owns the backend it is given.

    It has a prefix memory like the engine's, with checkpoints and with tiers in RAM and on disk, so what it computed of
    a conversation is found again, also after a restart. What it holds of a job is compared with what is known, so it
    needs not hear what becomes of its guesses, nor how the target's memory moves: what agrees stays, the rest goes.
    """

    name = "draft"

    def __init__(self, backend: Backend, settings: EngineSettings | None = None, size: float = 1.0) -> None:
        """`size` is that of its weights, relative to the model it guesses for."""
        self._backend = backend
        self._size = size
        self.memory = PrefixMemory(backend, Ledger(), settings or EngineSettings(ram_bytes=0))
        self._mirrors: dict[Job, Mirror] = {}

    def ready(self, job: Job) -> bool:
        return not job.media  # it does not see

    def kind(self, job: Job) -> str:
        return self.name

    def estimate(self, job: Job) -> float:
        return FIRST_ESTIMATE

    def behind(self, job: Job) -> float:
        mirror = self._mirrors.get(job)
        if mirror is None:
            reuse = self.memory.plan(_known(job), salt=job.request.salt)
            held = 0 if reuse is None else reuse.keep
        else:
            held = len(mirror.slot)
        lacking = job.known - 1 - held
        return lacking * self._size if lacking > FEW else 0.0

    def catch_up(self, jobs: Sequence[Job]) -> None:
        try:
            for job in jobs:
                self._catch_up(job)
        except AfterglowError:
            self._begin_anew()

    def draft(self, wishes: Sequence[Wish]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wishes]
        try:
            ready = [index for index, (job, _) in enumerate(wishes) if self._catch_up(job)]
            self._guess(wishes, ready, drafts)
        except AfterglowError:  # a guess is not worth an answer: begin anew
            self._begin_anew()
            return [[] for _ in wishes]
        return drafts

    def _begin_anew(self) -> None:
        for mirror in self._mirrors.values():
            mirror.slot.clear()

    def forget(self, job: Job) -> None:
        """What it holds of the job is kept for the next turn, without guesses."""
        mirror = self._mirrors.pop(job, None)
        if mirror is not None:
            keep = common_prefix(mirror.slot.ids, _known(job))
            if mirror.slot.resumable(keep):
                mirror.slot.truncate(keep)
            self.memory.release(mirror.slot)

    def tidy(self) -> bool:
        """Write something towards the disk; False: there is nothing."""
        return self.memory.tidy()

    def close(self) -> None:
        for job in list(self._mirrors):
            self.forget(job)
        self.memory.close(seconds=CLOSING)
        self._backend.close()

    def _slot(self, job: Job) -> Slot:
        return self._mirrors[job].slot

    def _catch_up(self, job: Job) -> bool:
        """Compute what the job knows but its newest token. False: this model cannot read it, or has no place for it."""
        known = _known(job)
        if int(known.min()) < 0 or int(known.max()) >= self._backend.vocabulary:
            return False  # a picture, or a token that only the target has
        if len(known) > self._backend.capabilities.cells:
            return False
        mirror = self._mirror(job, known)
        if mirror is None:
            return False
        slot, limit = mirror.slot, self._backend.capabilities.batch_cells
        while len(slot) < len(known) - 1:
            stop = min([len(known) - 1, len(slot) + limit, *[cut for cut in mirror.cuts if cut > len(slot)]])
            started = time.perf_counter()
            chunk = known[len(slot) : stop]
            self._backend.decode([Span(slot.number, chunk, slot.position, 0)])
            slot.decoded(chunk)
            self.memory.costs.computed(len(chunk), time.perf_counter() - started)
            if stop in mirror.cuts:
                self.memory.take_checkpoint(slot)
        return True

    def _mirror(self, job: Job, known: Ids) -> Mirror | None:
        """The job's sequence, cut back to what agrees, or a new one that begins with the most that is kept."""
        mirror, salt = self._mirrors.get(job), job.request.salt
        if mirror is not None:
            keep = min(common_prefix(mirror.slot.ids, known), len(known) - 1)
            if mirror.slot.resumable(keep) and (keep or not len(mirror.slot)):
                mirror.slot.truncate(keep)
                return mirror
            self.forget(job)
        reuse = self.memory.plan(known, salt=salt)
        if reuse is None:  # jobs that had to step aside hold their places in vain
            for other in [other for other in self._mirrors if other.sequence is None]:
                self.forget(other)
            reuse = self.memory.plan(known, salt=salt)
        if reuse is None:
            return None
        slot, _ = self.memory.begin(reuse, salt)
        mirror = self._mirrors[job] = Mirror(slot, self.memory.cuts(slot, job.prompt, job.request.boundaries))
        return mirror

    def _guess(self, wishes: Sequence[Wish], ready: list[int], drafts: list[list[int]]) -> None:
        """One guess of every job in each decode."""
        saved = self._saved([self._slot(wishes[index][0]) for index in ready])
        for step in range(max([wishes[index][1] for index in ready], default=0)):
            active = [index for index in ready if self._has_room(wishes[index], step)]
            if not active:
                break
            spans: list[Span] = []
            for index in active:
                job, slot = wishes[index][0], self._slot(wishes[index][0])
                token = drafts[index][-1] if step else job.generated[-1]
                spans.append(Span(slot.number, [token], slot.position, 1))
            self._backend.decode(spans)
            for row, (index, span) in enumerate(zip(active, spans, strict=True)):
                self._slot(wishes[index][0]).decoded(span.ids)
                drafts[index].append(int(self._backend.logits(row, 0).argmax()))
        for slot, length, state in saved:
            slot.restore(length, state, 0)

    def _has_room(self, wish: Wish, step: int) -> bool:
        job, limit = wish
        return step < limit and self._slot(job).cells < self._backend.capabilities.cells

    def _saved(self, slots: list[Slot]) -> list[tuple[Slot, int, State]]:
        """Where memory cannot drop a guess: what it is before, to be put back."""
        if self._backend.capabilities.memory in ("attention", "window"):
            return []
        return [(slot, len(slot), self._backend.save(slot.number, "partial")) for slot in slots]
