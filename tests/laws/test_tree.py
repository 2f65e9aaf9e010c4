"""Law of the prefix tree: after any operations it equals the truth computed from slots, blocks and checkpoints."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from afterglow.engine.inspect import tree
from laws.test_state_machine import MODERATE, EngineMachine, clock
from support.play import KINDS
from support.tree_truth import check_tree

pytestmark = pytest.mark.slow

NODES: Counter[str] = Counter()  # nodes compared, by memory kind
FEW = settings(MODERATE, max_examples=12)

__all__ = ["clock"]


class TreeMachine(EngineMachine):
    """Compares the trees of both salts after every rule."""

    def check_engine(self) -> None:
        """The other laws check the engine."""

    @invariant()
    def trees_equal_the_truth(self):
        if hasattr(self, "engine"):
            for salt in ("", "mine"):
                NODES[self.kind] += check_tree(self.engine, salt)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_equals_the_truth_after_random_operations(kind, clock, monkeypatch):
    monkeypatch.setattr(tree, "time", clock)
    NODES.clear()
    run_state_machine_as_test(lambda: TreeMachine(kind, False, clock), settings=FEW)
    assert NODES[kind] > 500, "hardly any node was compared"
