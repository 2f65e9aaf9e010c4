"""Byte budget of a cache: its limit, and the bytes in use by kind."""

from __future__ import annotations

from typing import Literal, TypeAlias

ByteKind: TypeAlias = Literal[
    "blocks", "checkpoints", "logits", "swapped", "prefetch", "tables", "ngrams", "embeddings"
]


class ByteBudget:
    """Limit and used bytes of one cache. The holders of the bytes add and remove them. For use by one thread.

    >>> budget = ByteBudget(100)
    >>> budget.add("blocks", 60)
    >>> budget.free_bytes, budget.by_kind
    (40, {'blocks': 60})
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used_bytes = 0
        self._by_kind: dict[ByteKind, int] = {}

    @property
    def free_bytes(self) -> int:
        return self.limit - self.used_bytes

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes in use by kind, of the kinds that were ever used."""
        return {str(kind): nbytes for kind, nbytes in self._by_kind.items()}

    def get(self, kind: ByteKind) -> int:
        return self._by_kind.get(kind, 0)

    def add(self, kind: ByteKind, nbytes: int) -> None:
        """Count bytes that are in use now."""
        self._by_kind[kind] = self.get(kind) + nbytes
        self.used_bytes += nbytes

    def remove(self, kind: ByteKind, nbytes: int) -> None:
        """Count bytes that are free again."""
        self.add(kind, -nbytes)
