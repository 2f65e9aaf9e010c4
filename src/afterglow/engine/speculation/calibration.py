"""Calibration at load: measures decodes, a prefill and a transfer, so that plans and draft lengths are right at once.

The results are stored per model and settings, so that only the first load takes this time.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from afterglow.engine.kvcache.cost_model import CostModel, StepCosts
from afterglow.engine.types.backend import Backend, DecodeSpan
from afterglow.engine.types.settings import MAX_DRAFT_TOKENS
from afterglow.errors import AfterglowError
from afterglow.llama.atomic_write import write_atomically

# From the end of the first decode, which may have to read the weights from disk. Row counts that are not measured by
# then are learned from speculative decodes.
MAX_CALIBRATION_SECONDS = 0.25
MAX_PREFILL_CALIBRATION_SECONDS = 0.05  # from the end of the first decode
MAX_PREFILL_ROWS = 2048  # on a GPU, the transfer of more would take longer than their prefill
# A GPU prepares its kernels for large batches in the first such decode, for a tenth of a second. If a decode of few
# rows is shorter than the limit, a decode of many is run twice, and the second is measured.
GPU_ROWS = 512
GPU_CALIBRATION_SECONDS = 0.15  # from the end of the first decode of that many
MAX_GPU_STEP_SECONDS = 0.03
MIN_GROWTH = 4  # of a prefill over the one before it, for which it is measured
DECODES_PER_ROW_COUNT = 4  # the first one warms up
MAX_AGE_SECONDS = 7 * 86400.0  # of stored measurements
ROW_COUNTS = (1, 2, 3, 5, 9, MAX_DRAFT_TOKENS + 1)


def load_step_costs(path: Path, step_costs: StepCosts) -> bool:
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
    _write_json(path, step_costs.list_samples())


def load_costs(path: Path, cost_model: CostModel) -> bool:
    """Add the costs of prefill and transfers of an earlier engine. Returns False if there are none, or too old ones."""
    try:
        if time.time() - path.stat().st_mtime > MAX_AGE_SECONDS:
            return False
        cost_model.add_stored(json.loads(path.read_text()))
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return False
    return True


def store_costs(path: Path, cost_model: CostModel) -> None:
    """Keep the costs of prefill and transfers for the next load with the same settings."""
    _write_json(path, cost_model.to_dict())


def _write_json(path: Path, values: object) -> None:
    with contextlib.suppress(OSError):  # they are measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [json.dumps(values).encode()])


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


def calibrate_prefill(
    backend: Backend, cost_model: CostModel, max_seconds: float = MAX_PREFILL_CALIBRATION_SECONDS
) -> None:
    """Time prefills of increasing length in the empty sequence 0, then the transfer of its state, and clear it."""
    capabilities = backend.capabilities
    largest = min(capabilities.batch_cells, capabilities.cells_per_sequence // 2, MAX_PREFILL_ROWS)
    position = 0

    def time_decode(rows: int) -> float:
        nonlocal position
        started = time.perf_counter()
        backend.decode([DecodeSpan(0, [0] * rows, position, 1)])
        backend.get_logits(0, rows - 1)
        position += rows
        return time.perf_counter() - started

    try:
        time_decode(1)  # the first decode prepares the later ones
        deadline = time.perf_counter() + max_seconds
        rows = min(2, largest)
        while rows and position + rows <= capabilities.cells_per_sequence:
            seconds = time_decode(rows)
            cost_model.record_prefill(rows, seconds)
            if not capabilities.interruptible and rows < GPU_ROWS <= largest and seconds < MAX_GPU_STEP_SECONDS:
                time_decode(GPU_ROWS)
                deadline, rows = time.perf_counter() + GPU_CALIBRATION_SECONDS, GPU_ROWS
                continue
            affordable = min(largest, int(rows * max(0.0, deadline - time.perf_counter()) / max(seconds, 1e-9)))
            rows = affordable if affordable >= MIN_GROWTH * rows else 0
        started = time.perf_counter()
        state = backend.save(0, "full")
        cost_model.record_transfer(state.nbytes, time.perf_counter() - started, position)
        partial_bytes = backend.get_state_size(0, "partial") if capabilities.has_partial_state else 0
        cost_model.cell_bytes_per_entry = max(0, state.nbytes - partial_bytes) / position
    except AfterglowError:
        return  # calibration is optional
    finally:
        backend.clear(0)
