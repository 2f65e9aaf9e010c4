"""The pictures and sounds of jobs, as the engine's thread sees them: which are needed next, and which are there."""

from __future__ import annotations

import logging

import numpy as np

from afterglow.engine.multimodal.embedding_files import EmbeddingFiles
from afterglow.engine.multimodal.encoder_cache import EncoderCache
from afterglow.engine.scheduling.job import Job
from afterglow.engine.types.entries import EntryInterner
from afterglow.engine.types.media import MediaEncoder
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError
from afterglow.media.types import AudioData

MAX_MEDIA_ENCODED_AHEAD = 2  # pictures of one prompt that are encoded before it is their turn
DISK_CACHE_DIVISOR = 10  # of the disk's bytes, encoded pictures may take one such part beside the segments
MAX_ENCODE_WAIT_SECONDS = 0.02  # seconds that a step waits where nothing can be done before a picture is encoded
logger = logging.getLogger("afterglow.engine")


class MediaScheduler:
    """Has pictures encoded in time for the jobs that need them."""

    def __init__(self, projector: MediaEncoder | None, interner: EntryInterner, settings: EngineSettings) -> None:
        self.encoder_cache = open_encoder_cache(projector, settings)
        self.projector_error = ""  # why there is no projector, where one was asked for
        self._interner = interner
        self._was_media_last = False

    def add_job(self, job: Job) -> None:
        """Note where the pictures of a new job stand, and what they are."""
        job.prompt_cells = self._interner.count_cells(job.prompt)
        if int(job.prompt.min()) >= 0:
            return
        job.media_indices = tuple(np.flatnonzero(job.prompt < 0).tolist())
        for place in job.media_indices:
            media = self._interner.get_media(int(job.prompt[place]))
            job.media_cells += media.cells
            if media.digest in job.request.media:
                part = job.media_parts[place] = job.request.media[media.digest]
                job.audio_cells += media.cells if isinstance(part.content, AudioData) else 0

    def record_reuse(self, job: Job, reuse_length: int) -> None:
        """Note that the first entries of a job's prompt were in memory."""
        job.cached_cells = self._interner.count_cells(job.prompt[:reuse_length])
        job.cached_media_cells = sum(
            self._interner.get_media(int(job.prompt[place])).cells
            for place in job.media_indices
            if place < reuse_length
        )

    def prepare_next(self, job: Job) -> bool:
        """Have the job's next pictures encoded. False: the very next one is not there yet, or never will be."""
        assert job.sequence is not None
        held = len(job.sequence)
        for place in [place for place in job.media_indices if place >= held and place in job.media_parts][
            :MAX_MEDIA_ENCODED_AHEAD
        ]:
            if place not in job.encode_tasks:
                job.encode_tasks[place] = self.encoder_cache.request_encoding(
                    job.media_parts[place], job.request.id, job.request.salt
                )
        coming = job.encode_tasks.get(held)
        return coming is None or coming.embeddings is not None

    def get_error(self, job: Job) -> AfterglowError | None:
        """Why the job's next picture will never be there."""
        assert job.sequence is not None
        coming = job.encode_tasks.get(len(job.sequence))
        return None if coming is None else coming.error

    def release_decoded(self, job: Job) -> None:
        """What is in memory is needed no more. Who first wanted a picture had it encoded."""
        assert job.sequence is not None
        for place in [place for place in job.encode_tasks if place < len(job.sequence)]:
            encoding = job.encode_tasks.pop(place)
            if encoding.was_encoded:
                encoding.was_encoded = False  # counted
                job.encoded_media += 1

    def is_media_turn(self, media_jobs: list[Job], *, has_other_work: bool) -> bool:
        """Whether the next decode is a picture's: it has one for itself, every second one where others have work."""
        self._was_media_last = bool(media_jobs) and not (has_other_work and self._was_media_last)
        return self._was_media_last

    def wait(self) -> None:
        """Until a picture was encoded, or a moment."""
        self.encoder_cache.wait(MAX_ENCODE_WAIT_SECONDS)

    def remove_job(self, job: Job) -> None:
        """The job has ended."""
        if job.media_indices:
            self.encoder_cache.cancel_request(job.request.id)

    def close(self) -> None:
        self.encoder_cache.close()


def open_encoder_cache(projector: MediaEncoder | None, settings: EngineSettings) -> EncoderCache:
    """What encodes for an engine, with files where it keeps any. A disk that cannot be used costs a warning."""
    files = None
    if projector is not None and settings.disk_cache_directory is not None:
        try:
            files = EmbeddingFiles(settings.disk_cache_directory, settings.disk_cache_bytes // DISK_CACHE_DIVISOR)
        except (OSError, AfterglowError) as error:
            logger.warning("encoded pictures are not kept in %s: %s", settings.disk_cache_directory, error)
    return EncoderCache(projector, settings.encoder_cache_bytes, files)
