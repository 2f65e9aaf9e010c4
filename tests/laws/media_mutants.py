"""Mutants of media encoding and scheduling. See mutants.py."""

from __future__ import annotations

import itertools

from afterglow.engine import engine
from afterglow.engine.kvcache import planner, prefix_cache
from afterglow.engine.kvcache.prefix_cache import PrefixCache
from afterglow.engine.multimodal.encoder_cache import EncoderCache
from afterglow.engine.scheduling.job import RunningJob
from afterglow.engine.scheduling.media import MediaScheduler
from afterglow.engine.types.entries import EntryInterner
from afterglow.engine.types.media import MediaPart
from laws import test_images_on_fake as laws
from laws.mutants import mutant, wrap

no_token_changes = laws.test_reuse_concurrency_and_chunking_change_no_token


class SizeKeyedPart(MediaPart):
    """A part whose encoder cache key depends on its size only."""

    __slots__ = ()

    def compute_source_key(self, projector_key, salt=""):
        return bytes([self.content.width]) * 32


@mutant("the encoder cache key depends on the image size only", no_token_changes)
def _(put):
    def request_encoding(original, self, part, *args):
        return original(self, SizeKeyedPart(part.content, part.piece_index), *args)

    wrap(EncoderCache, "request_encoding", request_encoding)(put)


@mutant("embeddings are not cached", no_token_changes, laws.test_the_encoder_cache_stays_within_its_bytes)
def _(put):
    put(EncoderCache, "_insert", lambda self, source_key, embeddings: None)


@mutant("the encoder cache has no limit", laws.test_the_encoder_cache_stays_within_its_bytes)
def _(put):
    def insert(original, self, source_key, embeddings):
        self.budget.limit = 10**9
        original(self, source_key, embeddings)

    wrap(EncoderCache, "_insert", insert)(put)


@mutant("concurrent requests encode the same image twice", laws.test_concurrent_requests_encode_the_same_image_once)
def _(put):
    def request_encoding(original, self, part, request_id, salt=""):
        return original(self, part, request_id, f"{salt} {next(numbers)}")

    numbers = itertools.count()
    wrap(EncoderCache, "request_encoding", request_encoding)(put)


@mutant("an image shares a decode with text", no_token_changes)
def _(put):
    def get_chunk_limit(original, self):
        media_indices, self.job.media_indices = self.job.media_indices, ()
        limit = original(self)
        self.job.media_indices = media_indices
        return limit

    wrap(RunningJob, "get_chunk_limit", get_chunk_limit)(put)


@mutant("images use as many positions as cells", no_token_changes)
def _(put):
    put(EntryInterner, "count_positions", EntryInterner.count_cells)


@mutant("no checkpoint is taken after images", laws.test_c7_checkpoints_are_taken_right_after_images)
def _(put):
    def plan_checkpoints(original, self, sequence, entries, *options):
        return [position for position in original(self, sequence, entries, *options) if entries[position - 1] >= 0]

    wrap(PrefixCache, "plan_checkpoints", plan_checkpoints)(put)


@mutant("images take every decode", laws.test_image_decodes_alternate_with_other_decodes)
def _(put):
    put(MediaScheduler, "is_media_turn", lambda self, media_jobs, has_other_work: bool(media_jobs))


@mutant("images of ended requests are encoded", laws.test_images_of_a_cancelled_request_are_not_encoded)
def _(put):
    put(EncoderCache, "cancel_request", lambda self, request_id: None)


@mutant(
    "an image counts as one cell when a leader is chosen",
    laws.test_prompts_with_the_same_leading_image_prefill_it_once,
)
def _(put):
    class CountsEntries:
        count_cells = staticmethod(len)

    def find_leader(job, running, reuse_length, interner, grid):
        return original(job, running, reuse_length, CountsEntries, grid)

    original = engine.find_leader
    put(engine, "find_leader", find_leader)


@mutant("the grid does not restart after an image", laws.test_deterministic_mode_reuses_images)
def _(put):
    for module in (prefix_cache, planner):
        put(module, "round_down_to_grid", lambda length, entries, grid: length - length % grid)


@mutant(
    "an encoding failure fails the whole batch",
    laws.test_an_encoding_failure_ends_only_its_own_request,
)
def _(put):
    def encode(self, batch):
        try:
            results = self.projector.encode([part.content for part in batch.values()]) if batch else []
        except Exception as error:
            return [self._fail(source_key, error) for source_key in batch]
        return [self._complete(key, found, was_encoded=True) for key, found in zip(batch, results, strict=True)]

    put(EncoderCache, "_encode", encode)
