"""A projector without a model: what it makes of a picture names the picture, so a wrong one changes what is said."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from afterglow.engine.entries import Entry
from afterglow.engine.pictures import Part, entries_of
from afterglow.llama.projector import Embedding, Measured, MediaKind, Piece
from afterglow.media.contents import Content, Picture
from afterglow.testing.memory import picture_number

POSITIONS = 2  # steps that every picture takes


class FakeProjector:
    """Pictures fill as many cells as they are wide, and take two positions.

    >>> FakeProjector().measure(Picture(width=5, height=1, pixels=bytes(15)))
    (Piece(cells=5, positions=2, whole=False),)
    """

    kinds: frozenset[MediaKind] = frozenset({"image", "audio"})

    def __init__(self, key: bytes = b"fake projector", *, whole: bool = False) -> None:
        self.key = key
        self.whole = whole
        self.calls: list[int] = []  # how many contents were encoded together, call by call
        self.faults: list[Exception | None] = []  # raised by the coming calls, one each; None: that one works
        self.open = threading.Event()  # encoding waits for it
        self.open.set()

    def measure(self, content: Content) -> Measured:
        """What stands in a prompt for it."""
        return (Piece(content.width if isinstance(content, Picture) else 3, POSITIONS, self.whole),)

    def entries(self, content: Content) -> tuple[list[Entry], dict[bytes, Part]]:
        """What stands in a request for it, and the request's `contents`."""
        found = entries_of(content, self.measure(content), self.key)
        return [entry for entry, _ in found], {part.digest(self.key): part for _, part in found if part is not None}

    def encode(self, contents: Sequence[Content]) -> list[list[Embedding]]:
        self.open.wait()
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        self.calls.append(len(contents))
        return [[self._embedding(content)] for content in contents]

    def _embedding(self, content: Content) -> Embedding:
        (piece,) = self.measure(content)
        assert isinstance(piece, Piece)
        number = np.array([[picture_number(Part(content).digest(self.key))]], dtype=np.int64).view(np.float32)
        offsets = np.zeros((piece.cells, 4), dtype=np.int32)
        return Embedding(np.repeat(number, piece.cells, axis=0), offsets, piece.whole)
