"""An agent that kills itself at a given point: `python killed_agent.py URL STORE LEDGER SALT POINT`.

The points are before and after every transaction of the store, and inside every call before and after its effect.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from afterglow.agents import Agent, Permissions, RunStore, effect
from afterglow.agents.events import Question
from afterglow.agents.permissions import Decision

WORDS = ("one", "two", "three")


def build_agent(
    url: str,
    store: Path,
    ledger: Path,
    salt: str,
    *,
    pass_point: Callable[[], None],
    ask: Callable[[Question], Decision],
) -> Agent:
    """Build the agent whose tool writes a line to the ledger."""

    class PointedStore(RunStore):
        """A store with a point before and after every transaction."""

        def append(self, run: str, rows: Any, *, after: int | None = None) -> int:
            pass_point()
            newest = super().append(run, rows, after=after)
            pass_point()
            return newest

    @effect("write")
    def save(text: str) -> str:
        """Save a text."""
        pass_point()
        with ledger.open("a") as file:
            file.write(f"{text}\n")
        pass_point()
        return "saved"

    permissions = Permissions(write="allow")
    options: Any = {"temperature": 0, "salt": salt}
    return Agent.connect(
        url,
        "x" * 1500,
        model="tiny",
        tools=[save],
        permissions=permissions,
        ask=ask,
        store=PointedStore(store),
        **options,
    )


def main(url: str, store: str, ledger: str, salt: str, point: int) -> None:
    passed = 0

    def pass_point() -> None:
        nonlocal passed
        passed += 1
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    agent = build_agent(url, Path(store), Path(ledger), salt, pass_point=pass_point, ask=lambda question: "deny")
    agent.start("Save three words.").wait()
    print(passed, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
