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

    __slots__ = ("anchors", "children", "depth", "edge", "parent")

    def __init__(self, edge: Ids, parent: Node[A] | None) -> None:
        self.edge = edge
        self.parent = parent
        self.depth: int = len(edge) + (parent.depth if parent else 0)
        self.children: dict[int, Node[A]] = {}
        self.anchors: list[A] = []


@dataclass(frozen=True, slots=True)
class Match(Generic[A]):
    """How far a prompt runs along the tree: the nodes it touches, from the root, and `length` shared entries."""

    path: tuple[Node[A], ...]
    length: int


class PrefixTree(Generic[A]):
    """Anchors at the ends of paths. A match may end inside an edge.

    >>> tree = PrefixTree()
    >>> tree.insert(np.array([1, 2, 3, 4]), "conversation")
    >>> tree.shared("conversation", tree.match(np.array([1, 2, 9])))
    2
    """

    def __init__(self) -> None:
        self.root: Node[A] = Node(np.zeros(0, dtype=np.int64), None)
        self._nodes: dict[A, Node[A]] = {}

    def __contains__(self, anchor: A) -> bool:
        return anchor in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def insert(self, ids: Ids, anchor: A) -> None:
        """Put `anchor` where `ids` end; an anchor that is somewhere else moves."""
        if anchor in self._nodes:
            self.remove(anchor)
        node, depth = self.root, 0
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

    def remove(self, anchor: A) -> None:
        """Take `anchor` away, and every branch that leads nowhere without it."""
        node = self._nodes.pop(anchor)
        node.anchors.remove(anchor)
        while node.parent is not None and not node.anchors and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is not None and not node.anchors and len(node.children) == 1:
            self._join(node)

    def match(self, ids: Ids) -> Match[A]:
        """The path of `ids` through the tree."""
        node, length, path = self.root, 0, [self.root]
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

    def shared(self, anchor: A, match: Match[A]) -> int:
        """How many entries of the matched prompt lead to `anchor` too."""
        node: Node[A] | None = self._nodes[anchor]
        while node is not None:
            index = node.depth and next((i for i, one in enumerate(match.path) if one is node), 0)
            if index or node.parent is None:
                return min(match.path[index].depth, match.length)
            node = node.parent
        raise AssertionError("every node leads to the root")

    def along(self, match: Match[A]) -> Iterator[A]:
        """The anchors that the prompt runs through, deepest first."""
        for node in reversed(match.path):
            if node.depth <= match.length:
                yield from node.anchors

    def depth(self, anchor: A) -> int:
        return self._nodes[anchor].depth

    def below(self, anchor: A) -> Iterator[A]:
        """Every anchor whose path runs through that of `anchor`, itself included."""
        waiting = [self._nodes[anchor]]
        while waiting:
            node = waiting.pop()
            yield from node.anchors
            waiting += node.children.values()

    def above(self, anchor: A) -> Iterator[A]:
        """Every anchor on the way to `anchor`, itself included, deepest first."""
        node: Node[A] | None = self._nodes[anchor]
        while node is not None:
            yield from node.anchors
            node = node.parent

    def _split(self, node: Node[A], at: int) -> Node[A]:
        """Cut an edge in two; the upper part is the new node."""
        assert node.parent is not None
        upper: Node[A] = Node(node.edge[:at], node.parent)
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
