"""Runs all benchmarks, one after the other, and writes the last JSON line of each to `benchmarks/results/`.

    python benchmarks/all.py [--quick] [--only agents,server]

`BENCHMARKS` has the approximate duration of each on two idle cores. Quick runs write no results: they only detect large
regressions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS_DIRECTORY = Path(__file__).parent
RESULTS_DIRECTORY = BENCHMARKS_DIRECTORY / "results"
# Seconds of a full run and of a quick run.
BENCHMARKS = {
    "engine": (120, 40),
    "deterministic": (50, 15),
    "speculation": (260, 45),
    "server": (195, 40),
    "memory": (235, 60),
    "images": (30, 25),
    "priority": (60, 25),
    "busy": (300, 75),
    "token_path": (40, 15),
    "swap": (400, 60),
    "embeddings": (240, 40),
    "padding": (50, 20),
    "agents": (2470, 75),
}


@dataclass
class BenchmarkRun:
    """Outcome of one benchmark."""

    name: str
    exit_code: int
    seconds: float
    result: dict[str, object] | None  # its last line


def run_benchmark(name: str, arguments: list[str]) -> BenchmarkRun:
    """Run one benchmark and print its output. Its last line is its result."""
    print(f"\n== {name} (about {BENCHMARKS[name]['--quick' in arguments]} s)", flush=True)
    started, last = time.perf_counter(), ""
    command = [sys.executable, str(BENCHMARKS_DIRECTORY / f"{name}.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                print(line, end="", flush=True)
            last = line
    return BenchmarkRun(name, process.returncode, time.perf_counter() - started, parse_result(last))


def parse_result(line: str) -> dict[str, object] | None:
    """Parse a line as a JSON object. Return None if it is anything else.

    >>> parse_result('{"a": 1}'), parse_result("MISSED")
    ({'a': 1}, None)
    """
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def write_result(run: BenchmarkRun) -> None:
    """Write the result of a full run to its file."""
    if run.result is not None:
        RESULTS_DIRECTORY.mkdir(exist_ok=True)
        (RESULTS_DIRECTORY / f"{run.name}.json").write_text(json.dumps(run.result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less work, wider bars of times, ten minutes")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="names of benchmarks, e.g. agents,server")
    arguments = parser.parse_args()
    runs = []
    for name in arguments.only.split(","):
        runs.append(run_benchmark(name, ["--quick"] if arguments.quick else []))
        if not arguments.quick:
            write_result(runs[-1])
    print()
    for run in runs:
        verdict = "ok" if run.exit_code == 0 else "MISSED A BAR" if run.result else "FAILED"
        print(f"{run.name:14} {run.seconds:6.0f} s  {verdict}")
    summary = {run.name: {"passed": run.exit_code == 0, "seconds": round(run.seconds, 1)} for run in runs}
    print(json.dumps({"benchmark": "all", "quick": arguments.quick, "runs": summary}))
    return 0 if all(run.exit_code == 0 for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
