"""The prefix tree computed naively, prefix by prefix, from slots, blocks, checkpoints and pins."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from afterglow.engine.engine import Engine
from afterglow.engine.inspect.tree import PrefixTree, get_tree
from afterglow.engine.kvcache.blocks import Block

Prefix = tuple[int, ...]


def read_tree(engine: Engine, salt: str = "", **options: object) -> PrefixTree:
    """Return the tree that the engine builds, without steps in between."""
    future = get_tree(engine, salt, **options)
    while engine.sliced_work.run_slice():
        pass
    return future.result().unpack()


@dataclass
class Truth:
    """All prefixes of one namespace, by their entries, and what lies at each."""

    engine: Engine
    namespace: str
    nexts: defaultdict[Prefix, set[int]] = field(default_factory=lambda: defaultdict(set))
    ends: set[Prefix] = field(default_factory=set)
    device: set[Prefix] = field(default_factory=set)
    in_ram: set[Prefix] = field(default_factory=set)
    on_disk: set[Prefix] = field(default_factory=set)
    before_checkpoint: set[Prefix] = field(default_factory=set)
    blocks: list[tuple[Prefix, Block]] = field(default_factory=list)
    slots: list[tuple[Prefix, object]] = field(default_factory=list)
    checkpoints: defaultdict[Prefix, int] = field(default_factory=lambda: defaultdict(int))  # bytes
    pins: set[Prefix] = field(default_factory=set)

    def add(self, path: Prefix) -> None:
        for length in range(len(path)):
            self.nexts[path[:length]].add(path[length])

    def has(self, path: Prefix) -> bool:
        return not path or path[-1] in self.nexts.get(path[:-1], ())

    def collect(self) -> None:
        self.collect_blocks()
        portable = self.engine.interner.to_portable_entries
        for slot in self.engine.prefix_cache.slots:
            if slot.namespace == self.namespace and len(slot):
                entries = tuple(portable(slot.entries).tolist())
                self.add(entries)
                self.ends.add(entries)
                self.slots.append((entries, slot))
                self.device |= {entries[:length] for length in range(1, len(entries) + 1)}
        checkpoints = [item for item in self.engine.prefix_cache.all_checkpoints if item.namespace == self.namespace]
        for checkpoint in sorted(checkpoints, key=lambda item: -item.position):
            entries = tuple(portable(checkpoint.entries).tolist())
            if not self.has(entries):
                self.add(entries)
                self.ends.add(entries)
            self.checkpoints[entries] += checkpoint.nbytes
            self.before_checkpoint |= {entries[:length] for length in range(1, len(entries) + 1)}
        for pin in self.engine.prefix_cache.store.pin_manager.pins:
            if pin.namespace == self.namespace:
                entries = tuple(portable(pin.entries).tolist())
                self.add(entries)
                self.ends.add(entries)
                self.pins.add(entries)

    def collect_blocks(self) -> None:
        store = self.engine.prefix_cache.store
        parents, root = {block.parent for block in store.tree}, store.hasher.get_root_key(self.namespace)
        for block in store.tree:
            path = [block]
            while path[0].start:
                path.insert(0, store.tree.get(path[0].parent))
            if path[0].parent != root:
                continue
            entries = tuple(int(entry) for part in path for entry in part.entries)
            self.add(entries)
            self.blocks.append((entries, block))
            if block.key not in parents:
                self.ends.add(entries)
            covered = {entries[:length] for length in range(block.start + 1, block.end + 1)}
            self.in_ram |= covered if block.rows is not None else set()
            self.on_disk |= covered if block.is_on_disk else set()

    def list_nodes(self) -> dict[Prefix, int]:
        """Return the starts of all nodes, by their prefixes."""
        boundaries = self.ends | {prefix for prefix, nexts in self.nexts.items() if len(nexts) > 1 and prefix}
        return {
            prefix: max((length for length in range(1, len(prefix)) if prefix[:length] in boundaries), default=0)
            for prefix in boundaries
        }

    def compute_id(self, prefix: Prefix) -> str:
        interner, hasher = self.engine.interner, self.engine.prefix_cache.store.hasher
        ids = {
            int(interner.to_portable_entries(np.array([-number]))[0]): -number
            for number in range(1, len(interner._media_by_id) + 1)
        }
        entries = np.array([ids.get(entry, entry) for entry in prefix])
        key, rest = hasher.hash_prefixes(entries, self.namespace)[-1], len(prefix) % hasher.block_size
        if not rest:
            return key.hex()
        tail = np.array(prefix[-rest:])
        return (hasher.hash_block(key, tail) if tail.min() >= 0 else blake3(key + tail.tobytes()).digest()).hex()

    def describe(self, prefix: Prefix, start: int, nodes: dict[Prefix, int]) -> dict[str, object]:
        """Return the fields that the node with this end must have."""
        steps = [prefix[:length] for length in range(start + 1, len(prefix) + 1)]
        inside = set(steps)
        blocks = [block for path, block in self.blocks if path in inside]
        through = [slot for path, slot in self.slots if path[: len(prefix)] == prefix]
        lengths = [length for slot in through for length in slot.reuse_lengths if length > start]
        checkpoints = {path: nbytes for path, nbytes in self.checkpoints.items() if path in inside}
        has_cells = self.engine.backend.capabilities.has_attention_cells
        starting = [
            block
            for path, block in self.blocks
            if start <= block.start < len(prefix) and path[: block.start + 1] == prefix[: block.start + 1]
        ]
        loaded = Counter[int]()
        for block in starting:
            loaded[block.start] += block.hits
        below = [other for other in nodes if other[: len(prefix)] == prefix]
        parent = prefix[:start]
        return {
            "id": self.compute_id(prefix),
            "parent": self.compute_id(parent) if start else None,
            "start": start,
            "end": len(prefix),
            "device_entries": sum(step in self.device for step in steps),
            "ram_entries": sum(step in self.in_ram for step in steps),
            "disk_entries": sum(step in self.on_disk for step in steps),
            "checkpoint_entries": 0 if has_cells else sum(step in self.before_checkpoint for step in steps),
            "ram_bytes": sum(block.nbytes for block in blocks if block.rows is not None) + sum(checkpoints.values()),
            "disk_bytes": sum(block.file_bytes for block in blocks),
            "checkpoints": tuple(sorted(map(len, checkpoints))),
            "pinned": any(pin[: len(prefix)] == prefix for pin in self.pins)
            or any(block.pinned and block.start >= start for block in blocks),
            "hits": len(lengths) + max(loaded.values(), default=0),
            "sharers": sum(
                not any(deeper != leaf and deeper[: len(leaf)] == leaf for deeper in below) for leaf in below
            ),
            "sequence": min((slot.number for path, slot in self.slots if path == prefix), default=None),
            "first_entries": prefix[start : start + 48],
            "folded": 0,
        }


def check_tree(engine: Engine, salt: str = "") -> int:
    """Check that the tree of a salt equals the truth; return the number of its nodes."""
    tree = read_tree(engine, salt, max_nodes=100_000)
    truth = Truth(engine, engine.prefix_cache.build_namespace(salt))
    truth.collect()
    nodes = truth.list_nodes()
    expected = {(fields := truth.describe(prefix, start, nodes))["id"]: fields for prefix, start in nodes.items()}
    found = {node.id: node._asdict() for node in tree.nodes}
    assert len(found) == len(tree.nodes) == tree.total_nodes == len(nodes)
    assert found.keys() == expected.keys()
    for id, fields in expected.items():
        assert {name: found[id][name] for name in fields} == fields
    positions = {node.id: index for index, node in enumerate(tree.nodes)}
    assert all(node.parent is None or positions[node.parent] < positions[node.id] for node in tree.nodes)
    ids = sorted(id for node in tree.nodes for id in node.requests)
    assert len(ids) == len(set(ids))
    return len(nodes)
