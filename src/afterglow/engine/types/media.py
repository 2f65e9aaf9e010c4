"""Media parts of a prompt and the protocol of their encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from afterglow.llama.projector import MediaEmbedding, MediaSize
from afterglow.media.load import decode_media
from afterglow.media.policy import MediaPolicy, Modality
from afterglow.media.types import MediaData


class MediaEncoder(Protocol):
    """Encodes images and audio into embeddings: a llama.cpp projector or a fake."""

    key: bytes  # key of everything except the content that determines the embeddings
    modalities: frozenset[Modality]

    def encode(self, contents: Sequence[MediaData]) -> list[list[MediaEmbedding]]:
        """Return the embeddings of each content, one per piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMedia:
    """An image or audio file that only the process of the engine decodes, with what decoding it once has shown."""

    modality: Modality
    data: bytes
    detail: str
    policy: MediaPolicy
    size: MediaSize
    digest: bytes  # of the decoded content
    nbytes: int  # of the decoded content

    def decode(self) -> MediaData:
        """Decode the file."""
        return decode_media(self.modality, self.data, self.policy, detail=self.detail)


MediaContent: TypeAlias = MediaData | EncodedMedia


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One piece of an image or audio clip in a prompt."""

    content: MediaContent
    piece_index: int = 0

    def decode_content(self) -> MediaData:
        """Return the decoded content."""
        return self.content.decode() if isinstance(self.content, EncodedMedia) else self.content

    def compute_source_key(self, projector_key: bytes, salt: str = "") -> bytes:
        """Return the encoder cache key of the content for this projector and salt."""
        return hashlib.sha256(self.content.digest + projector_key + salt.encode()).digest()

    def compute_digest(self, projector_key: bytes) -> bytes:
        """Return the digest of the piece, which identifies its entry."""
        return hashlib.sha256(self.compute_source_key(projector_key) + b" %d" % self.piece_index).digest()
