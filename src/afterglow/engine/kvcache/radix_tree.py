"""Radix tree over entries: finds the sequences and checkpoints that share a prefix with a prompt. Pure data."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from afterglow.engine.types.entries import Entries, common_prefix_length

AnchorT = TypeVar("AnchorT", bound=Hashable)


class RadixNode(Generic[AnchorT]):
    """Node with the entries on the edge from its parent. `depth` is the number of entries from the root to its end."""

    __slots__ = ("anchors", "children", "count", "depth", "edge", "parent")

    def __init__(self, edge: Entries, parent: RadixNode[AnchorT] | None) -> None:
        self.edge = edge
        self.parent = parent
        self.depth: int = len(edge) + (parent.depth if parent else 0)
        self.children: dict[int, RadixNode[AnchorT]] = {}
        self.anchors: list[AnchorT] = []
        self.count = 0  # anchors at this node and below


@dataclass(frozen=True, slots=True)
class PrefixMatch(Generic[AnchorT]):
    """Match of a prompt: the nodes on its path, from the root, and the `length` of the shared prefix."""

    path: tuple[RadixNode[AnchorT], ...]
    length: int


class RadixTree(Generic[AnchorT]):
    """Maps entries to anchors at the ends of paths. A match may end inside an edge. Each namespace has a separate tree.

    >>> tree: RadixTree[str] = RadixTree()
    >>> tree.insert(np.array([1, 2, 3, 4]), "conversation")
    >>> tree.find_nearest(tree.match(np.array([1, 2, 9])), limit=4)
    [('conversation', 2)]
    """

    def __init__(self) -> None:
        self._roots: dict[str, RadixNode[AnchorT]] = {}
        self._nodes: dict[AnchorT, RadixNode[AnchorT]] = {}

    def __contains__(self, anchor: AnchorT) -> bool:
        return anchor in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def get_root(self, namespace: str = "") -> RadixNode[AnchorT]:
        """Return the root of a namespace; a new empty one if the namespace has none."""
        return self._roots.get(namespace) or RadixNode(np.zeros(0, dtype=np.int64), None)

    def get_node(self, anchor: AnchorT) -> RadixNode[AnchorT]:
        """Return the node at the end of the path to `anchor`."""
        return self._nodes[anchor]

    def insert(self, entries: Entries, anchor: AnchorT, namespace: str = "") -> None:
        """Insert `anchor` at the end of `entries`; move it if it is already in the tree."""
        if anchor in self._nodes:
            self.remove(anchor)
        node, depth = self._roots.setdefault(namespace, self.get_root(namespace)), 0
        while depth < len(entries):
            child = node.children.get(int(entries[depth]))
            if child is None:
                child = RadixNode(entries[depth:].copy(), node)
                node.children[int(entries[depth])] = child
            else:
                shared = common_prefix_length(child.edge, entries[depth:])
                if shared < len(child.edge):
                    child = self._split(child, shared)
            node, depth = child, child.depth
        node.anchors.append(anchor)
        self._nodes[anchor] = node
        self._add_to_counts(node, 1)

    def remove(self, anchor: AnchorT) -> None:
        """Remove `anchor` and the branches that are empty without it."""
        node = self._nodes.pop(anchor)
        node.anchors.remove(anchor)
        self._add_to_counts(node, -1)
        while node.parent is not None and not node.anchors and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is not None and not node.anchors and len(node.children) == 1:
            self._merge_with_child(node)
        if not node.count and node.parent is None:  # the last anchor of its namespace
            self._roots = {namespace: root for namespace, root in self._roots.items() if root is not node}

    def match(self, entries: Entries, namespace: str = "") -> PrefixMatch[AnchorT]:
        """Return the path of `entries` through the tree."""
        node, length = self.get_root(namespace), 0
        path = [node]
        while length < len(entries):
            child = node.children.get(int(entries[length]))
            if child is None:
                break
            shared = common_prefix_length(child.edge, entries[length:])
            length += shared
            path.append(child)
            if shared < len(child.edge):
                break
            node = child
        return PrefixMatch(tuple(path), length)

    def find_nearest(self, match: PrefixMatch[AnchorT], limit: int) -> list[tuple[AnchorT, int]]:
        """Return up to `limit` anchors that share the longest prefix with the matched prompt, with its length."""
        nearest: list[tuple[AnchorT, int]] = []
        visited: RadixNode[AnchorT] | None = None
        for node in reversed(match.path):
            shared = min(node.depth, match.length)
            for anchor in self._iter_subtree(node, visited):
                if len(nearest) == limit:
                    return nearest
                nearest.append((anchor, shared))
            visited = node
        return nearest

    def count_unique_entries(self, anchor: AnchorT) -> int:
        """Return how many of the last entries on the path to `anchor` lead to no other anchor."""
        node: RadixNode[AnchorT] | None = self._nodes[anchor]
        end = self._nodes[anchor].depth
        while node is not None and node.count == 1:
            node = node.parent
        return end - (node.depth if node is not None else 0)

    def iter_anchors_on_path(self, match: PrefixMatch[AnchorT]) -> Iterator[AnchorT]:
        """Yield the anchors on the path of the matched prompt, deepest first."""
        for node in reversed(match.path):
            if node.depth <= match.length:
                yield from node.anchors

    def find_descendants(self, anchor: AnchorT) -> list[AnchorT]:
        """Return every anchor whose path includes that of `anchor`, itself included."""
        return list(self._iter_subtree(self._nodes[anchor], None))

    def iter_ancestors(self, anchor: AnchorT) -> Iterator[AnchorT]:
        """Yield every anchor on the path to `anchor`, itself included, deepest first."""
        node: RadixNode[AnchorT] | None = self._nodes[anchor]
        while node is not None:
            yield from node.anchors
            node = node.parent

    def _iter_subtree(self, top: RadixNode[AnchorT], excluded: RadixNode[AnchorT] | None) -> Iterator[AnchorT]:
        """Yield every anchor at or below a node, except those of one branch."""
        pending = [top]
        while pending:
            node = pending.pop()
            if node is not excluded:
                yield from node.anchors
                pending += node.children.values()

    def _add_to_counts(self, node: RadixNode[AnchorT] | None, change: int) -> None:
        while node is not None:
            node.count += change
            node = node.parent

    def _split(self, node: RadixNode[AnchorT], offset: int) -> RadixNode[AnchorT]:
        """Split the edge of a node; return the new node for its upper part."""
        assert node.parent is not None
        upper: RadixNode[AnchorT] = RadixNode(node.edge[:offset], node.parent)
        upper.count = node.count
        node.parent.children[int(node.edge[0])] = upper
        node.edge, node.parent = node.edge[offset:], upper
        upper.children[int(node.edge[0])] = node
        return upper

    def _merge_with_child(self, node: RadixNode[AnchorT]) -> None:
        """Merge a node without anchors into its only child."""
        assert node.parent is not None
        (child,) = node.children.values()
        child.edge = np.concatenate([node.edge, child.edge])
        child.parent = node.parent
        node.parent.children[int(child.edge[0])] = child
