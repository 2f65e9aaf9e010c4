"""Media parts of a prompt and the protocol of their encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from afterglow.llama.projector import MediaEmbedding, Modality
from afterglow.media.types import MediaData


class MediaEncoder(Protocol):
    """What makes rows of pictures: a projector, or a fake."""

    key: bytes  # of everything that shapes them beside the content
    modalities: frozenset[Modality]

    def encode(self, contents: Sequence[MediaData]) -> list[list[MediaEmbedding]]:
        """The pieces of each, as rows."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One piece of a content that stands in a prompt."""

    content: MediaData
    piece_index: int = 0

    def compute_source_key(self, projector_key: bytes, salt: str = "") -> bytes:
        """Names the content as a projector with this key sees it, and whose it is."""
        return hashlib.sha256(self.content.digest + projector_key + salt.encode()).digest()

    def compute_digest(self, projector_key: bytes) -> bytes:
        """Names the piece: the identity of its entry."""
        return hashlib.sha256(self.compute_source_key(projector_key) + b" %d" % self.piece_index).digest()
