"""From `benchmarks/results/agents.json` to what people read: the table in README.md and the plots of docs/speed.md.

    python benchmarks/results.py [--no-plots]

The table stands between two comments and is written anew. Plots are SVG, one for each workload; they need matplotlib
(the dependency group `bench`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "speed"
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
NAMES = {"smollm2": "SmolLM2 135M (attention)", "hybrid": "109M hybrid"}
# What a workload is judged by: the measure, and its words. All are seconds.
SHOWN = dict.fromkeys("abcdhij", ("total", "all of it")) | {
    "e": ("first_after_restart", "first token after the restart"),
    "f": ("gap_largest", "largest gap of the streams"),
    "g": ("free", "first token of the other"),
}
OURS, THEIRS = "afterglow", "llama-server"


def table(results: dict[str, Any]) -> str:
    """The table with its conditions, as Markdown."""
    lines = [
        "| workload | model | seconds | afterglow | llama-server | ratio | tokens computed / needed: ours, theirs |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [row_of(row) for row in results["rows"] if "skipped" not in row]
    pairs = sorted({row["pairs"] for row in results["rows"] if "pairs" in row})
    runs = " to ".join(str(pairs[end]) for end in ([0, -1] if len(pairs) > 1 else [0]))
    conditions = (
        f"Medians of {runs} alternating runs, {results['threads']} threads, {results['processor']}, "
        f"{results['date']}, llama.cpp {str(results['build']).split()[0]}. `make bench` measures it, "
        "`make bench-pages` writes this table."
    )
    return "\n".join([*lines, "", conditions])


def row_of(row: dict[str, Any]) -> str:
    """One line of the table."""
    measure, words = SHOWN[row["workload"]]
    ours, theirs = row["medians"][OURS], row["medians"][THEIRS]
    ratio = ours[measure] / theirs[measure] if theirs[measure] else float("inf")
    values = f"{words} | {ours[measure]:.2f} | {theirs[measure]:.2f} | {ratio:.2f}"
    tokens = f"{ours['excess']:.2f}, {theirs['excess']:.2f}"
    return f"| ({row['workload']}) {row['name']} | {NAMES[row['model']]} | {values} | {tokens} |"


def between(text: str, table: str) -> str:
    """A page with what stands between the two comments replaced.

    >>> between(f"a {BEGIN} old {END} b", "new")
    'a <!-- speed: begin -->\\nnew\\n<!-- speed: end --> b'
    """
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"the page has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def plots(results: dict[str, Any]) -> list[Path]:
    """One picture for each workload: what it is judged by, and tokens computed, of both servers on both models."""
    import matplotlib  # only here: nothing else needs it

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "afterglow"  # the same numbers give the same file
    from matplotlib import pyplot

    PLOTS.mkdir(exist_ok=True)
    written = []
    letters = dict.fromkeys(row["workload"] for row in results["rows"] if "skipped" not in row)
    for letter in letters:
        rows = [row for row in results["rows"] if row["workload"] == letter and "skipped" not in row]
        measure, words = SHOWN[letter]
        figure, (times, tokens) = pyplot.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
        bars(times, rows, measure, f"seconds: {words}")
        bars(tokens, rows, "computed", "tokens computed (line: needed)")
        for place, row in enumerate(rows):
            tokens.hlines(row["medians"][OURS]["needed"], place - 0.4, place + 0.4, color="black", linewidth=1)
        figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
        figure.suptitle(f"({letter}) {rows[0]['name']}", fontsize="medium")
        written.append(PLOTS / f"{letter}.svg")
        figure.savefig(written[-1], metadata={"Date": None})
        pyplot.close(figure)
    return written


def bars(axes: Any, rows: list[dict[str, Any]], measure: str, label: str) -> None:
    """Both servers side by side, a group for each model."""
    for offset, peer in ((-0.2, OURS), (0.2, THEIRS)):
        places = [place + offset for place in range(len(rows))]
        axes.bar(places, [row["medians"][peer][measure] for row in rows], width=0.38, label=peer)
    axes.set_xticks(range(len(rows)), [NAMES[row["model"]] for row in rows], fontsize="small")
    axes.set_title(label, fontsize="small")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-plots", action="store_true", help="only the table")
    chosen = parser.parse_args()
    results = json.loads((RESULTS / "agents.json").read_text())
    readme = ROOT / "README.md"
    readme.write_text(between(readme.read_text(), table(results)))
    print(f"wrote the table of {readme.relative_to(ROOT)}")
    if not chosen.no_plots:
        for path in plots(results):
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
