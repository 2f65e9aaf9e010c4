"""Object-store tier: blocks and checkpoints that engines on several machines share, found by their names alone.

Names chain, so that no index is needed: the longest stored prefix of a prompt is found by doubling and bisecting. A
store that is slow, fails or returns wrong bytes costs time, never a wrong token: searches and reads have time limits,
every byte is checked, entries are compared, and after a failure the store is left alone for a while.

Objects are in a folder per model:

    <key>.cells      a full block
    <parent>.tail    the shorter block at the end of a sequence that was stored last after block <parent>
    <parent>.state   the checkpoint that was stored last after block <parent>; an engine stores the one it used last
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.kvcache.blocks import Block, BlockTree
from afterglow.engine.kvcache.budget import ByteBudget
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.cost_model import CostModel, RunningAverage
from afterglow.engine.kvcache.disk.checkpoint_table import CheckpointTable, StoredCheckpoint
from afterglow.engine.kvcache.disk.contents import FileBuilder, is_file_of
from afterglow.engine.kvcache.disk.files import HEAD_BYTES, CacheFile, FileKind, LoadedFile, decode_file, decode_head
from afterglow.engine.kvcache.disk.prefetch import FileKey, Prefetcher
from afterglow.engine.kvcache.disk.tier import get_kind
from afterglow.engine.kvcache.last_logits import LastLogits
from afterglow.engine.kvcache.objects.client import ObjectClient, check_store_url, read_key
from afterglow.engine.kvcache.objects.search import find_longest_prefix
from afterglow.engine.kvcache.ram import RamTier
from afterglow.engine.types.backend import Backend, BackendState
from afterglow.engine.types.counters import TierCounters
from afterglow.engine.types.entries import Entries, EntryInterner, common_prefix_length
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidState

READ_THREADS = 8
WRITE_THREADS = 4
MAX_QUEUED_WRITES = 4096
MAX_WRITTEN_STATES = 4096  # names of checkpoints for which it is known what was written last
MAX_STATE_PROBES = 64  # blocks after which a checkpoint is looked for, the deepest first
SEARCH_TIMEOUT_SECONDS = 1.0
LOAD_TIMEOUT_SECONDS, MIN_LOAD_TIMEOUT_SECONDS = 10.0, 0.5
SEARCH_RESULT_TTL_SECONDS = 2.0  # a search for the same prompt is not repeated within this time
RETRY_AFTER_SECONDS = 30.0  # pause after failures
MAX_FAILURES = 3  # consecutive ones before the pause
MIN_ROUND_TRIPS = 4  # a search takes about as many; a shorter prefill is not worth one
INITIAL_LATENCY_SECONDS = 0.02
INITIAL_SECONDS_PER_BYTE = 1e-8  # 100 MB/s
CANCELLED = b""  # in place of a key
STORE_LIMIT_BYTES = 2**62  # the store has a limit of its own
ResultT = TypeVar("ResultT")
logger = logging.getLogger("afterglow.engine.kvcache.objects")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPrefix:
    """Result of a search: full blocks, the shorter block after them, and checkpoints."""

    blocks: int = 0
    block_bytes: int = 0  # of one full block
    tail: tuple[bytes, int, int] | None = None  # key, number of entries and bytes
    checkpoints: tuple[StoredCheckpoint, ...] = ()


@dataclass(slots=True)
class Search:
    """Search for a prompt, until its result was used and for a while after."""

    future: Future[FoundPrefix]
    started: float = field(default_factory=time.monotonic)
    is_used: bool = False


@dataclass(slots=True)
class StoreHealth:
    """Consecutive failures of a store, and until when it is left alone. Thread-safe enough: only estimates."""

    failures: int = 0
    paused_until: float = 0.0

    @property
    def is_available(self) -> bool:
        return time.monotonic() >= self.paused_until

    def record(self, error: BaseException | None) -> None:
        """Record a request that failed or succeeded."""
        if error is None:
            self.failures = 0
            return
        self.failures += 1
        if self.failures == MAX_FAILURES:
            logger.warning("the store fails and is not used for %.0f s: %s", RETRY_AFTER_SECONDS, error)
        if self.failures >= MAX_FAILURES:
            self.paused_until = time.monotonic() + RETRY_AFTER_SECONDS


class ObjectTier:
    """Blocks and checkpoints of the engine's model in an object store. What is put here is copied from the RAM tier."""

    name = "shared"

    def __init__(
        self,
        settings: EngineSettings,
        backend: Backend,
        interner: EntryInterner,
        cost_model: CostModel,
        tree: BlockTree,
        ram: RamTier,
    ) -> None:
        assert settings.shared_cache is not None
        key = None if settings.shared_cache_key_file is None else read_key(settings.shared_cache_key_file)
        self.client = ObjectClient(check_store_url(settings.shared_cache), head_bytes=HEAD_BYTES, key=key)
        self.budget = ByteBudget(STORE_LIMIT_BYTES)
        self.counters = TierCounters()
        self.health = StoreHealth()
        self.corrupt_objects = 0
        self._backend = backend
        self._interner = interner
        self._cost_model = cost_model
        self._tree = tree
        self._ram = ram
        self._folder = tree.hasher.model.hex()
        self._builder = FileBuilder(backend, interner, cost_model, tree, ram)
        self._latency = RunningAverage(INITIAL_LATENCY_SECONDS)
        self._seconds_per_byte = RunningAverage(INITIAL_SECONDS_PER_BYTE)
        self._searches: dict[tuple[bytes, int], Search] = {}
        self._names: dict[bytes, str] = {}  # of known tails and checkpoints, by key
        self._checkpoints = CheckpointTable(self.name, self.budget, ram.budget, tree.hasher, interner)
        self._written_states: dict[bytes, bytes] = {}  # keys of the checkpoints under the names, by their parents
        # Keys of the objects that are written or will be, by name; `CANCELLED` for what was deleted meanwhile.
        self._writing: dict[str, bytes] = {}
        self._clears = 0  # deletions of the folder that have not ended
        # What was written since `_note_written`: its kind, key and parent, and its bytes in the store.
        self._written: queue.SimpleQueue[tuple[FileKind, bytes, bytes, int]] = queue.SimpleQueue()
        self._tasks: set[Future[None]] = set()  # of the writers, that have not ended
        self._lock = threading.Lock()  # of the counters and `_writing`
        self._searchers = ThreadPoolExecutor(2, thread_name_prefix="afterglow-search")
        self._probers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="afterglow-probe")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="afterglow-upload")
        self._prefetcher = Prefetcher(self, ram, READ_THREADS)
        tree.holders.append(self)

    @property
    def seconds_per_byte(self) -> float:
        return self._seconds_per_byte.value

    @property
    def latency_seconds(self) -> float:
        """Expected seconds of a request without data."""
        return self._latency.value

    # --- search

    def search(self, entries: Entries, namespace: str, known_length: int, *, is_blocking: bool) -> bool:
        """Search for a longer prefix of a prompt than is known; return whether the search is still running.

        With `is_blocking`, return when it has ended or timed out. What is found is added to the tree.
        """
        missing_seconds = (len(entries) - 1 - known_length) * self._cost_model.seconds_per_entry
        if not self.health.is_available or missing_seconds < MIN_ROUND_TRIPS * self.latency_seconds:
            return False
        keys = self._tree.hasher.hash_prefixes(entries, namespace)
        search_key = (keys[-1], len(entries))
        search = self._searches.get(search_key)
        if search is None:
            self._drop_old_searches()
            known = known_length // self._tree.hasher.block_size
            future = self._searchers.submit(self._find_prefix, entries.copy(), keys, known)
            search = self._searches[search_key] = Search(future)
        if search.is_used:
            return False
        left = search.started + SEARCH_TIMEOUT_SECONDS - time.monotonic()
        if is_blocking and left > 0:
            wait([search.future], left)
        if not search.future.done():
            if left > 0 and not is_blocking:
                return True
            self.health.record(TimeoutError("a search took too long"))
        search.is_used = True
        if search.future.done() and search.future.exception() is None:
            self._add_found(search.future.result(), entries, keys)
        return False

    def _drop_old_searches(self) -> None:
        now = time.monotonic()
        for key, search in list(self._searches.items()):
            if now - search.started > SEARCH_RESULT_TTL_SECONDS and search.future.done():
                del self._searches[key]

    def _find_prefix(self, entries: Entries, keys: Sequence[bytes], known: int) -> FoundPrefix:
        """Find what is stored of a prompt beyond its first `known` blocks. Runs on a thread of the searchers."""
        sizes = [0]

        def has_block(index: int) -> bool:
            size = self._request(functools.partial(self.client.get_size, self._build_name(keys[index + 1], "cells")))
            sizes.append(size or sizes[-1])
            return size is not None

        blocks, tail = known, None
        if self._backend.capabilities.has_attention_cells:
            blocks = find_longest_prefix(has_block, len(keys) - 1, known)
            tail = self._find_tail(entries, keys[blocks], blocks)
        else:
            blocks = len(keys) - 1
        checkpoints: tuple[StoredCheckpoint, ...] = ()
        if self._backend.capabilities.has_partial_state:
            checkpoints = self._find_states(entries, keys[: blocks + 1])
        return FoundPrefix(blocks=blocks, block_bytes=sizes[-1], tail=tail, checkpoints=checkpoints)

    def _find_tail(self, entries: Entries, parent: bytes, blocks: int) -> tuple[bytes, int, int] | None:
        name = self._build_name(parent, "tail")
        start = blocks * self._tree.hasher.block_size
        if start >= len(entries):
            return None
        data = self._request(functools.partial(self.client.read_head, name))
        head = None if data is None else decode_head(data)
        if head is None or not 0 < head.count <= len(entries) - start:
            return None
        if self._tree.hasher.hash_block(parent, entries[start : start + head.count]) != head.key:
            return None
        size = self._request(functools.partial(self.client.get_size, name))
        return None if size is None else (head.key, head.count, size)

    def _find_states(self, entries: Entries, keys: Sequence[bytes]) -> tuple[StoredCheckpoint, ...]:
        """Find the deepest checkpoint on a path, and a second one before it."""
        indices = list(range(len(keys) - 1, -1, -1))[:MAX_STATE_PROBES]
        found = []
        for first in range(0, len(indices), READ_THREADS):
            batch = indices[first : first + READ_THREADS]
            results = self._probers.map(lambda index: self._find_state(entries, keys[index], index), batch)
            found += [checkpoint for checkpoint in results if checkpoint is not None]
            if len(found) > 1:
                break
        return tuple(found)

    def _find_state(self, entries: Entries, parent: bytes, index: int) -> StoredCheckpoint | None:
        name, hasher = self._build_name(parent, "state"), self._tree.hasher
        data = self._request(functools.partial(self.client.read_head, name))
        head = None if data is None else decode_head(data)
        start = index * hasher.block_size
        if head is None or not start <= head.count <= len(entries):
            return None
        rest = entries[start : head.count]
        if hasher.hash_checkpoint(parent, rest) != head.key:
            return None
        size = self._request(functools.partial(self.client.get_size, name))
        if size is None:
            return None
        return StoredCheckpoint(head.key, parent, start, self._interner.to_portable_entries(rest).copy(), size)

    def _request(self, request: Callable[[], ResultT]) -> ResultT:
        """Run a request without data, measure its time, and record whether it failed."""
        started = time.perf_counter()
        try:
            result = request()
        except OSError as error:
            self.health.record(error)
            raise
        self.health.record(None)
        self._latency.add(time.perf_counter() - started)
        return result

    def _add_found(self, found: FoundPrefix, entries: Entries, keys: Sequence[bytes]) -> None:
        """Add the blocks and checkpoints of a search to the tree."""
        block_size = self._tree.hasher.block_size
        if found.block_bytes:
            for index in range(found.blocks):
                chunk = entries[index * block_size : (index + 1) * block_size]
                if not self._add_block(keys[index + 1], keys[index], index * block_size, chunk, found.block_bytes):
                    return
        if found.tail is not None and (found.blocks == 0 or self._tree.get(keys[found.blocks]) is not None):
            key, count, nbytes = found.tail
            self._names[key] = self._build_name(keys[found.blocks], "tail")
            start = found.blocks * block_size
            self._add_block(key, keys[found.blocks], start, entries[start : start + count], nbytes)
        for checkpoint in found.checkpoints:
            self._add_checkpoint(checkpoint)

    def _add_block(self, key: bytes, parent: bytes, start: int, chunk: Entries, nbytes: int) -> bool:
        """Note that the store holds a block; return False if its tables do not fit into RAM."""
        block = self._tree.get(key)
        if block is None:
            block = Block(
                key=key,
                parent=parent,
                start=start,
                entries=self._interner.to_portable_entries(chunk).copy(),
                cells=self._interner.count_cells(chunk),
                nbytes=nbytes,
            )
            if block.table_bytes > self._ram.budget.free_bytes:
                return False
            for redundant in self._tree.add(block):
                for holder in self._tree.holders:
                    holder.forget(redundant)
        self._set_object_bytes(block, nbytes)
        return True

    def _add_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        if self._checkpoints.add(checkpoint):
            self._names[checkpoint.key] = self._build_name(checkpoint.parent, "state")

    def _remove_checkpoint(self, key: bytes, parent: bytes) -> None:
        self._checkpoints.remove(key)
        self._names.pop(key, None)
        self._written_states.pop(parent, None)

    def find_checkpoints(self, entries: Entries, namespace: str) -> list[Checkpoint]:
        """Return the known checkpoints on the path of a prompt. Their state is not loaded."""
        return self._checkpoints.find(entries, namespace)

    # --- blocks of the tree

    def _set_object_bytes(self, block: Block, nbytes: int) -> None:
        self.budget.add("blocks", nbytes - block.object_bytes)
        block.object_bytes = nbytes

    def holds(self, block: Block) -> bool:
        return block.object_bytes > 0

    def forget(self, block: Block) -> None:
        """Notice that a block has left the tree. It stays in the store."""
        self._set_object_bytes(block, 0)
        self._names.pop(block.key, None)

    def delete(self, block: Block) -> None:
        """Delete the object of a block, unless that of a longer one takes its place."""
        if not self._is_replaced(block):
            self._cancel_writes({block.key})
            self._note_written()
            if block.object_bytes:
                self._submit(functools.partial(self.client.delete, self._name_block(block)))
        self.forget(block)

    def _cancel_writes(self, keys: AbstractSet[bytes]) -> None:
        """Let running writes of what has these keys delete it."""
        with self._lock:
            self._writing.update({name: CANCELLED for name, key in self._writing.items() if key in keys})

    def _is_replaced(self, block: Block) -> bool:
        """Return whether a block is the end of a sequence whose longer end has the same name."""
        name = self._name_block(block)
        children = (child for child in self._tree.get_children(block.parent) if child is not block)
        return any(
            self._name_block(child) == name and common_prefix_length(child.entries, block.entries) == len(block.entries)
            for child in children
        )

    def delete_checkpoints(self, keys: AbstractSet[bytes], parents: AbstractSet[bytes]) -> set[bytes]:
        """Delete the known checkpoints with these keys, and those after these blocks; return their keys."""
        self._cancel_writes(keys)
        self._note_written()
        deleted = {checkpoint.key: checkpoint.parent for checkpoint in self._checkpoints.select(keys, parents)}
        written = ((key, parent) for parent, key in self._written_states.items())
        deleted.update((key, parent) for key, parent in written if key in keys or parent in parents)
        for key, parent in deleted.items():
            self._remove_checkpoint(key, parent)
            self._submit(functools.partial(self.client.delete, self._build_name(parent, "state")))
        return set(deleted)

    def sync(self) -> None:
        """Note what was written."""
        self._prefetcher.drop_stale()
        self._note_written()

    def _note_written(self) -> None:
        while not self._written.empty():
            kind, key, parent, nbytes = self._written.get()
            self.counters.saves += 1
            self.counters.saved_bytes += nbytes
            if kind == "state":
                for replaced in self._checkpoints.select(set(), {parent}):
                    self._remove_checkpoint(replaced.key, parent)
                self._written_states.pop(parent, None)
                self._written_states[parent] = key
                if len(self._written_states) > MAX_WRITTEN_STATES:
                    del self._written_states[next(iter(self._written_states))]
            elif (block := self._tree.get(key)) is not None:
                self._set_object_bytes(block, nbytes)

    def touch(self, blocks: Sequence[Block], checkpoint: Checkpoint | None = None) -> None: ...

    def pin(self, data: Sequence[Block | Checkpoint]) -> None: ...

    def clear(self) -> None:
        """Delete all objects of this model, for all machines. Nothing is written until they are deleted."""
        with self._lock:
            self._clears += 1
        self._cancel_writes(set(self._writing.values()))
        self._note_written()
        for checkpoint in self._checkpoints.list_all():
            self._remove_checkpoint(checkpoint.key, checkpoint.parent)
        self._written_states.clear()
        self._searches.clear()
        self._submit(self._delete_all)

    def _delete_all(self) -> None:
        try:
            self.client.delete_folder(self._folder)
        finally:
            with self._lock:
                self._clears -= 1

    # --- writing

    def put(self, data: Block | Checkpoint | LastLogits) -> None:
        """Queue a block or a checkpoint for writing, unless the store has it. Last logits are not shared."""
        if isinstance(data, LastLogits):
            return
        name = self._name_block(data) if isinstance(data, Block) else self._build_name(data.parent, "state")
        is_writing = name in self._writing  # if not any more, it is among those that are noted now
        self._note_written()
        if is_writing or (data.object_bytes > 0 if isinstance(data, Block) else self._has_state(data)):
            return
        if not self.health.is_available or self._clears or len(self._writing) >= MAX_QUEUED_WRITES:
            self.counters.rejected_saves += 1
            return
        with self._lock:
            self._writing[name] = data.key
        self._submit(functools.partial(self._write, get_kind(data), data.key, name))

    def _has_state(self, checkpoint: Checkpoint) -> bool:
        """Return whether the store has a checkpoint, or another one after the same block that was used later."""
        written = self._written_states.get(checkpoint.parent)
        if checkpoint.key == written or checkpoint.key in self._checkpoints:
            return True
        other = None if written is None else self._ram.checkpoints.find(written)
        return other is not None and other.last_used >= checkpoint.last_used

    def _write(self, kind: FileKind, key: bytes, name: str) -> None:
        """Write an object. Full blocks are named by their content: one that exists is the same."""
        try:
            file = self._builder.build_file(kind, key)
            if file is None or self._writing[name] == CANCELLED or not self.health.is_available:  # it has left RAM
                return
            nbytes = self.client.get_size(name) if name.endswith(".cells") else None
            if nbytes is None:
                magic, checksum, header, *body = file.to_buffers()
                nbytes = self.client.write(name, b"".join((magic, checksum, header)), body)
            self.health.record(None)
            with self._lock:
                is_cancelled = self._writing[name] == CANCELLED
                if not is_cancelled:
                    self._written.put((kind, key, file.parent, nbytes))
            if is_cancelled:
                self.client.delete(name)
        finally:
            with self._lock:
                del self._writing[name]

    def _submit(self, task: Callable[[], None]) -> None:
        def run() -> None:
            try:
                task()
            except OSError as error:
                self.health.record(error)
            except Exception:  # a bug must not be silent
                logger.exception("unexpected error in the object store")

        future = self._writers.submit(run)
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)

    def flush(self, timeout: float) -> bool:
        """Wait until everything is written or deleted; return False if it is not within `timeout` seconds."""
        unfinished = wait(list(self._tasks), timeout).not_done
        self.sync()
        return not unfinished

    def close(self, timeout: float) -> None:
        self.flush(timeout)
        self._prefetcher.close()
        for pool in (self._searchers, self._probers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)

    # --- reading

    def load(self, kind: FileKind, key: bytes) -> LoadedFile:
        """Read and check an object. Thread-safe. Raise `InvalidState` if it cannot be read or is damaged."""
        name = self._names.get(key) or self._build_name(key, "cells")
        started = time.perf_counter()
        try:
            data = self.client.read(name)
        except FileNotFoundError:
            raise InvalidState(f"{name} is missing") from None
        except OSError as error:
            self.health.record(error)
            raise InvalidState(f"{name}: {error}") from None
        try:
            loaded = decode_file(data)
            if self._name_file(loaded.file) != name or loaded.file.model != self._tree.hasher.model:
                raise InvalidState("it is another object")
        except (InvalidState, ValueError) as error:
            with self._lock:
                self.corrupt_objects += 1
            self._submit(functools.partial(self.client.delete, name))  # so that it is written again
            raise InvalidState(f"{name}: {error}") from None
        self.health.record(None)
        if (loaded.file.kind, loaded.file.key) != (kind, key):  # what was stored last after a block has its place
            raise InvalidState(f"{name} was replaced by another one")
        transfer = time.perf_counter() - started - self.latency_seconds
        self._seconds_per_byte.add(max(transfer, 1e-6) / len(data) / READ_THREADS)
        return loaded

    def prefetch(self, blocks: Sequence[Block], checkpoint: Checkpoint | None, protected: AbstractSet[bytes]) -> bool:
        """Start reading what only this tier has, on several threads; return whether it is not complete yet."""
        sizes: dict[FileKey, int] = {
            ("cells", block.key): block.nbytes
            for block in blocks
            if block.rows is None and block.object_bytes and not block.is_on_disk
        }
        if checkpoint is not None and checkpoint.tier == self.name:
            sizes["state", checkpoint.key] = checkpoint.state.nbytes
        return bool(sizes) and self._prefetcher.submit(sizes, protected)

    def _load_file(self, kind: FileKind, key: bytes, position: int) -> LoadedFile:
        """Return an object, in about twice the time that computing the entries before `position` takes."""
        compute_seconds = position * self._cost_model.seconds_per_entry
        try:
            timeout = min(LOAD_TIMEOUT_SECONDS, MIN_LOAD_TIMEOUT_SECONDS + 2 * compute_seconds)
            loaded = self._prefetcher.pop(kind, key, timeout)
        except TimeoutError as error:
            self.health.record(error)
            raise InvalidState("the store is too slow") from None
        if loaded is None and not self.health.is_available:
            raise InvalidState("the store fails")
        return self.load(kind, key) if loaded is None else loaded[0]

    def load_rows(self, blocks: Sequence[Block]) -> list[NDArray[np.uint8] | None]:
        """Return the cells of the blocks of a path; None from the first on that is missing, damaged or too slow."""
        rows: list[NDArray[np.uint8] | None] = []
        for block in blocks:
            try:
                rows.append(self._load_block(block))
            except InvalidState:
                break
        return [*rows, *[None] * (len(blocks) - len(rows))]

    def _load_block(self, block: Block) -> NDArray[np.uint8]:
        try:
            loaded = self._load_file("cells", block.key, block.end)
            rows = loaded.to_rows()
            if not is_file_of(loaded.file, block):
                raise InvalidState("an object contains other entries than expected")
        except InvalidState:
            self.forget(block)
            raise
        block.layout = loaded.file.layout
        return rows

    def load_state(self, checkpoint: Checkpoint) -> BackendState:
        """Return a partial state; raise `InvalidState` if it is not the state after the same entries."""
        try:
            loaded = self._load_file("state", checkpoint.key, checkpoint.position)
            if not np.array_equal(loaded.file.entries, self._interner.to_portable_entries(checkpoint.entries)):
                raise InvalidState("an object contains other entries than expected")
            return self._backend.deserialize_state(loaded.payload)
        except InvalidState:
            self._remove_checkpoint(checkpoint.key, checkpoint.parent)
            raise

    def _name_block(self, block: Block | CacheFile) -> str:
        is_full = len(block.entries) == self._tree.hasher.block_size
        return self._build_name(block.key, "cells") if is_full else self._build_name(block.parent, "tail")

    def _name_file(self, file: CacheFile) -> str:
        return self._build_name(file.parent, "state") if file.kind == "state" else self._name_block(file)

    def _build_name(self, key: bytes, suffix: str) -> str:
        return f"{self._folder}/{key.hex()}.{suffix}"
