"""Tiered store of the prefix cache: moves KV cells between sequences and an ordered list of tiers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from afterglow.engine.kvcache.blocks import BLOCK_TABLE_BYTES, Block, BlockHasher, BlockTree, StoredPrefix
from afterglow.engine.kvcache.budget import ByteBudget
from afterglow.engine.kvcache.checkpoints import Checkpoint, CheckpointStore
from afterglow.engine.kvcache.cost_model import CostModel
from afterglow.engine.kvcache.disk.tier import DiskTier
from afterglow.engine.kvcache.last_logits import LastLogits, copy_logits
from afterglow.engine.kvcache.objects.tier import ObjectTier
from afterglow.engine.kvcache.pins import PinManager, find_expiry
from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.kvcache.sequence import Sequence
from afterglow.engine.kvcache.tier import Tier
from afterglow.engine.types.backend import Backend, BackendCells, BackendState
from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidState
from afterglow.llama import page_buffers
from afterglow.llama.parallel import copy_parallel

logger = logging.getLogger("afterglow.engine.kvcache.store")

# `waiting`: there is no space until slower tiers have written more.
StoreOutcome: TypeAlias = Literal["stored", "waiting", "not stored"]
MAX_SAMPLE_BYTES = 64 * 1024**2  # that are read to measure the speed of the disk


class TieredStore:
    """Stores the cells of sequences as blocks, each prefix once, and builds states from them again.

    New data enters the RAM tier. All tiers are asked in order, the fastest first.
    """

    def __init__(
        self, backend: Backend, interner: EntryInterner, cost_model: CostModel, settings: EngineSettings, *, grid: int
    ) -> None:
        # This text is an input of the keys of stored files: changing it invalidates them.
        model = blake3(backend.state_key + f" grid {grid} block {settings.block_size}".encode()).digest()
        self.hasher = BlockHasher(model, interner, settings.block_size)
        budget = ByteBudget(settings.ram_cache_limit)
        self.tree = BlockTree(self.hasher, interner, budget)
        self._backend = backend
        self._interner = interner
        self._cost_model = cost_model
        self.checkpoints = CheckpointStore(settings.checkpoints, cost_model, budget)
        cells_suffice = not backend.capabilities.has_partial_state
        self.ram = RamTier(self.tree, self.checkpoints, cost_model, cells_suffice=cells_suffice)
        self.disk_tier = self._open_disk_tier(settings)
        self._has_sampled_disk = False
        self.object_tier = self._open_object_tier(settings)
        slower = (self.disk_tier, self.object_tier)
        self.tiers: list[Tier] = [self.ram, *(tier for tier in slower if tier is not None)]
        self._tiers_by_name = {tier.name: tier for tier in self.tiers}
        self.pin_manager = PinManager(self.tree, self.ram, self.tiers, cost_model)

    def _open_disk_tier(self, settings: EngineSettings) -> DiskTier | None:
        """Return the disk tier; None if it is disabled or the directory cannot be used."""
        if settings.disk_cache_directory is None or not settings.disk_cache_bytes:
            return None
        try:
            return DiskTier(settings, self._backend, self._interner, self._cost_model, self.tree, self.ram)
        except OSError as error:
            logger.warning("disk cache disabled: %s cannot be used: %s", settings.disk_cache_directory, error)
            return None

    def _open_object_tier(self, settings: EngineSettings) -> ObjectTier | None:
        """Return the tier of the shared store; None if there is none or it cannot be opened."""
        if settings.shared_cache is None:
            return None
        try:
            return ObjectTier(settings, self._backend, self._interner, self._cost_model, self.tree, self.ram)
        except OSError as error:
            logger.warning("shared store disabled: %s cannot be opened: %s", settings.shared_cache, error)
            return None

    # --- lookup

    def search_shared_store(self, entries: Entries, namespace: str, known_length: int, *, is_blocking: bool) -> bool:
        """Search the shared store for more of a prompt than is known; return whether the search is still running."""
        if self.object_tier is None:
            return False
        self.refresh()
        known_length = max(known_length, self.tree.find_stored_prefix(entries, namespace).length)
        return self.object_tier.search(entries, namespace, known_length, is_blocking=is_blocking)

    def cut_to_fast_tiers(self, stored_prefix: StoredPrefix) -> StoredPrefix:
        """Return the part of a prefix before the first block that only the shared store has."""
        count = next(
            (i for i, block in enumerate(stored_prefix.blocks) if self._find_tier(block) is self.object_tier),
            len(stored_prefix.blocks),
        )
        return stored_prefix.cut(count)

    def find_stored_prefix(self, entries: Entries, namespace: str) -> StoredPrefix:
        """Return the longest prefix of a prompt that is stored."""
        self.refresh()
        return self.tree.find_stored_prefix(entries, namespace)

    def sample_disk_reads(self, prefix: StoredPrefix) -> bool:
        """Time the read of the first blocks of a prefix if only an estimate of the disk's speed opposes loading it.

        Otherwise an estimate that is too low would never be replaced. Returns whether blocks were read: a damaged one
        has left the tree.
        """
        if self.disk_tier is None or self._cost_model.is_disk_measured or self._has_sampled_disk:
            return False
        blocks = [block for block in prefix.blocks if self._find_tier(block) is self.disk_tier]
        computing_seconds = prefix.length * self._cost_model.seconds_per_entry
        if not blocks or self.estimate_load_seconds(prefix, prefix.length) <= computing_seconds:
            return False
        self._has_sampled_disk = True
        end = find_portion_end([block.nbytes for block in blocks], 0, MAX_SAMPLE_BYTES)
        with contextlib.suppress(InvalidState):
            self._load_rows(blocks[:end])
        return True

    def refresh(self) -> None:
        """Notice what other threads and processes have added to the tiers or removed."""
        for tier in self.tiers:
            tier.sync()

    def find_checkpoints(self, entries: Entries, namespace: str) -> list[Checkpoint]:
        """Return the checkpoints on the path of a prompt, each from the fastest tier that has it, deepest first."""
        self.refresh()
        by_position: dict[int, Checkpoint] = {}
        for tier in self.tiers:
            for checkpoint in tier.find_checkpoints(entries, namespace):
                by_position.setdefault(checkpoint.position, checkpoint)
        return sorted(by_position.values(), key=lambda checkpoint: -checkpoint.position)

    def find_nearest(self, entries: Entries, namespace: str, limit: int) -> Entries:
        """Return the stored prefix nearest to a prompt: what they share, then about `limit` entries of latest use."""
        prefix = self.find_stored_prefix(entries, namespace)
        key = prefix.blocks[-1].key if prefix.blocks else self.hasher.get_root_key(namespace)
        parts, length = [entries[: prefix.length]], 0
        if prefix.next_entry is not None:
            parts.append(prefix.blocks[-1].entries[prefix.length - prefix.blocks[-1].start :])
            length += len(parts[-1])
        while length < limit and (children := self.tree.get_children(key)):
            latest = max(children, key=lambda block: block.last_used)
            parts.append(latest.entries)
            length += len(latest.entries)
            key = latest.key
        return np.concatenate(parts)

    def find_slowest_tier(self, blocks: SequenceOf[Block], checkpoint: Checkpoint | None) -> str:
        """Return the name of the slowest tier that blocks and a checkpoint are loaded from."""
        tiers = {self._find_tier(block) for block in blocks}
        tiers.add(self.ram if checkpoint is None else self._tiers_by_name[checkpoint.tier])
        return max(tiers, key=self.tiers.index).name

    def _find_tier(self, block: Block) -> Tier:
        """Return the fastest tier that holds a block."""
        for tier in self.tiers:
            if tier.holds(block):
                return tier
        raise InvalidState("a block is missing")

    def build_checkpoint(self, entries: Entries, namespace: str, state: BackendState) -> Checkpoint:
        """Return a checkpoint after these entries, with its keys."""
        parent = self.hasher.hash_prefixes(entries, namespace)[-1]
        start = len(entries) - len(entries) % self.hasher.block_size
        key = self.hasher.hash_checkpoint(parent, entries[start:])
        return Checkpoint(entries=entries, state=state, namespace=namespace, parent=parent, start=start, key=key)

    def has_cells_for(self, checkpoint: Checkpoint) -> bool:
        """Return whether all cells before a checkpoint are stored."""
        return self.tree.has_path(checkpoint.parent, checkpoint.entries[checkpoint.start :])

    def estimate_load_seconds(self, stored_prefix: StoredPrefix, reuse_length: int) -> float:
        """Return the expected seconds to load the first entries of a stored prefix into the KV cache."""
        moved = reuse_length * (self.ram.bytes_per_entry or self._cost_model.bytes_per_entry)
        tiers = [(self._find_tier(block), block) for block in stored_prefix.blocks if block.start < reuse_length]
        read = sum(block.nbytes * tier.seconds_per_byte for tier, block in tiers)
        latency = max((tier.latency_seconds for tier, _ in tiers), default=0.0)
        return moved * self._cost_model.seconds_per_byte + read + latency

    def estimate_checkpoint_seconds(self, checkpoint: Checkpoint) -> float:
        """Return the expected seconds to load a checkpoint."""
        tier = self._tiers_by_name[checkpoint.tier]
        return checkpoint.nbytes * (self._cost_model.seconds_per_byte + tier.seconds_per_byte) + tier.latency_seconds

    # --- storing

    def store_sequence(
        self, sequence: Sequence, partial: BackendState | None, wait_seconds: float = 0.0
    ) -> StoreOutcome:
        """Store the cells of a sequence.

        A sequence that is larger than the RAM tier reaches the slower tiers in portions, within `wait_seconds`. If that
        is too short, its first blocks are stored, and the outcome is `waiting`.
        """
        entries, length = sequence.entries.copy(), len(sequence)
        stored_prefix = self.find_stored_prefix(entries, sequence.namespace)
        self.ram.touch(stored_prefix.blocks)
        if stored_prefix.length == length:
            return "stored"
        full_blocks_length = stored_prefix.length - stored_prefix.length % self.hasher.block_size
        bytes_per_entry = self.ram.bytes_per_entry or self._backend.get_state_size(sequence.seq_id, "full") / length
        needed = (length - full_blocks_length) * bytes_per_entry
        protected = self._find_unwritten_and_last(stored_prefix.blocks)
        if not self.ram.evict_until_free(int(min(needed, self._portion_bytes)), protected):
            return self._reject_store()
        started = time.perf_counter()
        state = self._backend.save(sequence.seq_id, "full")
        cells = self._backend.extract_cells(state, partial)
        self._cost_model.record_transfer(state.nbytes, time.perf_counter() - started, len(sequence))
        if cells is None or len(cells) != self._interner.count_cells(sequence.entries):
            return "not stored"
        return self._store_blocks(cells, entries, sequence, stored_prefix, time.monotonic() + wait_seconds)

    @property
    def _portion_bytes(self) -> float:
        """Bytes of the blocks that are added before the slower tiers, if there are any, have written them."""
        available = self.ram.budget.limit - self.ram.pinned_bytes
        return math.inf if len(self.tiers) == 1 or available <= 0 else available / 2

    def _store_blocks(
        self, cells: BackendCells, entries: Entries, sequence: Sequence, stored_prefix: StoredPrefix, deadline: float
    ) -> StoreOutcome:
        """Add blocks for the entries after the full blocks that are already stored."""
        block_size = self.hasher.block_size
        path = [
            block
            for block in stored_prefix.blocks
            if len(block.entries) == block_size and block.end <= stored_prefix.length
        ]
        start = len(path) * block_size
        starts = range(start, len(entries), block_size)
        chunks = [entries[chunk_start : chunk_start + block_size] for chunk_start in starts]
        cell_counts = [self._interner.count_cells(chunk) for chunk in chunks]
        sizes = [
            page_buffers.get_allocated_bytes(count * cells.cell_bytes) + chunk.nbytes + BLOCK_TABLE_BYTES
            for chunk, count in zip(chunks, cell_counts, strict=True)
        ]
        self.ram.bytes_per_entry = sum(sizes) / max(len(entries) - start, 1)
        parent = path[-1].key if path else self.hasher.get_root_key(sequence.namespace)
        pin_spans = self.pin_manager.pins.find_spans(sequence.entries, sequence.namespace)
        protected = self._find_unwritten_and_last(path)
        first_cells = list(itertools.accumulate(cell_counts, initial=self._interner.count_cells(entries[:start])))
        outcome: StoreOutcome = "stored"
        stored_bytes, portion_end = 0, 0
        portion: deque[NDArray[np.uint8]] = deque()  # rows of the next blocks
        for index, (chunk_start, chunk) in enumerate(zip(starts, chunks, strict=True)):
            if index == portion_end:
                if index:
                    self.flush(max(0.0, deadline - time.monotonic()))
                    self.refresh()
                    if self.tree.get(path[-1].key) is not path[-1]:  # evicted: the slower tiers cannot hold it all
                        outcome = "not stored"
                        break
                    protected = self._find_unwritten_and_last(path)
                portion_end = find_portion_end(sizes, index, self._portion_bytes)
                if not self.ram.evict_until_free(sum(sizes[index:portion_end]), protected):
                    outcome = self._reject_store()
                    break
                rows_of_blocks = itertools.pairwise(first_cells[index : portion_end + 1])
                portion.extend(copy_parallel(sum(sizes[index:portion_end]), cells.copy_rows, rows_of_blocks))
            rows = portion.popleft()
            block = Block(
                key=self.hasher.hash_block(parent, chunk),
                parent=parent,
                start=chunk_start,
                entries=self._interner.to_portable_entries(chunk).copy(),
                cells=len(rows),
                nbytes=page_buffers.get_allocated_bytes(rows.nbytes),
                layout=cells.layout,
                rows=rows,
                pinned_until=find_expiry(pin_spans, chunk_start),
            )
            self._add_block(block)
            path.append(block)
            parent = block.key
            stored_bytes += sizes[index]
        if not stored_bytes:
            return outcome
        self.ram.touch(path)
        self.ram.counters.saves += 1
        self.ram.counters.saved_bytes += stored_bytes
        self.ram.events.record("stored", self.ram.name, entries=path[-1].end - start, nbytes=stored_bytes)
        self.pin_manager.enforce_limit()
        return outcome

    def _add_block(self, block: Block) -> None:
        """Add a block to the tree and to all tiers, and delete the shorter blocks that it makes redundant."""
        redundant_blocks = self.tree.add(block)
        for tier in self.tiers:
            tier.put(block)
            for redundant in redundant_blocks:
                tier.delete(redundant)

    def _reject_store(self) -> StoreOutcome:
        """Count that there is no space in RAM. Later there may be, if slower tiers are writing what takes it."""
        self.ram.counters.rejected_saves += 1
        return "waiting" if len(self.tiers) > 1 else "not stored"

    def _find_unwritten_and_last(self, path: SequenceOf[Block]) -> set[bytes]:
        """Return the keys of the blocks that only RAM holds, and of the last one, which gets a child."""
        slower = self.tiers[1:]
        return {block.key for block in path if block is path[-1] or not any(tier.holds(block) for tier in slower)}

    def store_logits(self, entries: Entries, namespace: str, logits: NDArray[np.float32]) -> None:
        """Add the logits after a prompt to RAM, if they fit and are not there."""
        last_logits = self.ram.logits.find(entries, namespace)
        if last_logits is not None:
            self.ram.logits.touch(last_logits)
        elif self.ram.can_add_logits(entries, logits.nbytes):
            self.ram.put(LastLogits(entries=entries.copy(), logits=copy_logits(logits), namespace=namespace))

    def has_logits(self, entries: Entries, namespace: str) -> bool:
        """Return whether the logits after exactly these entries are stored."""
        if self.ram.logits.find(entries, namespace) is not None:
            return True
        return self.disk_tier is not None and self.disk_tier.find_logits(entries, namespace) is not None

    def load_logits(self, entries: Entries, namespace: str) -> NDArray[np.float32] | None:
        """Return the logits after exactly these entries; None if they are not stored, or damaged."""
        last_logits = self.ram.logits.find(entries, namespace)
        if last_logits is not None:
            self.ram.logits.touch(last_logits)
            return last_logits.logits
        disk = self.disk_tier
        if disk is None or (key := disk.find_logits(entries, namespace)) is None:
            return None
        logits = disk.load_logits(key, entries)
        if logits is not None:
            self.store_logits(entries, namespace, logits)
        return logits

    def _set_logits_keys(self, last_logits: LastLogits) -> None:
        """Compute the keys of logits unless they have them. Only logits that are written need keys."""
        if not last_logits.key:
            entries, hasher = last_logits.entries, self.hasher
            parent = hasher.hash_prefixes(entries, last_logits.namespace)[-1]
            start = len(entries) - len(entries) % hasher.block_size
            self.ram.logits.set_keys(last_logits, hasher.hash_logits(parent, entries[start:]), parent, start)

    def write_back_logits(self, data: Iterable[LastLogits]) -> None:
        """Copy last logits in RAM to the tiers that do not hold them."""
        if len(self.tiers) > 1:
            for last_logits in data:
                self._set_logits_keys(last_logits)
                for tier in self.tiers[1:]:
                    tier.put(last_logits)

    def write_back(self, data: Iterable[Block | Checkpoint]) -> None:
        """Copy blocks and checkpoints in RAM to the tiers that do not hold them."""
        for item in data:
            for tier in self.tiers[1:]:
                tier.put(item)

    def write_back_prompt(self, entries: Entries, namespace: str) -> None:
        """Copy what is stored of a prompt to the tiers that do not hold it, e.g. after its files were removed."""
        self.write_back(self.find_stored_prefix(entries, namespace).blocks)
        self.write_back(self.checkpoints.find_on_path(entries, namespace))
        self.write_back_logits(self.ram.logits.find_on_path(entries, namespace))

    def write_back_all(self) -> None:
        """Copy everything in RAM to the tiers that do not hold it."""
        self.write_back(self.ram)
        self.write_back(self.checkpoints.all_checkpoints)
        self.write_back_logits(self.ram.logits)

    # --- loading

    def protect(self, stored_prefix: StoredPrefix) -> None:
        """Do not evict the blocks of this prefix until `unprotect`."""
        self.ram.touch(stored_prefix.blocks)
        self.ram.protected = {block.key for block in stored_prefix.blocks}

    def unprotect(self) -> None:
        self.ram.protected = frozenset()

    def prefetch(self, stored_prefix: StoredPrefix, reuse_length: int, checkpoint: Checkpoint | None) -> bool:
        """Start reading what a plan needs into RAM, on other threads; return whether it is not complete yet."""
        blocks = [block for block in stored_prefix.blocks if block.start < reuse_length]
        protected = {block.key for block in blocks}
        return any([tier.prefetch(blocks, checkpoint, protected) for tier in self.tiers])

    def load(
        self, sequence: Sequence, entries: Entries, stored_prefix: StoredPrefix, checkpoint: Checkpoint | None
    ) -> None:
        """Load `entries` from a stored prefix at least as long; `InvalidState`: blocks are missing or damaged."""
        started = time.perf_counter()
        tiers: set[Tier] = {self.ram}
        used = [block for block in stored_prefix.blocks if block.start < len(entries)]
        if self.object_tier is not None:  # many small reads: at the same time
            self.object_tier.prefetch(used, checkpoint, {block.key for block in stored_prefix.blocks})
        partial = None if checkpoint is None else self.load_checkpoint_state(checkpoint)
        row_arrays, length = [], 0
        for block, (tier, rows) in zip(used, self._load_rows(used), strict=True):
            tiers.add(tier)
            count = min(len(block.entries), len(entries) - length)
            row_arrays.append(rows[: self._interner.count_cells(entries[length : length + count])])
            length += count
        if length != len(entries) or len({block.layout for block in used}) != 1:
            raise InvalidState(f"only {length} of {len(entries)} entries are stored")
        position, read_at = self._interner.count_positions(entries), time.perf_counter()
        state = self._backend.assemble_state(used[0].layout, row_arrays, partial, position)
        sequence.load(entries, state)
        # All bytes of the state, with the checkpoint's, and without the time in which they were read from disk.
        self._cost_model.record_transfer(state.nbytes, time.perf_counter() - read_at, 0)
        nbytes = sum(rows.nbytes for rows in row_arrays)
        self.count_hit(len(entries), nbytes, time.perf_counter() - started, checkpoint, used, tiers)

    def _load_rows(self, blocks: SequenceOf[Block]) -> list[tuple[Tier, NDArray[np.uint8]]]:
        """Return the cells of blocks, each with its tier, and copy them to RAM; `InvalidState`: some are missing."""
        tiers = [self._find_tier(block) for block in blocks]
        by_key: dict[bytes, NDArray[np.uint8] | None] = {}
        for tier in self.tiers:
            held = [block for block, block_tier in zip(blocks, tiers, strict=True) if block_tier is tier]
            by_key.update(zip([block.key for block in held], tier.load_rows(held), strict=True))
        loaded: list[tuple[Tier, NDArray[np.uint8]]] = []
        for block, tier in zip(blocks, tiers, strict=True):
            rows = by_key[block.key]
            if rows is None:
                self.tree.remove(block)
                raise InvalidState("a block is missing or damaged")
            if tier is not self.ram:
                self.ram.promote(block, rows)
            loaded.append((tier, rows))
        return loaded

    def load_checkpoint_state(self, checkpoint: Checkpoint) -> BackendState:
        """Return the partial state of a checkpoint. One that is read from a slower tier is also added to RAM."""
        checkpoint.last_used = time.monotonic()
        state = self._tiers_by_name[checkpoint.tier].load_state(checkpoint)
        if checkpoint.tier != self.ram.name and not self.checkpoints.has_checkpoint_at(
            checkpoint.entries, checkpoint.namespace
        ):
            self.add_checkpoint(replace(checkpoint, entries=checkpoint.entries.copy(), state=state, tier=self.ram.name))
        return state

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint to RAM if it fits."""
        if self.ram.can_add_checkpoint(checkpoint.entries, checkpoint.state.nbytes):
            self.ram.put(checkpoint)
            self.ram.events.record("stored", "checkpoint", entries=checkpoint.position, nbytes=checkpoint.nbytes)
            self.pin_manager.on_checkpoint_added()

    def count_hit(
        self,
        entries: int,
        nbytes: int,
        seconds: float,
        checkpoint: Checkpoint | None = None,
        blocks: SequenceOf[Block] = (),
        tiers: Iterable[Tier] = (),
    ) -> None:
        """Count a prefix hit of `entries` entries that were loaded in `seconds`, for the slowest of the tiers."""
        used = {*tiers, self.ram if checkpoint is None else self._tiers_by_name[checkpoint.tier]}
        slowest = max(used, key=self.tiers.index)
        slowest.counters.record_hit(entries, nbytes, entries * self._cost_model.seconds_per_entry - seconds)
        self.ram.events.record("loaded", slowest.name, entries=entries, nbytes=nbytes, seconds=seconds)
        for block in blocks:
            block.hits += 1
        for tier in self.tiers:
            tier.touch(blocks, checkpoint)

    def count_miss(self) -> None:
        """Count a prefix miss: nothing was found on the device and in any tier."""
        for tier in self.tiers:
            tier.counters.misses += 1

    # --- administration

    def is_pinned(self, entries: Entries, namespace: str, index: int) -> bool:
        """Return whether the entry at this index is part of a pinned prefix."""
        return find_expiry(self.pin_manager.pins.find_spans(entries, namespace), index) > 0.0

    def forget(self, entries: Entries, start: int, namespace: str) -> tuple[int, int]:
        """Delete the blocks and checkpoints that continue the first `start` entries as these do; return their number.

        A block that begins before them and ends after them is deleted, too: nothing else shares it.
        """
        self.refresh()
        index, offset = divmod(start, self.hasher.block_size)
        prefix_keys = self.hasher.hash_prefixes(entries, namespace)
        parent = prefix_keys[index]
        portable = self._interner.to_portable_entries(entries[start - offset :])
        pending = [
            child for child in self.tree.get_children(parent) if common_prefix_length(child.entries, portable) > offset
        ]
        blocks: list[Block] = []
        while pending:
            blocks.append(block := pending.pop())
            pending += self.tree.get_children(block.key)
        checkpoints = [
            checkpoint
            for checkpoint in self.checkpoints.all_checkpoints
            if checkpoint.namespace == namespace and common_prefix_length(checkpoint.entries, entries) > start
        ]
        found = [checkpoint for checkpoint in self.find_checkpoints(entries, namespace) if checkpoint.position > start]
        keys = {checkpoint.key for checkpoint in (*checkpoints, *found)}
        for checkpoint in checkpoints:
            self.checkpoints.drop(checkpoint)
        logits_keys = self.ram.logits.forget(entries, start, namespace)
        block_keys = {block.key for block in blocks}
        for tier in (self.disk_tier, self.object_tier):
            if tier is not None:
                keys |= tier.delete_checkpoints(keys, block_keys)
        if self.disk_tier is not None:
            parents = block_keys.union(prefix_keys[index + 1 :])
            self.disk_tier.delete_logits(logits_keys, parents, parent, portable, offset)
        for block in reversed(blocks):
            for holder in self.tiers:
                holder.delete(block)
            self.tree.remove(block)
        return len(blocks), len(keys)

    def clear(self) -> None:
        """Remove every block from all tiers, including pinned ones."""
        self.refresh()
        for tier in self.tiers:
            tier.clear()
        for block in self.tree:
            self.tree.remove(block)

    def set_busy(self, is_busy: bool) -> None:
        """Note whether requests run: the disk tier writes when none do."""
        if self.disk_tier is not None:
            self.disk_tier.writer.set_busy(is_busy)

    def flush(self, timeout: float) -> bool:
        """Wait until all tiers have written what is queued, for at most `timeout` seconds each; return if they have."""
        return all([tier.flush(timeout) for tier in self.tiers])

    def close(self, timeout: float = 0.0) -> None:
        """Close the tiers, after at most `timeout` seconds for queued writes."""
        for tier in self.tiers:
            tier.close(timeout)


def find_portion_end(sizes: SequenceOf[int], start: int, limit: float) -> int:
    """Return the end of the longest run of sizes from `start` on whose sum is within `limit`, with at least one.

    >>> find_portion_end([5, 5, 5], 0, 12), find_portion_end([50, 5], 0, 12)
    (2, 1)
    """
    end, total = start + 1, sizes[start]
    while end < len(sizes) and total + sizes[end] <= limit:
        total += sizes[end]
        end += 1
    return end
