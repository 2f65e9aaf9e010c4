"""`FakeBackend`: the engine's memory without a model, exact and unforgiving, for tests of engines and of programs.

Every computed entry depends on everything that memory held when it was computed, as in a real model: one wrong,
missing or doubled cell changes the tokens that come out.
"""

from __future__ import annotations

from afterglow.testing.backend import FakeBackend
from afterglow.testing.memory import FakeCells, FakeKVCache
from afterglow.testing.projector import FakeProjector
from afterglow.testing.sampler import FakeSampler

__all__ = ["FakeBackend", "FakeCells", "FakeKVCache", "FakeProjector", "FakeSampler"]
