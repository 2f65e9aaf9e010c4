"""Planted bugs around pictures. See mutants.py."""

from __future__ import annotations

from afterglow.engine import engine
from afterglow.engine.kvcache import prefix_cache
from afterglow.engine.kvcache.prefix_cache import PrefixCache
from afterglow.engine.multimodal.encoder_cache import EncoderCache
from afterglow.engine.scheduling.job import Job
from afterglow.engine.scheduling.media import MediaScheduler
from afterglow.engine.types.entries import EntryInterner
from afterglow.engine.types.media import MediaPart
from laws import test_images_on_the_fake as laws
from laws.mutants import mutant, wrapped

same = laws.test_reuse_company_and_chunking_change_no_token


@mutant("pictures are encoded under the name of their size", same)
def _(put):
    put(MediaPart, "compute_source_key", lambda self, key: bytes([self.content.width]) * 32)


@mutant("what was encoded is not kept", same, laws.test_encoded_pictures_stay_within_their_bytes)
def _(put):
    put(EncoderCache, "_insert", lambda self, source, embeddings: None)


@mutant("what was encoded is kept without bound", laws.test_encoded_pictures_stay_within_their_bytes)
def _(put):
    def keep(original, self, source, embeddings):
        self._limit = 10**9
        original(self, source, embeddings)

    wrapped(EncoderCache, "_insert", keep)(put)


@mutant(
    "two who want the same picture have it encoded twice", laws.test_two_who_want_the_same_picture_have_it_encoded_once
)
def _(put):
    count = iter(range(10**6))
    put(MediaPart, "compute_source_key", lambda self, key: next(count).to_bytes(32, "little"))


@mutant("a picture goes into a decode with text", same)
def _(put):
    def next_stop(original, self):
        media, self.media = self.media, ()
        stop = original(self)
        self.media = media
        return stop

    wrapped(Job, "get_chunk_limit", next_stop)(put)


@mutant("pictures take as many positions as cells", same)
def _(put):
    put(EntryInterner, "count_positions", EntryInterner.count_cells)


@mutant("there is no checkpoint behind pictures", laws.test_c7_checkpoints_lie_right_behind_pictures)
def _(put):
    def cuts(original, self, ids, *arguments):
        return [cut for cut in original(self, ids, *arguments) if ids[cut - 1] >= 0]

    wrapped(PrefixCache, "checkpoint_positions", cuts)(put)


@mutant("pictures have every decode", laws.test_beside_pictures_the_others_get_every_second_decode)
def _(put):
    put(MediaScheduler, "is_media_turn", lambda self, pictures, others: bool(pictures))


@mutant("pictures of requests that are gone are encoded", laws.test_a_cancelled_request_s_pictures_are_not_encoded)
def _(put):
    put(EncoderCache, "cancel_request", lambda self, request: None)


@mutant(
    "a picture counts as one cell for those who could wait",
    laws.test_prompts_that_begin_with_the_same_picture_compute_it_once,
)
def _(put):
    def find(original, job, running, keep, ledger, round_down):
        class Short:
            cells = staticmethod(len)

        return original(job, running, keep, Short, round_down)

    original = engine.find_leader
    put(engine, "find_leader", lambda *arguments: find(original, *arguments))


@mutant(
    "behind a picture the grid is not gone on", laws.test_the_deterministic_mode_reuses_pictures_whatever_the_shapes
)
def _(put):
    put(prefix_cache, "last_edge", lambda length, ids, grid: length - length % grid)


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

    put(EncoderCache, "_encode", encode)
