"""Projector without a model: its embeddings identify the media, so that wrong media changes the generated tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from afterglow.engine.types.media import MediaPart
from afterglow.llama.projector import MediaChunk, MediaEmbedding, MediaPlaceholder
from afterglow.media.policy import Modality
from afterglow.media.types import ImageData, MediaData
from afterglow.testing.memory import hash_media_digest

POSITIONS_PER_MEDIA = 2


class FakeProjector:
    """Images take as many cells as they are wide, audio three; all take two positions.

    >>> FakeProjector().measure(ImageData(width=5, height=1, pixels=bytes(15)))
    (MediaChunk(cells=5, positions=2, non_causal=False),)
    """

    modalities: frozenset[Modality] = frozenset({"image", "audio"})

    def __init__(self, key: bytes = b"fake projector", *, non_causal: bool = False) -> None:
        self.key = key
        self.non_causal = non_causal
        self.encoded_batch_sizes: list[int] = []  # media per `encode` call
        self.injected_errors: list[Exception | None] = []  # raised by the next calls, one each; None: no error
        self.encoding_allowed = threading.Event()  # `encode` waits for it
        self.encoding_allowed.set()
        self.encoding_started = threading.Event()  # set by the first `encode`

    def measure(self, media: MediaData) -> MediaPlaceholder:
        """Return the prompt entries of media without encoding it."""
        return (MediaChunk(media.width if isinstance(media, ImageData) else 3, POSITIONS_PER_MEDIA, self.non_causal),)

    def encode(self, contents: Sequence[MediaData]) -> list[list[MediaEmbedding]]:
        self.encoding_started.set()
        self.encoding_allowed.wait()
        if self.injected_errors and (error := self.injected_errors.pop(0)) is not None:
            raise error
        self.encoded_batch_sizes.append(len(contents))
        return [[self._make_embedding(content)] for content in contents]

    def _make_embedding(self, media: MediaData) -> MediaEmbedding:
        (chunk,) = self.measure(media)
        assert isinstance(chunk, MediaChunk)
        digest = MediaPart(media).compute_digest(self.key)
        row = np.array([[hash_media_digest(digest)]], dtype=np.int64).view(np.float32)
        offsets = np.zeros((chunk.cells, 4), dtype=np.int32)
        return MediaEmbedding(np.repeat(row, chunk.cells, axis=0), offsets, chunk.non_causal)
