"""Last logits: the logits after the last entry of a prompt, so that a repeat of the prompt computes nothing."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.kvcache.budget import ByteBudget
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.eviction import compute_log_value, compute_rank
from afterglow.engine.kvcache.radix_tree import RadixTree
from afterglow.engine.types.entries import Entries, common_prefix_length
from afterglow.llama import page_buffers

LOGITS_TABLE_BYTES = 850  # of the logits and their tree node, beside the entries
MAX_LOGITS_FRACTION = 1 / 16  # of the RAM budget


@dataclass(eq=False, slots=True, kw_only=True)
class LastLogits:
    """Logits after exactly these entries, unchanged: a repeat must give the same tokens to the last bit."""

    entries: Entries
    logits: NDArray[np.float32]
    namespace: str = ""  # `PrefixCache.build_namespace`
    parent: bytes = b""  # key of the last full block before it; the keys are empty until it is written to disk
    start: int = 0  # number of entries in the full blocks before it
    key: bytes = b""
    last_used: float = field(default_factory=time.monotonic)

    @property
    def nbytes(self) -> int:
        return page_buffers.get_allocated_bytes(self.logits.nbytes) + self.entries.nbytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables for it. The tree has its own copy of the entries."""
        return LOGITS_TABLE_BYTES + self.entries.nbytes


class LogitsStore:
    """Last logits of prompts in RAM, within a fraction of its budget.

    Logits whose cells were evicted are not used any more, so that they become the least recently used ones.
    """

    def __init__(self, cost_model: CostModel, budget: ByteBudget) -> None:
        self._tree: RadixTree[LastLogits] = RadixTree()
        self._by_key: dict[bytes, LastLogits] = {}  # those with keys
        self._ordered: dict[LastLogits, None] = {}  # the least recently used first
        self.unwritten: Container[tuple[str, bytes]] = ()  # see `RamTier.set_unwritten`
        self._cost_model = cost_model
        self._budget = budget

    def __iter__(self) -> Iterator[LastLogits]:
        return iter(list(self._ordered))

    def __len__(self) -> int:
        return len(self._ordered)

    @property
    def limit(self) -> int:
        """Bytes that all last logits may have."""
        return int(self._budget.limit * MAX_LOGITS_FRACTION)

    def find(self, entries: Entries, namespace: str) -> LastLogits | None:
        """Return the logits after exactly these entries."""
        return next(
            (found for found in self.find_on_path(entries, namespace) if len(found.entries) == len(entries)), None
        )

    def find_on_path(self, entries: Entries, namespace: str) -> list[LastLogits]:
        """Return the logits after any prefix of these entries, the longest prefix first."""
        return list(self._tree.iter_anchors_on_path(self._tree.match(entries, namespace)))

    def get(self, key: bytes) -> LastLogits | None:
        """Return the logits with this key. Thread-safe."""
        return self._by_key.get(key)

    def set_keys(self, last_logits: LastLogits, key: bytes, parent: bytes, start: int) -> None:
        """Set the keys of logits that will be written to disk."""
        last_logits.key, last_logits.parent, last_logits.start = key, parent, start
        self._by_key[key] = last_logits

    def add(self, last_logits: LastLogits) -> None:
        """Add logits for which space was freed."""
        self._ordered[last_logits] = None
        self._budget.add("logits", last_logits.nbytes)
        self._budget.add("tables", last_logits.table_bytes)
        self._tree.insert(last_logits.entries, last_logits, last_logits.namespace)
        if last_logits.key:
            self._by_key[last_logits.key] = last_logits

    def touch(self, last_logits: LastLogits) -> None:
        """Record a use."""
        last_logits.last_used = time.monotonic()
        if last_logits in self._ordered:
            del self._ordered[last_logits]
            self._ordered[last_logits] = None

    def drop(self, last_logits: LastLogits) -> None:
        del self._ordered[last_logits]
        self._by_key.pop(last_logits.key, None)
        self._budget.remove("logits", last_logits.nbytes)
        self._budget.remove("tables", last_logits.table_bytes)
        self._tree.remove(last_logits)

    def forget(self, entries: Entries, start: int, namespace: str) -> set[bytes]:
        """Drop the logits that continue the first `start` entries as these do; return their keys."""
        found = [
            last_logits
            for last_logits in self
            if last_logits.namespace == namespace and common_prefix_length(last_logits.entries, entries) > start
        ]
        for last_logits in found:
            self.drop(last_logits)
        return {last_logits.key for last_logits in found}

    def evict_until_fits(self, nbytes: int) -> bool:
        """Evict the least recently used until `nbytes` more are within the limit; return False if they never are."""
        if nbytes > self.limit:
            return False
        while (victim := self.find_victim()) and self._budget.get("logits") + nbytes > self.limit:
            self.drop(victim)
        return True

    def find_victim(self) -> LastLogits | None:
        """Return the least recently used logits that are not waiting to be written, or else of all."""
        written = (last_logits for last_logits in self._ordered if ("logits", last_logits.key) not in self.unwritten)
        return next(written, None) or next(iter(self._ordered), None)

    def compute_rank(self, last_logits: LastLogits) -> float:
        """Return the position of logits in the order of eviction. They save a decode of one row."""
        log_value = compute_log_value(self._cost_model.seconds_per_row, last_logits.nbytes)
        return compute_rank(log_value, last_logits.last_used)


def copy_logits(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Copy a row of logits to a long-lived buffer."""
    copied: NDArray[np.float32] = page_buffers.copy_to_pages(logits.view(np.uint8)).view(np.float32)
    return copied
