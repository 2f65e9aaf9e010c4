"""What decodes of several rows take, measured before anybody asks: guessing ahead is judged by it from the start."""

from __future__ import annotations

import time

from afterglow.engine.kvcache.cost_model import StepCosts
from afterglow.engine.types.backend import Backend, DecodeSpan
from afterglow.engine.types.settings import MAX_DRAFT_TOKENS
from afterglow.errors import AfterglowError

MAX_CALIBRATION_SECONDS = 0.25  # that it may take; what is not measured then is learned from guesses
DECODES_PER_ROW_COUNT = 4  # decodes of each number of rows, the first of which only prepares the others
ROW_COUNTS = (1, 2, 3, 5, 9, MAX_DRAFT_TOKENS + 1)


def calibrate(backend: Backend, step_costs: StepCosts, max_seconds: float = MAX_CALIBRATION_SECONDS) -> None:
    """Decode a few rows, then more, in a sequence that is empty and is so afterwards."""
    deadline = time.perf_counter() + max_seconds
    most = min(
        backend.capabilities.max_outputs, backend.capabilities.batch_cells, backend.capabilities.cells_per_sequence // 8
    )
    position = 0
    try:
        for rows in [rows for rows in ROW_COUNTS if rows <= most]:
            for _ in range(DECODES_PER_ROW_COUNT):
                if time.perf_counter() > deadline or position + rows > backend.capabilities.cells_per_sequence:
                    return
                step_costs.record(rows, _time_decode(backend, rows, position))
                position += rows
    except AfterglowError:
        return  # it is only a guess about guesses
    finally:
        backend.clear(0)


def _time_decode(backend: Backend, rows: int, position: int) -> float:
    started = time.perf_counter()
    backend.decode([DecodeSpan(0, [0] * rows, position, rows)])
    backend.get_logits(0, rows - 1)
    return time.perf_counter() - started
