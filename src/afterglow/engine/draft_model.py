"""Guesses of a second, smaller model with the same vocabulary, whose sequences mirror those of the model itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from afterglow.engine.backend import Backend, Span, State
from afterglow.engine.drafting import Wish
from afterglow.engine.entries import Ids, Ledger, common_prefix
from afterglow.engine.job import Job
from afterglow.engine.sequence import Sequence as Slot
from afterglow.errors import AfterglowError, InvalidArgument
from afterglow.llama.vocabulary import Vocabulary

UNEQUAL = 128  # tokens that one vocabulary may have more: some pad theirs
OWN = 5  # first tokens that may differ: unknown, start, end
WORTH_COPYING = 64  # entries; fewer are computed faster than they are found


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


class DraftModel:
    """The drafter on a model of its own. It owns the backend it is given.

    What it holds of a job is found again by comparing, so it needs not hear what becomes of its guesses, nor how the
    target's memory moves: what agrees stays, what does not goes.
    """

    name = "draft"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        ledger = Ledger()
        self._slots = [Slot(number, backend, ledger) for number in range(backend.capabilities.sequences)]

    def ready(self, job: Job) -> bool:
        return True

    def draft(self, wishes: Sequence[Wish]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wishes]
        try:
            ready = [index for index, (job, _) in enumerate(wishes) if self._catch_up(job)]
            self._guess(wishes, ready, drafts)
        except AfterglowError:  # a guess is not worth an answer: begin anew
            for slot in self._slots:
                slot.clear()
            return [[] for _ in wishes]
        return drafts

    def forget(self, job: Job) -> None:
        """What it holds of the job is kept for the next turn."""

    def close(self) -> None:
        self._backend.close()

    def _slot(self, job: Job) -> Slot:
        assert job.sequence is not None
        return self._slots[job.sequence.number]

    def _catch_up(self, job: Job) -> bool:
        """Compute what the job knows but its newest token. False: this model cannot read it."""
        known = np.concatenate([job.prompt, np.array(job.generated, dtype=np.int64)])
        if int(known.min()) < 0 or int(known.max()) >= self._backend.vocabulary:
            return False  # a picture, or a token that only the target has
        slot = self._slot(job)
        if len(known) > self._backend.capabilities.cells:
            return False
        self._begin(slot, known)
        while len(slot) < len(known) - 1:
            chunk = known[len(slot) : min(len(known) - 1, len(slot) + self._backend.capabilities.batch_cells)]
            self._backend.decode([Span(slot.number, chunk, slot.position, 0)])
            slot.decoded(chunk)
        return True

    def _begin(self, slot: Slot, known: Ids) -> None:
        """Keep what agrees, or copy what another sequence has more of."""
        keep = min(common_prefix(slot.ids, known), len(known) - 1)
        best = max(self._slots, key=lambda other: common_prefix(other.ids, known))
        shared = min(common_prefix(best.ids, known), len(known) - 1)
        if shared >= keep + WORTH_COPYING and self._backend.capabilities.forks_anywhere:
            slot.copy_from(best, shared)
        elif slot.resumable(keep):
            slot.truncate(keep)
        else:
            slot.clear()

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
                self._slots[span.sequence].decoded(span.ids)
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
