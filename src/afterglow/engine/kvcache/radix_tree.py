"""A radix tree over entries: which sequences and checkpoints share how much with a prompt. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from afterglow.engine.types.entries import Entries, common_prefix_length

AnchorT = TypeVar("AnchorT", bound=Hashable)


class RadixNode(Generic[AnchorT]):
    """A stretch of entries after its parent's. `depth` is where it ends, counted from the root."""

    __slots__ = ("anchors", "children", "count", "depth", "edge", "parent")

    def __init__(self, edge: Entries, parent: RadixNode[AnchorT] | None) -> None:
        self.edge = edge
        self.parent = parent
        self.depth: int = len(edge) + (parent.depth if parent else 0)
        self.children: dict[int, RadixNode[AnchorT]] = {}
        self.anchors: list[AnchorT] = []
        self.count = 0  # anchors here and below


@dataclass(frozen=True, slots=True)
class PrefixMatch(Generic[AnchorT]):
    """How far a prompt runs along the tree: the nodes it touches, from the root, and `length` shared entries."""

    path: tuple[RadixNode[AnchorT], ...]
    length: int


class RadixTree(Generic[AnchorT]):
    """Anchors at the ends of paths. A match may end inside an edge. Every salt has a tree of its own.

    >>> tree = PrefixTree()
    >>> tree.insert(np.array([1, 2, 3, 4]), "conversation")
    >>> tree.nearest(tree.match(np.array([1, 2, 9])), limit=4)
    [('conversation', 2)]
    """

    def __init__(self) -> None:
        self._roots: dict[str, RadixNode[AnchorT]] = {}
        self._nodes: dict[AnchorT, RadixNode[AnchorT]] = {}

    def __contains__(self, anchor: AnchorT) -> bool:
        return anchor in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def get_root(self, salt: str = "") -> RadixNode[AnchorT]:
        """Where the tree of a salt begins."""
        return self._roots.get(salt) or RadixNode(np.zeros(0, dtype=np.int64), None)

    def insert(self, entries: Entries, anchor: AnchorT, salt: str = "") -> None:
        """Put `anchor` where `ids` end; an anchor that is somewhere else moves."""
        if anchor in self._nodes:
            self.remove(anchor)
        node, depth = self._roots.setdefault(salt, self.get_root(salt)), 0
        while depth < len(entries):
            child = node.children.get(int(entries[depth]))
            if child is None:
                child = RadixNode(entries[depth:].copy(), node)
                node.children[int(entries[depth])] = child
            else:
                same = common_prefix_length(child.edge, entries[depth:])
                if same < len(child.edge):
                    child = self._split(child, same)
            node, depth = child, child.depth
        node.anchors.append(anchor)
        self._nodes[anchor] = node
        self._add_to_counts(node, 1)

    def remove(self, anchor: AnchorT) -> None:
        """Take `anchor` away, and every branch that leads nowhere without it."""
        node = self._nodes.pop(anchor)
        node.anchors.remove(anchor)
        self._add_to_counts(node, -1)
        while node.parent is not None and not node.anchors and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is not None and not node.anchors and len(node.children) == 1:
            self._merge_with_child(node)
        if not node.count and node.parent is None:  # nothing of its salt is left
            self._roots = {salt: root for salt, root in self._roots.items() if root is not node}

    def match(self, entries: Entries, salt: str = "") -> PrefixMatch[AnchorT]:
        """The path of `ids` through the tree."""
        node, length = self.get_root(salt), 0
        path = [node]
        while length < len(entries):
            child = node.children.get(int(entries[length]))
            if child is None:
                break
            same = common_prefix_length(child.edge, entries[length:])
            length += same
            path.append(child)
            if same < len(child.edge):
                break
            node = child
        return PrefixMatch(tuple(path), length)

    def find_nearest(self, match: PrefixMatch[AnchorT], limit: int) -> list[tuple[AnchorT, int]]:
        """Anchors that share most with the matched prompt, and how many entries, at most `limit` of them."""
        found: list[tuple[AnchorT, int]] = []
        seen: RadixNode[AnchorT] | None = None
        for node in reversed(match.path):
            shared = min(node.depth, match.length)
            for anchor in self._iter_subtree(node, seen):
                if len(found) == limit:
                    return found
                found.append((anchor, shared))
            seen = node
        return found

    def count_unique_entries(self, anchor: AnchorT) -> int:
        """How many of the last entries on the way to `anchor` lead to no other."""
        node: RadixNode[AnchorT] | None = self._nodes[anchor]
        end = self._nodes[anchor].depth
        while node is not None and node.count == 1:
            node = node.parent
        return end - (node.depth if node is not None else 0)

    def iter_anchors_on_path(self, match: PrefixMatch[AnchorT]) -> Iterator[AnchorT]:
        """The anchors that the prompt runs through, deepest first."""
        for node in reversed(match.path):
            if node.depth <= match.length:
                yield from node.anchors

    def find_descendants(self, anchor: AnchorT) -> list[AnchorT]:
        """Every anchor whose way runs through that of `anchor`, itself included."""
        return list(self._iter_subtree(self._nodes[anchor], None))

    def iter_ancestors(self, anchor: AnchorT) -> Iterator[AnchorT]:
        """Every anchor on the way to `anchor`, itself included, deepest first."""
        node: RadixNode[AnchorT] | None = self._nodes[anchor]
        while node is not None:
            yield from node.anchors
            node = node.parent

    def _iter_subtree(self, top: RadixNode[AnchorT], excluded: RadixNode[AnchorT] | None) -> Iterator[AnchorT]:
        """Every anchor at or below a node, but for one branch."""
        waiting = [top]
        while waiting:
            node = waiting.pop()
            if node is not excluded:
                yield from node.anchors
                waiting += node.children.values()

    def _add_to_counts(self, node: RadixNode[AnchorT] | None, change: int) -> None:
        while node is not None:
            node.count += change
            node = node.parent

    def _split(self, node: RadixNode[AnchorT], offset: int) -> RadixNode[AnchorT]:
        """Cut an edge in two; the upper part is the new node."""
        assert node.parent is not None
        upper: RadixNode[AnchorT] = RadixNode(node.edge[:offset], node.parent)
        upper.count = node.count
        node.parent.children[int(node.edge[0])] = upper
        node.edge, node.parent = node.edge[offset:], upper
        upper.children[int(node.edge[0])] = node
        return upper

    def _merge_with_child(self, node: RadixNode[AnchorT]) -> None:
        """Make one edge of a node that only leads on and the one it leads to."""
        assert node.parent is not None
        (child,) = node.children.values()
        child.edge = np.concatenate([node.edge, child.edge])
        child.parent = node.parent
        node.parent.children[int(child.edge[0])] = child
