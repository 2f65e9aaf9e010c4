"""The checkpoints in RAM: where they lie in the tree of all prompts, how many there are, which one goes next."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from afterglow.engine.checkpoint import Checkpoint, CheckpointSettings, thinned
from afterglow.engine.costs import Costs
from afterglow.engine.entries import Ids
from afterglow.engine.prefix import PrefixTree
from afterglow.engine.ram import Victim, worth


class Marks:
    """Owns the checkpoints. `make_room` frees bytes in RAM, or says that it cannot."""

    def __init__(self, settings: CheckpointSettings, costs: Costs, make_room: Callable[[int], bool]) -> None:
        self.checkpoints: list[Checkpoint] = []
        self.tree: PrefixTree[Checkpoint] = PrefixTree()
        self._settings = settings
        self._costs = costs
        self._make_room = make_room

    @property
    def nbytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints)

    def along(self, ids: Ids, salt: str) -> Iterator[Checkpoint]:
        """The checkpoints that these entries run through, deepest first."""
        return self.tree.along(self.tree.match(ids, salt))

    def taken(self, ids: Ids, salt: str) -> bool:
        """Whether there is a checkpoint after exactly these entries."""
        return any(known.depth == len(ids) for known in self.along(ids, salt))

    def find(self, key: bytes) -> Checkpoint | None:
        """A checkpoint by its name, from any thread."""
        return next((one for one in self.checkpoints[:] if one.key == key), None)

    def fits(self, nbytes: int) -> bool:
        """Make room for a checkpoint; False: there is none."""
        if nbytes > self._settings.max_bytes or not self._settings.max_checkpoints:
            return False
        while self.nbytes + nbytes > self._settings.max_bytes:
            oldest = min(self._loose(), key=lambda one: one.last_used, default=None)
            if oldest is None:
                return False
            self.drop(oldest)
        return self._make_room(nbytes)

    def _loose(self) -> list[Checkpoint]:
        return [one for one in self.checkpoints if not one.pinned]

    @property
    def pinned_bytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints if checkpoint.pinned)

    def add(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint that fits, and let go of what is too much along its paths."""
        self.checkpoints.append(checkpoint)
        self.tree.insert(checkpoint.ids, checkpoint, checkpoint.salt)
        for end in self.tree.below(checkpoint):
            if end not in self.tree:
                continue  # gone with another path
            path = list(self.tree.above(end))
            by_depth = {one.depth: one for one in path if not one.pinned}
            for depth in thinned(sorted(by_depth), self._settings.max_checkpoints - len(path) + len(by_depth)):
                self.drop(by_depth[depth])

    def drop(self, checkpoint: Checkpoint) -> None:
        self.checkpoints.remove(checkpoint)
        self.tree.remove(checkpoint)

    def seconds(self, checkpoint: Checkpoint) -> float:
        """What a checkpoint saves: the way from the one before it."""
        before = itertools.islice(self.tree.above(checkpoint), 1, 2)
        return (checkpoint.depth - next((one.depth for one in before), 0)) * self._costs.per_entry

    def victim(self) -> Victim | None:
        """The checkpoint that is worth least."""
        now, best = time.monotonic(), None
        for checkpoint in self._loose():
            value = worth(self.seconds(checkpoint), checkpoint.nbytes, now - checkpoint.last_used)
            if best is None or value < best[0]:
                best = value, checkpoint
        if best is None:
            return None
        chosen = best[1]
        return Victim(best[0], lambda: self.drop(chosen))
