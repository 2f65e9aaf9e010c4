"""Table of benchmarks that compare times with a reference time: rows, their shares and bars."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from afterglow.llama.library.loader import get_library


@dataclass
class Row:
    """One measurement. The bar applies to `share`, or to `value` if there is no share."""

    name: str
    value: float
    unit: str
    share: float | None = None  # of a reference measurement
    bar: float | None = None
    note: str = ""
    full: bool = False  # a quick run does not judge it

    @property
    def passed(self) -> bool:
        return self.bar is None or (self.value if self.share is None else self.share) <= self.bar


QUICK_TOLERANCE = 1.5  # factor on the time bars of quick runs: short runs are noisy


def print_report(benchmark: str, rows: list[Row], *, quick: bool = False) -> int:
    """Print the rows and one line of JSON. Return the exit code."""
    rows = [replace(row, bar=None) if quick and row.full else row for row in rows]
    for row in rows:
        share = "" if row.share is None else f"{row.share:7.1%}"
        bar = "" if row.bar is None else f"<= {row.bar:.0%}"
        verdict = "" if row.bar is None else "ok" if row.passed else "MISSED"
        print(f"{row.name:45} {row.value:9.3f} {row.unit:5} {share:8} {bar:8} {verdict:7} {row.note}")
    print(json.dumps({"benchmark": benchmark, "build": get_library().build, "rows": [vars(row) for row in rows]}))
    return 0 if all(row.passed for row in rows) else 1
