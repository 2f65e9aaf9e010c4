"""The pictures and sounds of jobs, as the engine's thread sees them: which are needed next, and which are there."""

from __future__ import annotations

import logging

import numpy as np

from afterglow.engine.entries import Ledger
from afterglow.engine.job import Job
from afterglow.engine.picture_files import PictureFiles
from afterglow.engine.pictures import Encodes, Pictures
from afterglow.engine.settings import EngineSettings
from afterglow.errors import AfterglowError
from afterglow.media.contents import Sound

AHEAD = 2  # pictures of one prompt that are encoded before it is their turn
SHARE = 10  # of the disk's bytes, encoded pictures may take one such part beside the segments
PATIENCE = 0.02  # seconds that a step waits where nothing can be done before a picture is encoded
logger = logging.getLogger("afterglow.engine")


class Looking:
    """Has pictures encoded in time for the jobs that need them."""

    def __init__(self, projector: Encodes | None, ledger: Ledger, settings: EngineSettings) -> None:
        self.pictures = open_pictures(projector, settings)
        self.trouble_at_load = ""  # why there is no projector, where one was asked for
        self._ledger = ledger
        self._was_last = False

    def begin(self, job: Job) -> None:
        """Note where the pictures of a new job stand, and what they are."""
        job.prompt_cells = self._ledger.cells(job.prompt)
        if int(job.prompt.min()) >= 0:
            return
        job.media = tuple(np.flatnonzero(job.prompt < 0).tolist())
        for place in job.media:
            media = self._ledger.media(int(job.prompt[place]))
            job.media_cells += media.cells
            if media.digest in job.request.contents:
                part = job.parts[place] = job.request.contents[media.digest]
                job.audio_cells += media.cells if isinstance(part.content, Sound) else 0

    def reused(self, job: Job, kept: int) -> None:
        """Note that the first entries of a job's prompt were in memory."""
        job.cached = self._ledger.cells(job.prompt[:kept])
        job.media_cached = sum(self._ledger.media(int(job.prompt[place])).cells for place in job.media if place < kept)

    def ready(self, job: Job) -> bool:
        """Have the job's next pictures encoded. False: the very next one is not there yet, or never will be."""
        assert job.sequence is not None
        held = len(job.sequence)
        for place in [place for place in job.media if place >= held and place in job.parts][:AHEAD]:
            if place not in job.encodings:
                job.encodings[place] = self.pictures.want(job.parts[place], job.request.id, job.request.salt)
        coming = job.encodings.get(held)
        return coming is None or coming.embeddings is not None

    def trouble(self, job: Job) -> AfterglowError | None:
        """Why the job's next picture will never be there."""
        assert job.sequence is not None
        coming = job.encodings.get(len(job.sequence))
        return None if coming is None else coming.error

    def decoded(self, job: Job) -> None:
        """What is in memory is needed no more. Who first wanted a picture had it encoded."""
        assert job.sequence is not None
        for place in [place for place in job.encodings if place < len(job.sequence)]:
            encoding = job.encodings.pop(place)
            if encoding.encoded:
                encoding.encoded = False  # counted
                job.encoded += 1

    def is_turn(self, pictures: list[Job], *, others: bool) -> bool:
        """Whether the next decode is a picture's: it has one for itself, every second one where others have work."""
        self._was_last = bool(pictures) and not (others and self._was_last)
        return self._was_last

    def wait(self) -> None:
        """Until a picture was encoded, or a moment."""
        self.pictures.wait(PATIENCE)

    def forget(self, job: Job) -> None:
        """The job has ended."""
        if job.media:
            self.pictures.forget(job.request.id)

    def close(self) -> None:
        self.pictures.close()


def open_pictures(projector: Encodes | None, settings: EngineSettings) -> Pictures:
    """What encodes for an engine, with files where it keeps any. A disk that cannot be used costs a warning."""
    files = None
    if projector is not None and settings.disk_directory is not None:
        try:
            files = PictureFiles(settings.disk_directory, settings.disk_bytes // SHARE)
        except (OSError, AfterglowError) as error:
            logger.warning("encoded pictures are not kept in %s: %s", settings.disk_directory, error)
    return Pictures(projector, settings.picture_bytes, files)
