"""Calibration at load: measures decodes of several rows, so that draft lengths can be chosen from the first request."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from afterglow.engine.kvcache.cost_model import StepCosts
from afterglow.engine.types.backend import Backend, DecodeSpan
from afterglow.engine.types.settings import MAX_DRAFT_TOKENS
from afterglow.errors import AfterglowError

# From the end of the first decode, which may have to read the weights from disk. Row counts that are not measured by
# then are learned from speculative decodes.
MAX_CALIBRATION_SECONDS = 0.25
DECODES_PER_ROW_COUNT = 4  # the first one warms up
MAX_AGE_SECONDS = 7 * 86400.0  # of stored measurements
ROW_COUNTS = (1, 2, 3, 5, 9, MAX_DRAFT_TOKENS + 1)


def recall_step_costs(path: Path, step_costs: StepCosts) -> bool:
    """Add the measurements of an earlier calibration. Returns False if there are none, or if they are too old."""
    try:
        if time.time() - path.stat().st_mtime > MAX_AGE_SECONDS:
            return False
        samples = {
            int(rows): [float(value) for value in values] for rows, values in json.loads(path.read_text()).items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return False
    for rows, values in samples.items():
        for seconds in [0.0, *values]:  # the first one is not recorded: it stands for the decode that warms up
            step_costs.record(rows, seconds)
    return bool(samples)


def store_step_costs(path: Path, step_costs: StepCosts) -> None:
    """Keep the measurements for the next load with the same settings."""
    with contextlib.suppress(OSError):  # they are measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(step_costs.list_samples()))
        temporary.replace(path)


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
