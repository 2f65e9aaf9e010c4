"""Writes the table of README.md and the plots of docs/speed.md from `benchmarks/results/agents.json`.

    python benchmarks/results.py [--no-plots]

The table replaces the text between two comments. Plots are SVG files, one per workload; they need matplotlib
(dependency group `bench`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from measures import IDEAL

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "speed"
TABLE_BEGIN, TABLE_END = "<!-- speed: begin -->", "<!-- speed: end -->"
MODEL_NAMES = {"smollm2": "SmolLM2 135M (attention)", "hybrid": "109M hybrid"}
# Main measure of each workload, in seconds, and its text.
MAIN_MEASURES = dict.fromkeys("abcdhijklm", ("total", "total")) | {
    "e": ("first_after_restart", "first token after restart"),
    "f": ("gap_largest", "largest token gap"),
    "g": ("free", "first token of the next request"),
}
AFTERGLOW, LLAMA_SERVER = "afterglow", "llama-server"


def format_table(results: dict[str, Any]) -> str:
    """Return the table and its conditions as Markdown."""
    tokens = "computed / needed tokens: afterglow, llama-server"
    lines = [
        f"| workload | model | seconds | afterglow | llama-server | ratio | ideal | {tokens} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [format_row(row) for row in results["rows"] if "skipped" not in row]
    pairs = sorted({row["pairs"] for row in results["rows"] if "pairs" in row})
    runs = " to ".join(str(pairs[end]) for end in ([0, -1] if len(pairs) > 1 else [0]))
    conditions = (
        f"Medians of {runs} alternating runs, {results['threads']} threads, {results['processor']}, "
        f"{results['date']}, llama.cpp {str(results['build']).split()[0]}. `make bench` measures it, "
        "`make bench-pages` writes this table. The ideal ratio is that of llama-server with a cache that computes only "
        "the needed tokens: measured in (b) to (e) and (m), estimated elsewhere."
    )
    return "\n".join([*lines, "", conditions])


def format_row(row: dict[str, Any]) -> str:
    """Return one row of the table."""
    measure, text = MAIN_MEASURES[row["workload"]]
    afterglow, llama_server = row["medians"][AFTERGLOW], row["medians"][LLAMA_SERVER]
    ratio = afterglow[measure] / llama_server[measure] if llama_server[measure] else float("inf")
    values = f"{text} | {afterglow[measure]:.2f} | {llama_server[measure]:.2f} | {ratio:.2f}"
    measured = row["medians"].get(IDEAL, {}).get("total")
    has_ideal = measure == "total" and "ideal" in llama_server
    values += f" | {(measured or llama_server['ideal']) / llama_server['total']:.2f}" if has_ideal else " | "
    tokens = f"{afterglow['excess']:.2f}, {llama_server['excess']:.2f}"
    return f"| ({row['workload']}) {row['name']} | {MODEL_NAMES[row['model']]} | {values} | {tokens} |"


def replace_table(page: str, table: str) -> str:
    """Replace the text between the two comments of a page.

    >>> replace_table(f"a {TABLE_BEGIN} old {TABLE_END} b", "new")
    'a <!-- speed: begin -->\\nnew\\n<!-- speed: end --> b'
    """
    before, _, rest = page.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not end:
        raise SystemExit(f"the page has no {TABLE_BEGIN} … {TABLE_END}")
    return f"{before}{TABLE_BEGIN}\n{table}\n{TABLE_END}{after}"


def write_plots(results: dict[str, Any]) -> list[Path]:
    """Write one plot per workload: its main measure and its computed tokens, of both servers on all models."""
    import matplotlib  # optional dependency

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "afterglow"  # makes the file reproducible
    from matplotlib import pyplot

    PLOTS.mkdir(exist_ok=True)
    written = []
    letters = dict.fromkeys(row["workload"] for row in results["rows"] if "skipped" not in row)
    for letter in letters:
        rows = [row for row in results["rows"] if row["workload"] == letter and "skipped" not in row]
        measure, text = MAIN_MEASURES[letter]
        figure, (times, tokens) = pyplot.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
        draw_bars(times, rows, measure, f"seconds: {text}")
        draw_bars(tokens, rows, "computed", "computed tokens (line: needed)")
        for x, row in enumerate(rows):
            tokens.hlines(row["medians"][AFTERGLOW]["needed"], x - 0.4, x + 0.4, color="black", linewidth=1)
        figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
        figure.suptitle(f"({letter}) {rows[0]['name']}", fontsize="medium")
        written.append(PLOTS / f"{letter}.svg")
        figure.savefig(written[-1], metadata={"Date": None})
        pyplot.close(figure)
    return written


def draw_bars(axes: Any, rows: list[dict[str, Any]], measure: str, title: str) -> None:
    """Draw both servers side by side, in one group per model."""
    for offset, peer in ((-0.2, AFTERGLOW), (0.2, LLAMA_SERVER)):
        positions = [x + offset for x in range(len(rows))]
        axes.bar(positions, [row["medians"][peer][measure] for row in rows], width=0.38, label=peer)
    axes.set_xticks(range(len(rows)), [MODEL_NAMES[row["model"]] for row in rows], fontsize="small")
    axes.set_title(title, fontsize="small")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-plots", action="store_true", help="write the table only")
    arguments = parser.parse_args()
    results = json.loads((RESULTS / "agents.json").read_text())
    readme = ROOT / "README.md"
    readme.write_text(replace_table(readme.read_text(), format_table(results)))
    print(f"wrote the table of {readme.relative_to(ROOT)}")
    if not arguments.no_plots:
        for path in write_plots(results):
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
