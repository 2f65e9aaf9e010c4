"""What has an end: `with` ends it too."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closeable:
    """A base for everything that is given back by `close()`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
