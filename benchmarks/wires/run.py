"""Accuracy and speed by the form of gradients on the wire, between hosts: Theano-MPI's table 1 in small.

python benchmarks/wires/run.py FOLDER         the runs of `unisono papers theano-mpi-table-1`, into FOLDER; needs root
python docs/papers.py --measured FOLDER       puts the same runs into the package

Runs that have ended in FOLDER are not repeated. Writes results.json, and the table of README.md.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from unisono.formats import markdown_table
from unisono.papers.figures import find_figure
from unisono.papers.measure import FigureRun, carry_out, collect, result_file, runs_of

HERE = Path(__file__).parent
FIGURE = find_figure("theano-mpi-table-1")
README, RESULTS = HERE / "README.md", HERE / "results.json"

MARK = "<!-- the table, by run.py -->\n"
ALONE = "1 host"
HEADS = [
    "",
    "accuracy %",
    "range",
    "error added, points",
    "top-5 error %",
    "an epoch, s",
    "range",
    "times float32",
    "times one host",
]
KEYS = {
    "accuracy": "test accuracy",
    "top5_error": "top-5 error",
    "epoch": "an epoch",
    "exchange": "exchange in an epoch",
}
"""Rows of a run that are kept."""


def measure(folder: Path) -> dict[str, Any]:
    """Carry out all runs, seed by seed, so that what disturbs the machine meets all cases; return what they give."""
    cases: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    runs = sorted(runs_of(FIGURE), key=seed_of)
    for index, run in enumerate(runs, 1):
        print(f"{index} of {len(runs)}: {run.label}", file=sys.stderr, flush=True)
        rows = {row.name: row.value for row in carry_out(run, folder)}
        case = cases[run.label.rpartition(", ")[0]]
        for key, name in KEYS.items():
            case[key].append(rows[name])
    collect(FIGURE, folder)
    report = json.loads(result_file(FIGURE, folder).read_text())
    return {key: report[key] for key in ("date", "machine", "command")} | {"cases": cases}


def seed_of(run: FigureRun) -> str:
    """Return the seed of a run, the last value of its label."""
    return run.label.rpartition(" ")[2]


def table(cases: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """Return the cells: means of accuracies and medians of epochs, and ratios to the case without a smaller wire."""
    rows = []
    for name, case in cases.items():
        accuracy, epoch = case["accuracy"], case["epoch"]
        plain = cases[name.partition(",")[0]]
        added = mean(before - after for before, after in zip(plain["accuracy"], accuracy, strict=True))
        rows.append(
            [
                name,
                f"{mean(accuracy):.2f}",
                f"{min(accuracy):.2f} to {max(accuracy):.2f}",
                "" if plain is case else f"{added:+.2f}",
                f"{mean(case['top5_error']):.2f}",
                f"{median(epoch):.2f}",
                f"{min(epoch):.2f} to {max(epoch):.2f}",
                "" if plain is case else f"{median(plain['epoch']) / median(epoch):.2f}",
                "" if name == ALONE else f"{median(cases[ALONE]['epoch']) / median(epoch):.2f}",
            ]
        )
    return rows


if __name__ == "__main__":
    results = measure(Path(sys.argv[1]))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    before = README.read_text(encoding="utf-8").partition(MARK)[0]
    lines = [f"{results['machine']}, {results['date']}:", "", *markdown_table(HEADS, table(results["cases"]), (0,))]
    README.write_text("\n".join([before + MARK, *lines, ""]), encoding="utf-8")
