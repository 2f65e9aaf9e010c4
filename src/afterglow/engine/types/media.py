"""Media parts of a prompt and the protocol of their encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from afterglow.llama.projector import MediaEmbedding
from afterglow.media.policy import Modality
from afterglow.media.types import MediaData


class MediaEncoder(Protocol):
    """Encodes images and audio into embeddings: a llama.cpp projector or a fake."""

    key: bytes  # key of everything except the content that determines the embeddings
    modalities: frozenset[Modality]

    def encode(self, contents: Sequence[MediaData]) -> list[list[MediaEmbedding]]:
        """Return the embeddings of each content, one per piece."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One piece of an image or audio clip in a prompt."""

    content: MediaData
    piece_index: int = 0

    def compute_source_key(self, projector_key: bytes, salt: str = "") -> bytes:
        """Return the encoder cache key of the content for this projector and salt."""
        return hashlib.sha256(self.content.digest + projector_key + salt.encode()).digest()

    def compute_digest(self, projector_key: bytes) -> bytes:
        """Return the digest of the piece, which identifies its entry."""
        return hashlib.sha256(self.compute_source_key(projector_key) + b" %d" % self.piece_index).digest()
