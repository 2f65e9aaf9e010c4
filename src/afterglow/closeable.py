"""Base class of objects that release resources with `close()` or at the end of a `with` block."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closeable:
    """Context manager that calls `close()` on exit."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
