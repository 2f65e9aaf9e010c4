"""Calibration at load: measures decodes of several rows, so that draft lengths can be chosen from the first request."""

from __future__ import annotations

import time

from afterglow.engine.kvcache.cost_model import StepCosts
from afterglow.engine.types.backend import Backend, DecodeSpan
from afterglow.engine.types.settings import MAX_DRAFT_TOKENS
from afterglow.errors import AfterglowError

# From the end of the first decode, which may have to read the weights from disk. Row counts that are not measured by
# then are learned from speculative decodes.
MAX_CALIBRATION_SECONDS = 0.25
DECODES_PER_ROW_COUNT = 4  # the first one warms up
ROW_COUNTS = (1, 2, 3, 5, 9, MAX_DRAFT_TOKENS + 1)


def calibrate(backend: Backend, step_costs: StepCosts, max_seconds: float = MAX_CALIBRATION_SECONDS) -> None:
    """Time decodes of increasing row counts, at least the smallest, in the empty sequence 0, and clear it."""
    deadline = None
    capabilities = backend.capabilities
    max_rows = min(capabilities.max_outputs, capabilities.batch_cells, capabilities.cells_per_sequence // 8)
    position = 0
    try:
        for rows in [rows for rows in ROW_COUNTS if rows <= max_rows]:
            for _ in range(DECODES_PER_ROW_COUNT):
                if position + rows > capabilities.cells_per_sequence:
                    return
                started = time.perf_counter()
                backend.decode([DecodeSpan(0, [0] * rows, position, rows)])
                backend.get_logits(0, rows - 1)
                step_costs.record(rows, time.perf_counter() - started)
                position += rows
                if deadline is None:
                    deadline = time.perf_counter() + max_seconds
                elif time.perf_counter() > deadline:
                    return
    except AfterglowError:
        return  # calibration is optional
    finally:
        backend.clear(0)
