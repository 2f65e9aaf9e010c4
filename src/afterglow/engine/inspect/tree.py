"""The prefix cache of one salt as a tree: sequences, stored blocks, checkpoints and pins, merged by their entries.

Branch points and ends are nodes; a chain of blocks between them is one node. The walk takes time that grows with the
number of blocks, about 80 ms for 1,000 conversations. `SlicedWork` runs it on another thread while the engine thread
waits for llama.cpp or for commands, so that a look costs the engine less than 2 ms. It costs nothing unless it is
asked for.
"""

from __future__ import annotations

import functools
import pickle
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from blake3 import blake3

from afterglow.engine.engine import Engine
from afterglow.engine.kvcache.blocks import Block
from afterglow.engine.kvcache.checkpoints import Checkpoint
from afterglow.engine.kvcache.disk.files import build_file_name
from afterglow.engine.kvcache.disk.tier import get_kind
from afterglow.engine.kvcache.disk.writer import FLUSH_TIMEOUT_SECONDS
from afterglow.engine.kvcache.pins import Pin
from afterglow.engine.kvcache.prefix_cache import ForgetReport
from afterglow.engine.kvcache.radix_tree import RadixNode, RadixTree
from afterglow.engine.kvcache.sequence import Sequence as Slot
from afterglow.engine.scheduling.job import Job
from afterglow.engine.types.entries import Entries, EntryBuffer, strip_labels
from afterglow.errors import UnsupportedOperation

MAX_TREE_NODES = 2000
PREVIEW_ENTRIES = 48  # first entries of a node, for its text
NODES_PER_TURN = 4  # between two checks of the time of a slice
BLOCKS_PER_TURN = 64
HASHES_PER_TURN = 64
MAX_VERSION = 2**53 - 1  # integers that every JSON parser reads exactly

TreeAnchor: TypeAlias = Block | Slot | Checkpoint | Pin
PrefixNode: TypeAlias = RadixNode[TreeAnchor]


