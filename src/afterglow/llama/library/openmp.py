"""Limits how long idle OpenMP threads of llama.cpp spin.

The threads of a decode meet at a barrier after every graph node and spin there, by default for milliseconds. If one of
them shares its core with another process, the others spin through their time slices, hundreds of times per decode:
on two cores beside two busy processes a token of SmolLM2 took up to 3 s. With a short spin the threads sleep instead:
20 to 115 ms, and no measurable cost on an idle machine (benchmarks/LOG.md).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

SPIN_COUNT = "1000"  # 100 doubles the time of a decode on an idle machine, 10000 is five times slower on a busy one
USER_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@contextlib.contextmanager
def limit_spinning() -> Iterator[None]:
    """Set the spin count while the library is opened, unless the user chose a wait policy.

    libgomp reads its environment once, when it is loaded, so the variable is removed afterwards.
    """
    if any(name in os.environ for name in USER_SETTINGS):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    try:
        yield
    finally:
        os.environ.pop("GOMP_SPINCOUNT", None)
