"""Times, and what share of another they are: the table that `memory.py` and `images.py` print."""

from __future__ import annotations

import json
from dataclasses import dataclass

from afterglow.llama.library.loader import get_library


@dataclass
class Row:
    """A measurement. The bar is for its share of another one, or for itself where it is none."""

    name: str
    value: float
    unit: str
    share: float | None = None
    bar: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.bar is None or (self.value if self.share is None else self.share) <= self.bar


def report(benchmark: str, rows: list[Row]) -> int:
    """Print the rows, then one line of JSON; the exit code."""
    for row in rows:
        share = "" if row.share is None else f"{row.share:7.1%}"
        bar = "" if row.bar is None else f"<= {row.bar:.0%}"
        mark = "" if row.bar is None else "ok" if row.passed else "MISSED"
        print(f"{row.name:45} {row.value:9.3f} {row.unit:5} {share:8} {bar:8} {mark:7} {row.note}")
    print(json.dumps({"benchmark": benchmark, "build": get_library().build, "rows": [vars(row) for row in rows]}))
    return 0 if all(row.passed for row in rows) else 1
