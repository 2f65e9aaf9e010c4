"""Start of `afterglow run` until the first token, with SmolLM2 and everything cached that a first run caches.

Prints the time from the start of the process to its first byte of output, and the processor time of the process and
its children until they end, which other work on the machine hardly changes. `--against` alternates with another tree.

    python benchmarks/start.py [--runs N] [--against FOLDER]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from report import Row, print_report

from afterglow import registry

SOURCE = Path(__file__).resolve().parents[1] / "src"
MAX_SECONDS = 1.0
COMMAND = ("-m", "afterglow.cli.main", "run", "--model", "smollm2", "--max-tokens", "1", "Hello")


def start_once(source: Path) -> tuple[float, float]:
    """Run the command once; return the seconds to the first byte of output and the processor seconds."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = get_processor_seconds()
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *COMMAND], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    if not process.stdout.read(1):
        raise SystemExit(f"{' '.join(COMMAND)} wrote nothing")
    seconds = time.perf_counter() - start
    process.stdout.read()
    process.wait()
    return seconds, get_processor_seconds() - before


def get_processor_seconds() -> float:
    """Return the user and system time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def describe(values: Sequence[float]) -> str:
    """Return the spread of some seconds."""
    return f"{min(values):.3f} to {max(values):.3f} in {len(values)} runs"


def main() -> int:
    """Measure and report; return 1 if the median is beyond the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--against", type=Path, default=None, help="repository with another version")
    options = parser.parse_args()
    registry.pull("smollm2")
    sources = [SOURCE] if options.against is None else [SOURCE, options.against / "src"]
    runs: dict[Path, list[tuple[float, float]]] = {source: [] for source in sources}
    for round_number in range(options.runs + 1):
        for source in sources:
            result = start_once(source)
            if round_number > 0:  # the first one fills the caches
                runs[source].append(result)
    rows = []
    for source in sources:
        first_token, processor = zip(*runs[source], strict=True)
        name, bar = ("this version", MAX_SECONDS) if source == SOURCE else ("the other version", None)
        rows += [
            Row(f"{name}: first token", statistics.median(first_token), "s", bar=bar, note=describe(first_token)),
            Row(f"{name}: processor time", statistics.median(processor), "s", note=describe(processor)),
        ]
    return print_report("start", rows)


if __name__ == "__main__":
    sys.exit(main())
