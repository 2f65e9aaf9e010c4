"""Test doubles for programs that use afterglow: docs/testing.md.

`FakeBackend` is an exact backend without a model, for tests of engines. `models` has tiny models for llama.cpp.
`script` lets a loaded model write given answers.

As in a real model, every computed entry depends on everything that was in the KV cache when it was computed: a wrong,
missing or duplicate cell changes the generated tokens.
"""

from __future__ import annotations

from afterglow.testing.backend import FakeBackend, FakeSampler
from afterglow.testing.memory import FakeCells, FakeKVCache
from afterglow.testing.projector import FakeProjector

__all__ = ["FakeBackend", "FakeCells", "FakeKVCache", "FakeProjector", "FakeSampler"]
