"""A projector without a model: what it makes of a picture names the picture, so a wrong one changes what is said."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from afterglow.engine.multimodal.encoder_cache import build_media_entries
from afterglow.engine.types.entries import Entry
from afterglow.engine.types.media import MediaPart
from afterglow.llama.projector import MediaChunk, MediaEmbedding, MediaPlaceholder, Modality
from afterglow.media.types import ImageData, MediaData
from afterglow.testing.memory import hash_media_digest

POSITIONS_PER_MEDIA = 2  # steps that every picture takes


class FakeProjector:
    """Pictures fill as many cells as they are wide, and take two positions.

    >>> FakeProjector().measure(Picture(width=5, height=1, pixels=bytes(15)))
    (Piece(cells=5, positions=2, whole=False),)
    """

    modalities: frozenset[Modality] = frozenset({"image", "audio"})

    def __init__(self, key: bytes = b"fake projector", *, non_causal: bool = False) -> None:
        self.key = key
        self.non_causal = non_causal
        self.encoded_batch_sizes: list[int] = []  # how many contents were encoded together, call by call
        self.injected_errors: list[Exception | None] = []  # raised by the coming calls, one each; None: that one works
        self.encoding_allowed = threading.Event()  # encoding waits for it
        self.encoding_allowed.set()

    def measure(self, media: MediaData) -> MediaPlaceholder:
        """What stands in a prompt for it."""
        return (MediaChunk(media.width if isinstance(media, ImageData) else 3, POSITIONS_PER_MEDIA, self.non_causal),)

    def build_entries(self, media: MediaData) -> tuple[list[Entry], dict[bytes, MediaPart]]:
        """What stands in a request for it, and the request's `contents`."""
        found = build_media_entries(media, self.measure(media), self.key)
        return [entry for entry, _ in found], {
            part.compute_digest(self.key): part for _, part in found if part is not None
        }

    def encode(self, contents: Sequence[MediaData]) -> list[list[MediaEmbedding]]:
        self.encoding_allowed.wait()
        if self.injected_errors and (fault := self.injected_errors.pop(0)) is not None:
            raise fault
        self.encoded_batch_sizes.append(len(contents))
        return [[self._make_embedding(content)] for content in contents]

    def _make_embedding(self, media: MediaData) -> MediaEmbedding:
        (piece,) = self.measure(media)
        assert isinstance(piece, MediaChunk)
        number = np.array([[hash_media_digest(MediaPart(media).compute_digest(self.key))]], dtype=np.int64).view(
            np.float32
        )
        offsets = np.zeros((piece.cells, 4), dtype=np.int32)
        return MediaEmbedding(np.repeat(number, piece.cells, axis=0), offsets, piece.non_causal)
