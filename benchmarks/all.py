"""Every benchmark, one after the other; the last JSON line of each is kept in `benchmarks/results/`.

    python benchmarks/all.py [--quick] [--only agents,server]

About how long each takes on two idle cores, in seconds, is in `BENCHMARKS`. A quick run keeps nothing: its numbers say
that nothing is badly wrong, and no more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
# Seconds: in full, and quick.
BENCHMARKS = {
    "engine": (120, 40),
    "deterministic": (50, 15),
    "speculation": (260, 45),
    "server": (195, 40),
    "memory": (235, 60),
    "images": (30, 25),
    "agents": (2470, 75),
}


@dataclass
class Ran:
    """How one benchmark went."""

    name: str
    code: int
    seconds: float
    numbers: dict[str, object] | None  # its last line


def run(name: str, arguments: list[str]) -> Ran:
    """Run one file, showing what it writes; its last line is its result."""
    print(f"\n== {name} (about {BENCHMARKS[name]['--quick' in arguments]} s)", flush=True)
    started, last = time.perf_counter(), ""
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                print(line, end="", flush=True)
            last = line
    return Ran(name, process.returncode, time.perf_counter() - started, numbers_in(last))


def numbers_in(line: str) -> dict[str, object] | None:
    """A line of JSON as its value, None where it is something else.

    >>> numbers_in('{"a": 1}'), numbers_in("MISSED")
    ({'a': 1}, None)
    """
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def keep(ran: Ran) -> None:
    """Write the numbers of a full run to their file."""
    if ran.numbers is not None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{ran.name}.json").write_text(json.dumps(ran.numbers, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less work, the same checks, under five minutes")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="names, such as agents,server")
    chosen = parser.parse_args()
    runs = []
    for name in chosen.only.split(","):
        runs.append(run(name, ["--quick"] if chosen.quick else []))
        if not chosen.quick:
            keep(runs[-1])
    print()
    for ran in runs:
        verdict = "ok" if ran.code == 0 else "MISSED A BAR" if ran.numbers else "FAILED"
        print(f"{ran.name:14} {ran.seconds:6.0f} s  {verdict}")
    summary = {ran.name: {"passed": ran.code == 0, "seconds": round(ran.seconds, 1)} for ran in runs}
    print(json.dumps({"benchmark": "all", "quick": chosen.quick, "runs": summary}))
    return 0 if all(ran.code == 0 for ran in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
