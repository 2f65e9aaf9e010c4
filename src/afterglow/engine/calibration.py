"""What decodes of several rows take, measured before anybody asks: guessing ahead is judged by it from the start."""

from __future__ import annotations

import time

from afterglow.engine.backend import Backend, Span
from afterglow.engine.costs import StepCosts
from afterglow.engine.speculation import LONGEST
from afterglow.errors import AfterglowError

SECONDS = 0.25  # that it may take; what is not measured then is learned from guesses
TIMES = 4  # decodes of each number of rows, the first of which only prepares the others
ROWS = (1, 2, 3, 5, 9, LONGEST + 1)


def calibrate(backend: Backend, steps: StepCosts, seconds: float = SECONDS) -> None:
    """Decode a few rows, then more, in a sequence that is empty and is so afterwards."""
    deadline = time.perf_counter() + seconds
    most = min(backend.capabilities.outputs, backend.capabilities.batch_cells, backend.capabilities.cells // 8)
    position = 0
    try:
        for rows in [rows for rows in ROWS if rows <= most]:
            for _ in range(TIMES):
                if time.perf_counter() > deadline or position + rows > backend.capabilities.cells:
                    return
                steps.measured(rows, _decode(backend, rows, position))
                position += rows
    except AfterglowError:
        return  # it is only a guess about guesses
    finally:
        backend.clear(0)


def _decode(backend: Backend, rows: int, position: int) -> float:
    started = time.perf_counter()
    backend.decode([Span(0, [0] * rows, position, rows)])
    backend.logits(0, rows - 1)
    return time.perf_counter() - started
