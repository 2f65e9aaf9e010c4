"""Guesses copied from what was said before: where the newest tokens stood already, what followed them then.

Prompts and answers of one conversation share a history, so an answer finds what earlier turns said, also what an
edited prompt no longer contains. A token costs one look into a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import numpy as np

from afterglow.engine.drafting import Wish
from afterglow.engine.entries import Ids, Record, common_prefix
from afterglow.engine.job import Job
from afterglow.engine.speculation import Acceptance

NGRAM = 3  # tokens that have to agree: two agree too often, four too late
BITS = 21  # of one token in a key; three fit into 64
MASK = (1 << BITS) - 1
KEPT = 16  # histories of conversations that nobody is answering
MOST = 1 << 17  # entries of a history; a longer one begins again with its newest path
FADING = 0.99  # what a token before the last counts for
DOUBT = 16  # tokens that what is usual counts for


@dataclass(slots=True)
class Kind:
    """Guesses after so many tokens that came as they stood elsewhere. Every token shows whether one would have been
    right, so nothing has to be guessed to find out."""

    least: int
    name: str
    usual: float  # share that is right: of ten answers of SmolLM2 to much the same question
    seen: Acceptance = field(default_factory=lambda: Acceptance(fading=FADING, weight=DOUBT))

    @property
    def rate(self) -> float:
        return self.seen.rate(self.usual)


class History:
    """Everything that was said in a conversation, in the order in which it came, and where each three tokens stood.

    >>> history = History()
    >>> history.follow(np.array([7, 1, 2, 3, 4, 5, 1, 2, 3]))
    >>> history.guess(2)
    [4, 5]
    """

    def __init__(self) -> None:
        self._log: list[int] = []
        self._path = Record()  # the prompt and the answer that it stands at the end of, but for what is only logged
        self._noted = 0  # entries of the log that are in the path, or are not of it
        self._places: dict[int, int] = {}  # three tokens, as one number → where what follows them stands in the log
        self._source: int | None = None  # where in the log the next guess stands
        self.followed = 0  # tokens that came as they stood there
        self.said = 0  # tokens since the prompt

    def shared(self, prompt: Ids) -> int:
        """How many entries the prompt has in common with what was last said here."""
        self._path.extend(np.array(self._log[self._noted :], dtype=np.int64))
        self._noted = len(self._log)
        return common_prefix(self._path.ids, prompt)

    def follow(self, prompt: Ids) -> None:
        """Go on with a prompt: what it has in common with the last stays, the rest is added."""
        keep = self.shared(prompt)
        if keep < len(self._path):  # it leaves the path: a few tokens again, so that it is known where
            self._path.truncate(max(0, keep - NGRAM))
        keep = len(self._path)
        if len(self._log) + len(prompt) - keep > MOST:
            self._log, self._places, keep = [], {}, 0
            self._path.truncate(0)
        self._path.extend(prompt[keep:])
        start = len(self._log)
        self._log += prompt[keep:].tolist()
        self._noted = len(self._log)
        self.said = 0
        self._index(max(start - NGRAM + 1, 0))

    def _index(self, start: int) -> None:
        """Note where the tokens from `start` on stand, all but the last three: those are to be found elsewhere."""
        log = np.array(self._log[start:], dtype=np.int64) & MASK
        self._source, self.followed = None, 0
        if len(log) < NGRAM:
            return
        keys = (log[:-2] << 2 * BITS | log[1:-1] << BITS | log[2:]).tolist()
        self._places.update(zip(keys[:-1], range(start + NGRAM, len(self._log)), strict=True))
        self._source = self._places.get(keys[-1])
        self._places[keys[-1]] = len(self._log)

    def add(self, token: int) -> bool | None:
        """A token was said; whether it was the one that stood there, None where nothing did."""
        log, source, length = self._log, self._source, len(self._log)
        log.append(token)
        self.said += 1
        if length < NGRAM - 1:
            return None
        key = (log[-3] & MASK) << 2 * BITS | (log[-2] & MASK) << BITS | token
        earlier = self._places.get(key)
        self._places[key] = length + 1
        if source is not None and source < length and log[source] == token:
            # A text that is being copied is followed where it is, also where its words stand elsewhere, too.
            self._source, self.followed = source + 1, self.followed + 1
            return True
        self._source, self.followed = earlier, 0
        return None if source is None or source >= length else False

    @property
    def hopeful(self) -> bool:
        """Whether the newest tokens stood somewhere before."""
        return self._source is not None and self._source < len(self._log)

    def guess(self, limit: int) -> list[int]:
        """What followed the newest tokens before; where that was so recent that it ends here, again and again."""
        if not self.hopeful:
            return []
        assert self._source is not None
        guesses = list(islice(cycle(self._log[self._source : self._source + limit]), limit))
        return guesses if min(guesses) >= 0 else guesses[: next(i for i, one in enumerate(guesses) if one < 0)]


class Lookup:
    """The drafter that needs nothing but what was said."""

    name = "lookup"

    def __init__(self) -> None:
        self._idle: list[tuple[str, History]] = []  # the longest idle first, and whose they are
        self._used: dict[Job, History] = {}
        self._kinds = (
            Kind(16, "lookup, copying", 0.98),
            Kind(4, "lookup, following", 0.9),
            Kind(1, "lookup, again", 0.83),
            Kind(0, "lookup", 0.58),
        )

    def ready(self, job: Job) -> bool:
        return self._history(job).hopeful

    def kind(self, job: Job) -> str:
        return self._kind(self._used[job].followed).name

    def estimate(self, job: Job) -> float:
        return self._kind(self._used[job].followed).rate

    def behind(self, job: Job) -> float:
        return 0.0

    def catch_up(self, jobs: Sequence[Job]) -> None:
        """Nothing to compute."""

    def draft(self, wishes: Sequence[Wish]) -> list[list[int]]:
        return [self._history(job).guess(limit) for job, limit in wishes]

    def forget(self, job: Job) -> None:
        """The job has ended; the next turn goes on with its history."""
        if job in self._used:
            self._history(job)
            self._idle.append((salt(job), self._used.pop(job)))
            del self._idle[:-KEPT]

    def tidy(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to give back."""

    def _history(self, job: Job) -> History:
        """The job's history with everything in it that is known."""
        history = self._used.get(job)
        if history is None:
            history = self._used[job] = self._begin(job)
        for token in job.generated[history.said :]:
            followed = history.followed
            right = history.add(token)
            if right is not None:
                self._kind(followed).seen.verified(1, right)
        return history

    def _kind(self, followed: int) -> Kind:
        for kind in self._kinds:  # the last has no least; `next` would take twice as long, for every token
            if followed >= kind.least:
                break
        return kind

    def _begin(self, job: Job) -> History:
        """Go on with the conversation that the prompt continues, or begin a new one."""
        own = [place for place, (owner, _) in enumerate(self._idle) if owner == salt(job)]
        best = max(own, key=lambda place: self._idle[place][1].shared(job.prompt), default=None)
        history = History()
        if best is not None and self._idle[best][1].shared(job.prompt) >= NGRAM:
            history = self._idle.pop(best)[1]
        history.follow(job.prompt)
        return history


def salt(job: Job) -> str:
    """Whose prompt it is: nobody's guesses come from what somebody else said."""
    return job.request.salt
