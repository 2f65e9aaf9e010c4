"""Media of jobs on the engine thread: requests encoding ahead of time and decides when media is decoded."""

from __future__ import annotations

import logging

import numpy as np

from afterglow.engine.multimodal.embedding_files import EmbeddingFiles
from afterglow.engine.multimodal.encoder_cache import EncoderCache
from afterglow.engine.scheduling.job import Job, RunningJob
from afterglow.engine.types.entries import EntryInterner
from afterglow.engine.types.media import MediaEncoder
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError

MAX_MEDIA_ENCODED_AHEAD = 2  # media of one prompt that are encoded before they are due
DISK_CACHE_DIVISOR = 10  # embedding files may take this fraction of the disk cache size, in addition to the blocks
MAX_ENCODE_WAIT_SECONDS = 0.02  # how long a step blocks if every job waits for the encoder
logger = logging.getLogger("afterglow.engine")


class MediaScheduler:
    """Has media encoded in time for the jobs that need it."""

    def __init__(self, projector: MediaEncoder | None, interner: EntryInterner, settings: EngineSettings) -> None:
        self.encoder_cache = open_encoder_cache(projector, settings)
        self.projector_error = ""  # why a requested projector is not available
        self._interner = interner
        self._was_media_last = False

    def add_job(self, job: Job) -> None:
        """Record the media entries of a new job and their content."""
        job.prompt_cells = self._interner.count_cells(job.prompt)
        if int(job.prompt.min()) >= 0:
            return
        job.media_indices = tuple(np.flatnonzero(job.prompt < 0).tolist())
        for index in job.media_indices:
            media = self._interner.get_media(int(job.prompt[index]))
            job.media_cells += media.cells
            if media.digest in job.request.media:
                part = job.media_parts[index] = job.request.media[media.digest]
                job.audio_cells += media.cells if part.content.modality == "audio" else 0

    def record_reuse(self, job: Job, reuse_length: int) -> None:
        """Record that the first `reuse_length` entries of a job's prompt were a prefix hit."""
        job.cached_entries = reuse_length
        job.cached_cells = self._interner.count_cells(job.prompt[:reuse_length])
        job.cached_media_cells = sum(
            self._interner.get_media(int(job.prompt[index])).cells
            for index in job.media_indices
            if index < reuse_length
        )

    def prepare_next(self, running: RunningJob) -> bool:
        """Request encoding of the job's next media. Return False if the next entry is not encoded yet, or failed."""
        job, length = running.job, len(running.sequence)
        upcoming = [index for index in job.media_indices if index >= length and index in job.media_parts]
        for index in upcoming[:MAX_MEDIA_ENCODED_AHEAD]:
            if index not in job.encode_tasks:
                part, request = job.media_parts[index], job.request
                job.encode_tasks[index] = self.encoder_cache.request_encoding(part, request.id, request.salt)
        task = job.encode_tasks.get(length)
        return task is None or task.embeddings is not None

    def get_error(self, running: RunningJob) -> AfterglowError | None:
        """Return why the job's next media entry could not be encoded, if it failed."""
        task = running.job.encode_tasks.get(len(running.sequence))
        return None if task is None else task.error

    def release_decoded(self, running: RunningJob) -> None:
        """Drop encode tasks of entries in the KV cache. An encoding counts for the job that releases it first."""
        job = running.job
        for index in [index for index in job.encode_tasks if index < len(running.sequence)]:
            task = job.encode_tasks.pop(index)
            if task.was_encoded:
                task.was_encoded = False  # counted
                job.encoded_media += 1

    def is_media_turn(self, media_jobs: list[RunningJob], *, has_other_work: bool) -> bool:
        """Return whether the next decode is for media: at most every second one if there is other work."""
        self._was_media_last = bool(media_jobs) and not (has_other_work and self._was_media_last)
        return self._was_media_last

    def wait(self) -> None:
        """Wait until media was encoded, at most `MAX_ENCODE_WAIT_SECONDS`."""
        self.encoder_cache.wait(MAX_ENCODE_WAIT_SECONDS)

    def remove_job(self, job: Job) -> None:
        """Cancel the encodings that only this job needs."""
        if job.media_indices:
            self.encoder_cache.cancel_request(job.request.id)

    def close(self) -> None:
        self.encoder_cache.close()


def open_encoder_cache(projector: MediaEncoder | None, settings: EngineSettings) -> EncoderCache:
    """Create the encoder cache, with files if a disk cache is configured and its directory can be used."""
    files = None
    if projector is not None and settings.disk_cache_directory is not None:
        try:
            files = EmbeddingFiles(settings.disk_cache_directory, settings.disk_cache_bytes // DISK_CACHE_DIVISOR)
        except (OSError, AfterglowError) as error:
            logger.warning("media embeddings are not stored in %s: %s", settings.disk_cache_directory, error)
    return EncoderCache(projector, settings.encoder_cache_bytes, files)
