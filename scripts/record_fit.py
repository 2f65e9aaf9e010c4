"""Records what fit chooses for twelve model shapes on six machines, in tests/data/fit.json.

    python scripts/record_fit.py

A test compares the plans with this file. Review its diff after a change of `api/fit.py` or of the memory estimate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from afterglow.api.fit import Companions, plan_fit
from afterglow.api.options import LoadOptions, check_options
from afterglow.errors import OutOfMemory
from afterglow.llama.gguf.footprint import ModelFacts
from afterglow.llama.library.devices import MachineMemory

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from support.model_shapes import MEMORY_SIZES, PROJECTOR_BYTES, build_shapes  # noqa: E402

TARGET = TESTS / "data" / "fit.json"


def record_plans() -> dict[str, dict[str, Any]]:
    """Return the plan of each shape for each memory size, or why it does not fit."""
    options = check_options(LoadOptions, {"threads": 1})
    plans: dict[str, dict[str, Any]] = {}
    for name, header in build_shapes().items():
        facts, companions = ModelFacts([header]), Companions(projector_bytes=PROJECTOR_BYTES.get(name, 0))
        plans[name] = {}
        for size, (ram, gpus) in MEMORY_SIZES.items():
            try:
                plan = plan_fit(facts, options, MachineMemory(ram_bytes=ram, gpu_bytes=gpus), companions)
            except OutOfMemory as error:
                plans[name][size] = str(error)
            else:
                plans[name][size] = {**plan.options, "ram_bytes": plan.ram_bytes, "gpu_bytes": plan.gpu_bytes}
    return plans


if __name__ == "__main__":
    TARGET.write_text(json.dumps(record_plans(), indent=1) + "\n")
