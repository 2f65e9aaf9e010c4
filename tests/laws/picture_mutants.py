"""Planted bugs around pictures. See mutants.py."""

from __future__ import annotations

import test_pictures_on_the_fake as laws
from mutants import mutant, wrapped

from afterglow.engine import engine as engine_module
from afterglow.engine import memory as memory_module
from afterglow.engine.entries import Ledger
from afterglow.engine.job import Job
from afterglow.engine.looking import Looking
from afterglow.engine.memory import PrefixMemory
from afterglow.engine.pictures import Part, Pictures

same = laws.test_reuse_company_and_chunking_change_no_token


@mutant("pictures are encoded under the name of their size", same)
def _(put):
    put(Part, "source", lambda self, key: bytes([self.content.width]) * 32)


@mutant("what was encoded is not kept", same, laws.test_encoded_pictures_stay_within_their_bytes)
def _(put):
    put(Pictures, "_keep", lambda self, source, embeddings: None)


@mutant("what was encoded is kept without bound", laws.test_encoded_pictures_stay_within_their_bytes)
def _(put):
    def keep(original, self, source, embeddings):
        self._limit = 10**9
        original(self, source, embeddings)

    wrapped(Pictures, "_keep", keep)(put)


@mutant(
    "two who want the same picture have it encoded twice", laws.test_two_who_want_the_same_picture_have_it_encoded_once
)
def _(put):
    count = iter(range(10**6))
    put(Part, "source", lambda self, key: next(count).to_bytes(32, "little"))


@mutant("a picture goes into a decode with text", same)
def _(put):
    def next_stop(original, self):
        media, self.media = self.media, ()
        stop = original(self)
        self.media = media
        return stop

    wrapped(Job, "next_stop", next_stop)(put)


@mutant("pictures take as many positions as cells", same)
def _(put):
    put(Ledger, "positions", Ledger.cells)


@mutant("there is no checkpoint behind pictures", laws.test_c7_checkpoints_lie_right_behind_pictures)
def _(put):
    def cuts(original, self, ids, *arguments):
        return [cut for cut in original(self, ids, *arguments) if ids[cut - 1] >= 0]

    wrapped(PrefixMemory, "cuts", cuts)(put)


@mutant("pictures have every decode", laws.test_beside_pictures_the_others_get_every_second_decode)
def _(put):
    put(Looking, "is_turn", lambda self, pictures, others: bool(pictures))


@mutant("pictures of requests that are gone are encoded", laws.test_a_cancelled_request_s_pictures_are_not_encoded)
def _(put):
    put(Pictures, "forget", lambda self, request: None)


@mutant(
    "a picture counts as one cell for those who could wait",
    laws.test_prompts_that_begin_with_the_same_picture_compute_it_once,
)
def _(put):
    def find(original, job, running, keep, ledger, round_down):
        class Short:
            cells = staticmethod(len)

        return original(job, running, keep, Short, round_down)

    original = engine_module.find_leader
    put(engine_module, "find_leader", lambda *arguments: find(original, *arguments))


@mutant(
    "behind a picture the grid is not gone on", laws.test_the_deterministic_mode_reuses_pictures_whatever_the_shapes
)
def _(put):
    put(memory_module, "last_edge", lambda length, ids, grid: length - length % grid)


@mutant(
    "an encoding that fails takes the others with it",
    laws.test_a_picture_that_cannot_be_encoded_ends_its_request_and_no_other,
)
def _(put):
    def encode(self, taken):
        try:
            groups = self.projector.encode([part.content for part in taken.values()]) if taken else []
        except Exception as error:
            return [self._failed(source, error) for source in taken]
        return [self._arrived(source, found, encoded=True) for source, found in zip(taken, groups, strict=True)]

    put(Pictures, "_encode", encode)
