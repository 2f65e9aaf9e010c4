"""Compares the memory that fit estimates for a model with what llama.cpp allocates, for each device.

    python benchmarks/fit.py MODEL.gguf [--context 32768] [--sequences 4] [--gpu-layers -1] [--unified]

Prints each buffer in MiB and the ratio of the estimate to the measurement; exits with 1 if the total is off by more
than 5 %. The options that are not given are those that fit chooses. Run it once per process: the log of llama.cpp is
the measurement.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

from afterglow.api.load import plan_load, read_facts
from afterglow.api.options import LoadOptions, build_context_settings, build_model_settings, check_options
from afterglow.cli.fit import iter_rows
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel

MIB = 1024**2
MAX_ERROR = 0.05
BUFFER = re.compile(r"(\S+) +(model|KV|RS|compute|output) buffer size = +([0-9.]+) MiB")
HOST_BUFFERS = re.compile(r"CPU|Host")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name in ("context", "sequences", "gpu-layers", "cpu-moe-layers", "batch", "ubatch"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--cache-type")
    parser.add_argument("--unified", action="store_true", default=None)
    arguments = parser.parse_args()
    names = ("context", "sequences", "gpu_layers", "cpu_moe_layers", "batch", "ubatch")
    given = {name: getattr(arguments, name) for name in names}
    given |= dict.fromkeys(("cache_type_k", "cache_type_v"), arguments.cache_type) | {"kv_unified": arguments.unified}
    options = check_options(LoadOptions, {name: value for name, value in given.items() if value is not None})
    plan = plan_load(arguments.model, options, EngineSettings())
    for row in iter_rows(plan):
        print("\t".join(row))
    options = cast(LoadOptions, {**options, **plan.options})
    settings, model_settings = build_context_settings(options), build_model_settings(options)
    facts = read_facts(arguments.model)
    layers = model_settings.gpu_layers if plan.memory.gpu_bytes else 0
    ram, gpu = facts.estimate_devices(settings, gpu_layers=layers, cpu_moe_layers=model_settings.cpu_moe_layers)
    gpu = replace(gpu, compute_bytes=gpu.compute_bytes * max(1, len(plan.memory.gpu_bytes)))
    measured = measure(arguments.model, options)
    estimated = {
        f"{device} {kind}": nbytes / MIB
        for device, footprint in (("RAM", ram), ("GPU", gpu))
        for kind, nbytes in {
            "model": footprint.weight_bytes, "KV": footprint.kv_cache_bytes, "RS": footprint.recurrent_bytes,
            "compute": footprint.compute_bytes,
        }.items()
    }  # fmt: skip
    result = {"model": arguments.model.name}
    for device in ("RAM", "GPU"):
        keys = [f"{device} {kind}" for kind in ("model", "KV", "RS", "compute")]
        for key in keys:
            print(f"{key:12} estimated {estimated[key]:10.1f} MiB  measured {measured.get(key, 0.0):10.1f} MiB")
        total = sum(measured.get(key, 0.0) for key in keys)
        ratio = sum(estimated[key] for key in keys) / total if total else None
        print(f"{device}: estimated / measured {'-' if ratio is None else f'{ratio:.3f}'}")
        result[device] = ratio
    print(json.dumps(result))
    checked = [result["GPU"]] if result["GPU"] is not None else [result["RAM"]]
    return int(any(abs(ratio - 1) > MAX_ERROR for ratio in checked))


def measure(path: Path, options: LoadOptions) -> dict[str, float]:
    """Load the model and return the MiB of each kind of buffer by device, from the log of llama.cpp."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("afterglow.llama.cpp")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    with (
        LlamaModel.load(path, build_model_settings(options)) as model,
        LlamaContext(model, build_context_settings(options)),
    ):
        pass
    measured: dict[str, float] = {}
    for device, kind, number in BUFFER.findall("\n".join(lines)):
        key = f"{'RAM' if HOST_BUFFERS.search(device) else 'GPU'} {kind}"
        measured[key] = measured.get(key, 0.0) + float(number)
    return measured


if __name__ == "__main__":
    sys.exit(main())
