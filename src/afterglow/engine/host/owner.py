"""The process that owns a host: after a fork, its threads do not exist in the child, and its pipes are shared."""

from __future__ import annotations

import os

from afterglow.errors import WrongProcess


class OwnerProcess:
    """The process in which an object was created.

    >>> OwnerProcess("model").is_current
    True
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this process is the owner, and not a fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `WrongProcess` in a fork of the owner. Call it before any lock: another thread may have held it."""
        if not self.is_current:
            raise WrongProcess(self._name, self._pid, os.getpid())
