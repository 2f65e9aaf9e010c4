"""A radix tree over entries: which sequences and checkpoints share how much with a prompt. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from afterglow.engine.entries import Ids, common_prefix

A = TypeVar("A", bound=Hashable)


class Node(Generic[A]):
    """A stretch of entries after its parent's. `depth` is where it ends, counted from the root."""

    __slots__ = ("anchors", "children", "count", "depth", "edge", "parent")

    def __init__(self, edge: Ids, parent: Node[A] | None) -> None:
        self.edge = edge
        self.parent = parent
        self.depth: int = len(edge) + (parent.depth if parent else 0)
        self.children: dict[int, Node[A]] = {}
        self.anchors: list[A] = []
        self.count = 0  # anchors here and below


@dataclass(frozen=True, slots=True)
class Match(Generic[A]):
    """How far a prompt runs along the tree: the nodes it touches, from the root, and `length` shared entries."""

    path: tuple[Node[A], ...]
    length: int


class PrefixTree(Generic[A]):
    """Anchors at the ends of paths. A match may end inside an edge. Every salt has a tree of its own.

    >>> tree = PrefixTree()
    >>> tree.insert(np.array([1, 2, 3, 4]), "conversation")
    >>> tree.nearest(tree.match(np.array([1, 2, 9])), limit=4)
    [('conversation', 2)]
    """

    def __init__(self) -> None:
        self._roots: dict[str, Node[A]] = {}
        self._nodes: dict[A, Node[A]] = {}

    def __contains__(self, anchor: A) -> bool:
        return anchor in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def root(self, salt: str = "") -> Node[A]:
        """Where the tree of a salt begins."""
        return self._roots.get(salt) or Node(np.zeros(0, dtype=np.int64), None)

    def insert(self, ids: Ids, anchor: A, salt: str = "") -> None:
        """Put `anchor` where `ids` end; an anchor that is somewhere else moves."""
        if anchor in self._nodes:
            self.remove(anchor)
        node, depth = self._roots.setdefault(salt, self.root(salt)), 0
        while depth < len(ids):
            child = node.children.get(int(ids[depth]))
            if child is None:
                child = Node(ids[depth:].copy(), node)
                node.children[int(ids[depth])] = child
            else:
                same = common_prefix(child.edge, ids[depth:])
                if same < len(child.edge):
                    child = self._split(child, same)
            node, depth = child, child.depth
        node.anchors.append(anchor)
        self._nodes[anchor] = node
        self._count(node, 1)

    def remove(self, anchor: A) -> None:
        """Take `anchor` away, and every branch that leads nowhere without it."""
        node = self._nodes.pop(anchor)
        node.anchors.remove(anchor)
        self._count(node, -1)
        while node.parent is not None and not node.anchors and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is not None and not node.anchors and len(node.children) == 1:
            self._join(node)
        if not node.count and node.parent is None:  # nothing of its salt is left
            self._roots = {salt: root for salt, root in self._roots.items() if root is not node}

    def match(self, ids: Ids, salt: str = "") -> Match[A]:
        """The path of `ids` through the tree."""
        node, length = self.root(salt), 0
        path = [node]
        while length < len(ids):
            child = node.children.get(int(ids[length]))
            if child is None:
                break
            same = common_prefix(child.edge, ids[length:])
            length += same
            path.append(child)
            if same < len(child.edge):
                break
            node = child
        return Match(tuple(path), length)

    def nearest(self, match: Match[A], limit: int) -> list[tuple[A, int]]:
        """Anchors that share most with the matched prompt, and how many entries, at most `limit` of them."""
        found: list[tuple[A, int]] = []
        seen: Node[A] | None = None
        for node in reversed(match.path):
            shared = min(node.depth, match.length)
            for anchor in self._below(node, seen):
                if len(found) == limit:
                    return found
                found.append((anchor, shared))
            seen = node
        return found

    def unique(self, anchor: A) -> int:
        """How many of the last entries on the way to `anchor` lead to no other."""
        node: Node[A] | None = self._nodes[anchor]
        end = self._nodes[anchor].depth
        while node is not None and node.count == 1:
            node = node.parent
        return end - (node.depth if node is not None else 0)

    def along(self, match: Match[A]) -> Iterator[A]:
        """The anchors that the prompt runs through, deepest first."""
        for node in reversed(match.path):
            if node.depth <= match.length:
                yield from node.anchors

    def below(self, anchor: A) -> list[A]:
        """Every anchor whose way runs through that of `anchor`, itself included."""
        return list(self._below(self._nodes[anchor], None))

    def above(self, anchor: A) -> Iterator[A]:
        """Every anchor on the way to `anchor`, itself included, deepest first."""
        node: Node[A] | None = self._nodes[anchor]
        while node is not None:
            yield from node.anchors
            node = node.parent

    def _below(self, top: Node[A], without: Node[A] | None) -> Iterator[A]:
        """Every anchor at or below a node, but for one branch."""
        waiting = [top]
        while waiting:
            node = waiting.pop()
            if node is not without:
                yield from node.anchors
                waiting += node.children.values()

    def _count(self, node: Node[A] | None, change: int) -> None:
        while node is not None:
            node.count += change
            node = node.parent

    def _split(self, node: Node[A], at: int) -> Node[A]:
        """Cut an edge in two; the upper part is the new node."""
        assert node.parent is not None
        upper: Node[A] = Node(node.edge[:at], node.parent)
        upper.count = node.count
        node.parent.children[int(node.edge[0])] = upper
        node.edge, node.parent = node.edge[at:], upper
        upper.children[int(node.edge[0])] = node
        return upper

    def _join(self, node: Node[A]) -> None:
        """Make one edge of a node that only leads on and the one it leads to."""
        assert node.parent is not None
        (child,) = node.children.values()
        child.edge = np.concatenate([node.edge, child.edge])
        child.parent = node.parent
        node.parent.children[int(child.edge[0])] = child