class TreeNode(NamedTuple):
    """Range of entries `start` to `end` of one or more cached prefixes. A named tuple because there are many.

    An entry may be in several tiers. `checkpoint_entries` are those that only partial states hold, of recurrent models.
    """

    id: str  # hash of all entries up to its end: the same while the prefix exists
    parent: str | None
    start: int
    end: int
    first_entries: tuple[int, ...]  # for a preview; negative entries are media
    device_entries: int
    ram_entries: int
    disk_entries: int
    checkpoint_entries: int
    ram_bytes: int  # of the blocks that end in the range, and of its checkpoints
    disk_bytes: int
    checkpoints: tuple[int, ...]  # positions in the range
    pinned: bool
    hits: int  # prompts that reused entries of the range
    sharers: int  # leaves at the node and below
    idle_seconds: float  # since the last use of the node or a node below
    seconds_saved: float  # estimated prefill time of the reused entries
    requests: tuple[str, ...]  # running requests whose sequence ends here, and waiting ones that share no more
    sequence: int | None  # sequence of the KV cache that ends here
    folded: int  # nodes below that are left out because of the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """Cached prefixes of one salt. A node follows its parent.

    >>> PrefixTree(version=1, block_size=64, nodes=(), total_nodes=0).nodes
    ()
    """

    version: int  # another number if anything has changed
    block_size: int
    nodes: tuple[TreeNode, ...]
    total_nodes: int  # including those that are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTree:
    """`PrefixTree` that is sent between processes fast: its nodes are pickled already."""

    version: int
    block_size: int
    packed_nodes: tuple[bytes, ...]
    total_nodes: int

    def unpack(self) -> PrefixTree:
        """Return the tree."""
        nodes = tuple(TreeNode(*fields) for packed in self.packed_nodes for fields in pickle.loads(packed))
        return PrefixTree(version=self.version, block_size=self.block_size, nodes=nodes, total_nodes=self.total_nodes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedPrefix:
    """All entries up to the end of a node, which starts after the first `start` of them."""

    id: str
    namespace: str  # salt and adapters
    start: int
    entries: Entries  # negative entries are media


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFiles:
    """Files of a prefix in a disk tier directory."""

    directory: Path
    model: str  # digest, the name of the folder
    names: frozenset[str]


# --- functions of an engine


def get_tree(
    engine: Engine, salt: str = "", max_nodes: int = MAX_TREE_NODES, since: int | None = None
) -> Future[PackedTree] | None:
    """Return the future tree of a salt, or None if its version is `since`.

    Beyond `max_nodes`, the least recently used branches are folded into the nodes above them.
    """
    engine.prefix_cache.store.refresh()
    version = compute_version(engine)
    if version == since:
        return None
    return engine.sliced_work.add(_build_tree(engine, salt, max_nodes, version))


def compute_version(engine: Engine) -> int:
    """Return a number that changes with every change of the cached state and of the requests, of all salts."""
    cache, store = engine.prefix_cache, engine.prefix_cache.store
    state = (
        tuple([(slot.loss_count, len(slot), slot.busy, len(slot.reuse_lengths)) for slot in cache.slots]),
        (len(store.tree), store.tree.loss_count),
        (len(cache.all_checkpoints), cache.checkpoints.loss_count),
        tuple([(tuple(tier.budget.by_kind.values()), tier.counters.evictions) for tier in store.tiers]),
        tuple([(id(pin), pin.expires_at) for pin in store.pin_manager.pins]),
        tuple([job.request.id for job in engine.waiting_jobs]),
        tuple([running.job.request.id for running in engine.running_jobs]),
    )
    return hash(state) & MAX_VERSION


def _build_tree(engine: Engine, salt: str, max_nodes: int, version: int) -> Generator[None, None, PackedTree]:
    walk = yield from walk_tree(engine, salt)
    nodes = yield from walk.list_nodes(max_nodes)
    packed = []
    for start in range(0, len(nodes), NODES_PER_TURN):
        fields = [tuple(node) for node in nodes[start : start + NODES_PER_TURN]]
        packed.append(pickle.dumps(fields, protocol=pickle.HIGHEST_PROTOCOL))
        yield
    return PackedTree(
        version=version,
        block_size=walk.block_size,
        packed_nodes=tuple(packed),
        total_nodes=walk.total_nodes,
    )


def find_prefix(engine: Engine, id: str, salt: str = "") -> Future[CachedPrefix | None]:
    """Return the future prefix up to the end of a node; None if the tree of the salt has no such node."""
    return engine.sliced_work.add(_find_prefix(engine, id, salt))


def _find_prefix(engine: Engine, id: str, salt: str) -> Generator[None, None, CachedPrefix | None]:
    walk = yield from walk_tree(engine, salt)
    return (yield from walk.find_prefix(id))


def pin_prefix(engine: Engine, prefix: CachedPrefix) -> None:
    """Pin a prefix. Raises `InvalidArgument` if pins would take more than half of the budget."""
    entries = engine.interner.from_portable_entries(prefix.entries)
    engine.prefix_cache.store.pin_manager.pin(entries, prefix.namespace)


def unpin_prefix(engine: Engine, prefix: CachedPrefix) -> bool:
    """Remove the pin on exactly this prefix; return False if there is none."""
    entries = engine.interner.from_portable_entries(prefix.entries)
    return engine.prefix_cache.store.pin_manager.unpin(entries, prefix.namespace)


def forget_prefix(engine: Engine, prefix: CachedPrefix) -> ForgetReport:
    """Remove a node and everything below it from all tiers, including pins. Sequences of running requests stay."""
    entries = engine.interner.from_portable_entries(prefix.entries)
    return engine.prefix_cache.forget(entries, prefix.start, prefix.namespace)


def store_prefix(engine: Engine, prefix: CachedPrefix) -> Future[StoredFiles]:
    """Write a prefix to the disk tier, as far as idle sequences and the RAM tier hold it; return its future files."""
    cache, store = engine.prefix_cache, engine.prefix_cache.store
    if (disk := store.disk_tier) is None:
        raise UnsupportedOperation("exporting a prefix", "the engine has no disk cache")
    entries = engine.interner.from_portable_entries(prefix.entries)
    cache.write_prefix(entries, prefix.namespace)
    stored: list[Block | Checkpoint] = [*store.find_stored_prefix(entries, prefix.namespace).blocks]
    stored += store.find_checkpoints(entries, prefix.namespace)
    files = StoredFiles(
        directory=disk.writer.directory,
        model=store.hasher.model.hex(),
        names=frozenset(build_file_name(get_kind(item), item.key) for item in stored),
    )
    future: Future[StoredFiles] = Future()

    def wait_for_writer() -> None:
        disk.flush(FLUSH_TIMEOUT_SECONDS)
        future.set_result(files)

    threading.Thread(target=wait_for_writer, name="afterglow-export", daemon=True).start()
    return future


def walk_tree(engine: Engine, salt: str) -> Generator[None, None, TreeWalk]:
    """Merge everything cached under a salt. State that changes during the walk is seen before or after its change."""
    walk = TreeWalk(engine, salt)
    yield
    yield from walk.insert_blocks()
    yield from walk.insert_sequences()
    yield from walk.insert_checkpoints()
    yield from walk.insert_pins()
    yield from walk.assign_blocks()
    yield from walk.locate_checkpoints()
    walk.locate_requests()
    yield from walk.summarize()
    return walk


@dataclass(slots=True)
class NodeSummary:
    """What a node holds, and the totals of the nodes below it."""

    blocks: list[Block] = field(default_factory=list)  # that end in its range
    run_count: int = 0  # paths of blocks that they come from
    straddling: list[Block] = field(default_factory=list)  # that start before its end, and end below it
    checkpoints: set[int] = field(default_factory=set)  # positions in its range
    ram_checkpoint_bytes: int = 0
    disk_checkpoint_bytes: int = 0
    requests: list[str] = field(default_factory=list)
    block_keys: Callable[[], list[bytes]] | None = None  # of a path through the node, the root key first
    last_used: float = 0.0
    reuse_lengths: list[int] = field(default_factory=list)  # of the sequences that hold it
    has_sequence: bool = False
    has_checkpoint: bool = False
    pinned: bool = False
    leaves: int = 0
    nodes_below: int = 0


class TreeWalk:
    """One walk over the prefix cache. Its generators yield often: the state may change then, and only then."""

    def __init__(self, engine: Engine, salt: str) -> None:
        cache, store = engine.prefix_cache, engine.prefix_cache.store
        self.block_size = store.hasher.block_size
        self._engine = engine
        self._cache = cache
        self._store = store
        self._hasher = store.hasher
        self._interner = engine.interner
        self._salt = salt
        self._checkpoints = [item for item in cache.all_checkpoints if self._is_own(item.namespace)]
        self._disk_checkpoints = [] if store.disk_tier is None else store.disk_tier.list_checkpoints()
        self._pins = [pin for pin in store.pin_manager.pins if self._is_own(pin.namespace)]
        self._namespaces = self._find_namespaces()
        self._tree: RadixTree[TreeAnchor] = RadixTree()
        self._runs: list[list[Block]] = []  # paths of blocks to their ends, without the blocks of earlier paths
        self._summaries: defaultdict[PrefixNode, NodeSummary] = defaultdict(NodeSummary)
        self._nodes: list[PrefixNode] = []  # parents before children
        self._now = time.monotonic()

    @property
    def total_nodes(self) -> int:
        return len(self._nodes)

    def _is_own(self, namespace: str) -> bool:
        return namespace == self._salt or namespace.startswith(f"{self._salt}\0")

    def _find_namespaces(self) -> list[str]:
        """Return the salt together with each set of adapters that something was computed with."""
        found = {self._cache.build_namespace(self._salt)}
        found.update(slot.namespace for slot in self._cache.slots if slot.salt == self._salt)
        found.update(checkpoint.namespace for checkpoint in self._checkpoints)
        found.update(pin.namespace for pin in self._pins)
        return sorted(found)

    # --- paths

    def insert_blocks(self) -> Generator[None, None, None]:
        """Insert the path of each stored block that has no successor."""
        get_children = self._store.tree.get_children
        for namespace in self._namespaces:
            pending = get_children(self._hasher.get_root_key(namespace))[:]
            path = EntryBuffer()
            while pending:
                run = [pending.pop()]
                while following := get_children(run[-1].key):
                    run.append(following[0])
                    if len(following) > 1:
                        pending += following[1:]
                    if len(run) % BLOCKS_PER_TURN == 0:
                        yield
                path.truncate(run[0].start)
                path.extend(np.concatenate([block.entries for block in run]))
                self._tree.insert(path.entries, run[-1], namespace)
                self._runs.append(run)
                yield

    def insert_sequences(self) -> Generator[None, None, None]:
        """Insert the idle and busy sequences."""
        for slot in self._cache.slots:
            if slot.salt != self._salt or not len(slot):
                continue
            while not slot.hash_blocks(self._hasher, HASHES_PER_TURN):
                yield
            entries = self._interner.to_portable_entries(slot.entries)
            self._tree.insert(entries, slot, slot.namespace)
            summary = self._summaries[self._tree.get_node(slot)]
            summary.block_keys = functools.partial(list, slot.get_block_keys(self._hasher))
            summary.reuse_lengths += slot.reuse_lengths
            summary.last_used = max(summary.last_used, self._now if slot.busy else slot.last_used)
            summary.has_sequence = True
            yield

    def insert_checkpoints(self) -> Generator[None, None, None]:
        """Insert the checkpoints that are on no path so far: those of models without cells."""
        for checkpoint in sorted(self._checkpoints, key=lambda checkpoint: -checkpoint.position):
            entries = self._interner.to_portable_entries(checkpoint.entries)
            if self._tree.match(entries, checkpoint.namespace).length < len(entries):
                self._insert_interned(checkpoint.entries, checkpoint, checkpoint.namespace)
            yield

    def insert_pins(self) -> Generator[None, None, None]:
        """Insert the pins. A pinned prefix is a node even if it is not cached, so that it can be unpinned."""
        for pin in self._pins:
            self._insert_interned(pin.entries, pin, pin.namespace)
            self._summaries[self._tree.get_node(pin)].pinned = True
            yield

    def _insert_interned(self, entries: Entries, anchor: Checkpoint | Pin, namespace: str) -> None:
        self._tree.insert(self._interner.to_portable_entries(entries), anchor, namespace)
        summary = self._summaries[self._tree.get_node(anchor)]
        if summary.block_keys is None:
            summary.block_keys = functools.partial(self._hasher.hash_prefixes, entries, namespace)

    # --- what lies on the paths

    def assign_blocks(self) -> Generator[None, None, None]:
        """Assign each block to the node in whose range it ends."""
        for turn, run in enumerate(self._runs):
            node, first = self._tree.get_node(run[-1]), run[0].start // self.block_size
            upper = first + len(run)
            while upper > first and node.parent is not None:
                lower = max(first, node.parent.depth // self.block_size)
                if lower < upper:
                    summary = self._summaries[node]
                    summary.blocks += run[lower - first : upper - first]
                    summary.run_count += 1
                node, upper = node.parent, min(upper, lower)
            if turn % NODES_PER_TURN == 0:
                yield

    def locate_checkpoints(self) -> Generator[None, None, None]:
        """Record each checkpoint in the node that contains its position."""
        located: dict[bytes, PrefixNode] = {}
        for checkpoint in self._checkpoints:
            entries = self._interner.to_portable_entries(checkpoint.entries)
            match = self._tree.match(entries, checkpoint.namespace)
            node = next(node for node in match.path if node.depth >= checkpoint.position)
            located[checkpoint.key] = node
            summary = self._summaries[node]
            summary.checkpoints.add(checkpoint.position)
            summary.ram_checkpoint_bytes += checkpoint.nbytes
            summary.last_used = max(summary.last_used, checkpoint.last_used)
            yield
        if not self._disk_checkpoints:
            return
        ends: dict[bytes, PrefixNode] = {}
        for turn, (node, summary) in enumerate(list(self._summaries.items())):
            ends.update((block.key, node) for block in summary.blocks)
            if turn % NODES_PER_TURN == 0:
                yield
        roots = {self._hasher.get_root_key(namespace): self._tree.get_root(namespace) for namespace in self._namespaces}
        for on_disk in self._disk_checkpoints:
            top = ends.get(on_disk.parent) or roots.get(on_disk.parent)
            found = located.get(on_disk.key) or self._descend(top, on_disk.start, on_disk.rest)
            if found is not None:
                self._summaries[found].checkpoints.add(on_disk.position)
                self._summaries[found].disk_checkpoint_bytes += on_disk.nbytes
            yield

    def _descend(self, node: PrefixNode | None, position: int, rest: Entries) -> PrefixNode | None:
        """Return the node that contains the end of `rest` after `position`, which lies in `node`; None: no path."""
        while node is not None:
            edge = node.edge[len(node.edge) - (node.depth - position) :]
            count = min(len(edge), len(rest))
            if not np.array_equal(edge[:count], rest[:count]):
                return None
            position, rest = position + count, rest[count:]
            if not len(rest):
                return node
            node = node.children.get(int(rest[0]))
        return None

    def locate_requests(self) -> None:
        """Record each request at the deepest node on its path."""
        for running in self._engine.running_jobs:
            self._locate_request(running.job, running.sequence.entries)
        for job in self._engine.waiting_jobs:
            self._locate_request(job, job.prompt)

    def _locate_request(self, job: Job, entries: Entries) -> None:
        if job.request.salt == self._salt:
            match = self._tree.match(self._interner.to_portable_entries(entries), job.namespace)
            node = next(node for node in reversed(match.path) if node.depth <= match.length)
            self._summaries[node].requests.append(job.request.id)

    # --- totals

    def summarize(self) -> Generator[None, None, None]:
        """Order the nodes and add what is below each of them to its totals."""
        pending = [self._tree.get_root(namespace) for namespace in reversed(self._namespaces)]
        while pending:
            node = pending.pop()
            pending += reversed(node.children.values())
            if node.parent is not None:
                self._nodes.append(node)
                if len(self._nodes) % NODES_PER_TURN == 0:
                    yield
        for turn, node in enumerate(reversed(self._nodes)):
            self._summarize_node(node)
            if turn % NODES_PER_TURN == 0:
                yield

    def _summarize_node(self, node: PrefixNode) -> None:
        assert node.parent is not None
        summary, start = self._summaries[node], node.parent.depth
        if summary.blocks:
            summary.last_used = max(summary.last_used, max([block.last_used for block in summary.blocks]))
        summary.leaves = summary.leaves or 1
        summary.has_checkpoint |= bool(summary.checkpoints)
        above = self._summaries[node.parent]
        first_blocks = summary.blocks[:1] if summary.run_count <= 1 else summary.blocks
        above.straddling += [block for block in (*first_blocks, *summary.straddling) if block.start < start]
        above.reuse_lengths += summary.reuse_lengths
        above.last_used = max(above.last_used, summary.last_used)
        above.has_sequence |= summary.has_sequence
        above.has_checkpoint |= summary.has_checkpoint
        above.pinned |= summary.pinned
        above.leaves += summary.leaves
        above.nodes_below += summary.nodes_below + 1
        above.block_keys = above.block_keys or summary.block_keys

    # --- nodes

    def list_nodes(self, max_nodes: int) -> Generator[None, None, list[TreeNode]]:
        """Return the nodes, parents first. Beyond `max_nodes`, those that were used last, and their ancestors."""
        shown = self._nodes if len(self._nodes) <= max_nodes else self._choose_nodes(max_nodes)
        yield
        is_shown, ids = set(shown), dict[PrefixNode, bytes]()
        nodes = []
        for turn, node in enumerate(shown):
            nodes.append(self._build_node(node, ids, is_shown))
            if turn % NODES_PER_TURN == 0:
                yield
        return nodes

    def find_prefix(self, id: str) -> Generator[None, None, CachedPrefix | None]:
        """Return the prefix up to the end of the node with this id."""
        namespaces = {self._tree.get_root(namespace): namespace for namespace in self._namespaces}
        for turn, node in enumerate(self._nodes):
            if self._compute_id(node).hex() == id:
                assert node.parent is not None
                top = node
                while top.parent is not None:
                    top = top.parent
                entries = get_last_entries(node, node.depth)
                return CachedPrefix(id=id, namespace=namespaces[top], start=node.parent.depth, entries=entries)
            if turn % NODES_PER_TURN == 0:
                yield
        return None

    def _choose_nodes(self, max_nodes: int) -> list[PrefixNode]:
        """Return the nodes with the latest use at or below them. A node is as recent as its latest descendant."""
        last_used = np.array([self._summaries[node].last_used for node in self._nodes])
        latest = np.argsort(-last_used, kind="stable")[:max_nodes]  # of equal ones, the ancestor comes first
        return [self._nodes[index] for index in np.sort(latest)]

    def _build_node(self, node: PrefixNode, ids: dict[PrefixNode, bytes], is_shown: set[PrefixNode]) -> TreeNode:
        assert node.parent is not None
        summary, start, end = self._summaries[node], node.parent.depth, node.depth
        ids[node] = self._compute_id(node)
        in_ram = [block for block in summary.blocks if block.rows is not None]
        on_disk = [block for block in summary.blocks if block.file_bytes]
        hits, reused = self._count_hits(summary, start, end)
        hidden = [child for child in node.children.values() if child not in is_shown]
        return TreeNode(
            id=ids[node].hex(),
            parent=ids[node.parent].hex() if node.parent in ids else None,
            start=start,
            end=end,
            first_entries=tuple(strip_labels(node.edge[:PREVIEW_ENTRIES]).tolist()),
            device_entries=end - start if summary.has_sequence else 0,
            ram_entries=self._count_entries(summary, in_ram, lambda block: block.rows is not None, start, end),
            disk_entries=self._count_entries(summary, on_disk, lambda block: block.file_bytes > 0, start, end),
            checkpoint_entries=self._count_checkpoint_entries(node, summary, start, end),
            ram_bytes=sum([block.nbytes for block in in_ram]) + summary.ram_checkpoint_bytes,
            disk_bytes=sum([block.file_bytes for block in on_disk]) + summary.disk_checkpoint_bytes,
            checkpoints=tuple(sorted(summary.checkpoints)),
            pinned=summary.pinned or any([block.start >= start for block in summary.blocks if block.pinned_until]),
            hits=hits,
            sharers=summary.leaves,
            idle_seconds=max(0.0, self._now - summary.last_used),
            seconds_saved=reused * self._cache.cost_model.seconds_per_entry,
            requests=tuple(summary.requests),
            sequence=min((anchor.number for anchor in node.anchors if isinstance(anchor, Slot)), default=None),
            folded=sum(1 + self._summaries[child].nodes_below for child in hidden),
        )

    def _count_entries(
        self, summary: NodeSummary, blocks: list[Block], is_held: Callable[[Block], bool], start: int, end: int
    ) -> int:
        """Return how many entries of a range the blocks of a tier hold, each entry once."""
        straddling = [block for block in summary.straddling if is_held(block)]
        if not blocks and not straddling:
            return 0
        if summary.run_count <= 1 and not straddling and len(blocks) == len(summary.blocks):  # usual: one whole path
            return blocks[-1].end - max(start, blocks[0].start)
        ends: dict[int, int] = {}  # by start; blocks with the same start hold the same entries of this range
        for block in (*blocks, *straddling):
            ends[block.start] = max(ends.get(block.start, 0), min(block.end, end))
        return sum(block_end - max(block_start, start) for block_start, block_end in ends.items())

    def _count_checkpoint_entries(self, node: PrefixNode, summary: NodeSummary, start: int, end: int) -> int:
        """Return how many entries of a range lie before a checkpoint, of a model whose checkpoints need no cells."""
        if self._engine.backend.capabilities.has_attention_cells or not summary.has_checkpoint:
            return 0
        if any(self._summaries[child].has_checkpoint for child in node.children.values()):
            return end - start
        return max(summary.checkpoints) - start

    def _count_hits(self, summary: NodeSummary, start: int, end: int) -> tuple[int, int]:
        """Return how many prompts have reused entries of a range, and how many entries, counted once per prompt.

        A block counts in the range in which it starts: a prompt that loads it may reuse its first entries only.
        """
        on_device = [min(length, end) - start for length in summary.reuse_lengths if length > start]
        loaded: Counter[int] = Counter()  # hits by the start of the block
        reused = sum(on_device)
        for block in (*summary.blocks, *summary.straddling):
            if block.hits and block.start >= start:
                loaded[block.start] += block.hits
                reused += block.hits * (min(block.end, end) - block.start)
        return len(on_device) + max(loaded.values(), default=0), reused

    def _compute_id(self, node: PrefixNode) -> bytes:
        """Return the hash of all entries up to the end of a node: the key of its last full block, and the rest."""
        count, rest_length = divmod(node.depth, self.block_size)
        key = self._find_boundary_key(node, count)
        if not rest_length:
            return key
        rest = get_last_entries(node, rest_length)
        if rest.min() >= 0:
            return self._hasher.hash_block(key, rest)
        return blake3(key + rest.tobytes()).digest()  # media have portable entries here

    def _find_boundary_key(self, node: PrefixNode, count: int) -> bytes:
        """Return the key of the first `count` blocks of the path to a node, without hashing if it has blocks."""
        summary, position = self._summaries[node], count * self.block_size
        for block in (*summary.blocks[-1:], *summary.straddling[:1], *summary.blocks):
            if block.start == position:
                return block.parent
            if block.end == position:
                return block.key
        assert summary.block_keys is not None, "a node without blocks is part of a sequence, a checkpoint or a pin"
        return summary.block_keys()[count]


def get_last_entries(node: PrefixNode, count: int) -> Entries:
    """Return the last `count` entries of the path to a node."""
    parts = list[Entries]()
    while count and node.parent is not None:
        parts.append(node.edge[-count:])
        count -= len(parts[-1])
        node = node.parent
    return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])
