"""The checkpoints in RAM: where they lie in the tree of all prompts, how many there are, which one goes next."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from afterglow.engine.kvcache.checkpoints import Checkpoint, choose_positions_to_drop
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.radix_tree import RadixTree
from afterglow.engine.kvcache.ram import Victim, compute_value
from afterglow.engine.types.entries import Entries
from afterglow.engine.types.settings import CheckpointSettings


class CheckpointStore:
    """Owns the checkpoints. `make_room` frees bytes in RAM, or says that it cannot."""

    def __init__(
        self, settings: CheckpointSettings, cost_model: CostModel, evict_until_free: Callable[[int], bool]
    ) -> None:
        self.all_checkpoints: list[Checkpoint] = []
        self.tree: RadixTree[Checkpoint] = RadixTree()
        self._settings = settings
        self._cost_model = cost_model
        self._evict_until_free = evict_until_free

    @property
    def nbytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self.all_checkpoints)

    def find_on_path(self, entries: Entries, salt: str) -> Iterator[Checkpoint]:
        """The checkpoints that these entries run through, deepest first."""
        return self.tree.iter_anchors_on_path(self.tree.match(entries, salt))

    def has_checkpoint_at(self, entries: Entries, salt: str) -> bool:
        """Whether there is a checkpoint after exactly these entries."""
        return any(known.position == len(entries) for known in self.find_on_path(entries, salt))

    def find(self, key: bytes) -> Checkpoint | None:
        """A checkpoint by its name, from any thread."""
        return next((one for one in self.all_checkpoints[:] if one.key == key), None)

    def evict_until_fits(self, nbytes: int) -> bool:
        """Make room for a checkpoint; False: there is none."""
        if nbytes > self._settings.max_bytes or not self._settings.max_checkpoints:
            return False
        while self.nbytes + nbytes > self._settings.max_bytes:
            oldest = min(self._list_unpinned(), key=lambda one: one.last_used, default=None)
            if oldest is None:
                return False
            self.drop(oldest)
        return self._evict_until_free(nbytes)

    def _list_unpinned(self) -> list[Checkpoint]:
        return [one for one in self.all_checkpoints if not one.pinned]

    @property
    def pinned_bytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self.all_checkpoints if checkpoint.pinned)

    def add(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint that fits, and let go of what is too much along its paths."""
        self.all_checkpoints.append(checkpoint)
        self.tree.insert(checkpoint.entries, checkpoint, checkpoint.salt)
        for end in self.tree.find_descendants(checkpoint):
            if end not in self.tree:
                continue  # gone with another path
            path = list(self.tree.iter_ancestors(end))
            by_depth = {one.position: one for one in path if not one.pinned}
            for depth in choose_positions_to_drop(
                sorted(by_depth), self._settings.max_checkpoints - len(path) + len(by_depth)
            ):
                self.drop(by_depth[depth])

    def drop(self, checkpoint: Checkpoint) -> None:
        self.all_checkpoints.remove(checkpoint)
        self.tree.remove(checkpoint)

    def estimate_seconds_saved(self, checkpoint: Checkpoint) -> float:
        """What a checkpoint saves: the way from the one before it."""
        before = itertools.islice(self.tree.iter_ancestors(checkpoint), 1, 2)
        return (checkpoint.position - next((one.position for one in before), 0)) * self._cost_model.seconds_per_entry

    def find_victim(self) -> Victim | None:
        """The checkpoint that is worth least."""
        now, best = time.monotonic(), None
        for checkpoint in self._list_unpinned():
            value = compute_value(
                self.estimate_seconds_saved(checkpoint), checkpoint.nbytes, now - checkpoint.last_used
            )
            if best is None or value < best[0]:
                best = value, checkpoint
        if best is None:
            return None
        chosen = best[1]
        return Victim(best[0], lambda: self.drop(chosen))
