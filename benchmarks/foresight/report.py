"""Summary of sealed predictions: errors, cover of the intervals, choices, and the spread of repeated runs.

python benchmarks/foresight/report.py FOLDER
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from unisono.foresight.ledger import LEDGER, LedgerEntry, read
from unisono.view.predictions import draw_calibration

NEAR = 1.03
"""Ratio to the fastest choice up to which another counts as well named."""


def errors_line(name: str, entries: list[LedgerEntry]) -> str:
    """Return a row of the table of errors."""
    errors = [entry.error for entry in entries]
    median, high = np.percentile(errors, [50, 95])
    covered = sum(entry.covered for entry in entries)
    return f"| {name} | {len(entries)} | {median:.1%} | {high:.1%} | {max(errors):.1%} | {covered} |"


def choices(entries: list[LedgerEntry]) -> list[str]:
    """Return a row for each run whose choices were measured: what was named, and what was fastest."""
    of: defaultdict[tuple[str, str], list[LedgerEntry]] = defaultdict(list)
    for entry in entries:
        of[entry.labels["cluster"], entry.labels["place"]].append(entry)
    rows = []
    for (cluster, place), of_run in sorted(of.items()):
        named = min(of_run, key=lambda entry: entry.prediction.step)
        best = min(of_run, key=lambda entry: entry.measurement.step.median)
        ratio = named.measurement.step.median / best.measurement.step.median
        cells = [cluster, place, named.labels["choice"], best.labels["choice"], f"{ratio:.3f}"]
        rows.append(f"| {' | '.join(cells)} | {'yes' if ratio <= NEAR else 'no'} |")
    return rows


def repeats(entries: list[LedgerEntry]) -> list[float]:
    """Return the differences of the medians of runs that were made twice, relative to their mean."""
    of: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for entry in entries:
        of[entry.labels["cluster"], entry.labels["place"]][entry.labels["kind"]] = entry.measurement.step.median
    pairs = [(medians["drawn"], medians["repeated"]) for medians in of.values() if "repeated" in medians]
    return [2 * abs(first - second) / (first + second) for first, second in pairs]


def write_summary(folder: Path) -> None:
    """Write `summary.md` and the chart of calibration into a folder with a ledger."""
    entries, complaints = read(folder / LEDGER)
    kinds = {
        kind: [entry for entry in entries if entry.labels["kind"] == kind] for kind in ("drawn", "repeated", "choice")
    }
    drawn = kinds["drawn"]
    lines = ["# Sealed predictions", "", *complaints]
    lines += ["| runs | | median error | 95th percentile | largest | within the interval |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |", errors_line("all drawn", drawn)]
    uneven = [entry for entry in drawn if entry.labels["late"] != "0" or entry.labels["slow"] != "0"]
    groups = {"with a slow link or a late host": uneven}
    for key in ("rule", "model", "hosts"):
        for entry in drawn:
            name = entry.labels["hosts"] + " hosts" if key == "hosts" else getattr(entry.prediction.run, key)
            groups.setdefault(name, [])
            groups[name].append(entry)
    lines += [errors_line(name, members) for name, members in groups.items() if members]
    if apart := repeats(entries):
        median, largest = np.median(apart), max(apart)
        lines += [
            "",
            f"The same run twice: {median:.1%} apart in the median, {largest:.1%} at most ({len(apart)} runs).",
        ]
    if rows := choices(kinds["choice"]):
        near = sum(row.endswith("| yes |") for row in rows)
        lines += [
            "",
            f"Of six choices the fastest, or one within 3% of it, was named in {near} of {len(rows)} runs.",
            "",
        ]
        lines += [
            "| cluster | run | named | fastest | named / fastest | |",
            "| --- | --- | --- | --- | ---: | --- |",
            *rows,
        ]
    lines += [
        "",
        "| cluster | hosts | Mbit/s | network | samples | rule | wire | late | slow | predicted | measured | error |",
    ]
    lines += ["| --- | --- | ---: | --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for entry in drawn:
        label, run = entry.labels, entry.prediction.run
        cells = [label["cluster"], label["hosts"], label["rate"], run.model, label["batch"], run.rule]
        cells += [entry.prediction.program.wire or "float32", label["late"], label["slow"]]
        off = entry.prediction.step / entry.measurement.step.median - 1
        cells += [f"{entry.prediction.step:.3f}", f"{entry.measurement.step.median:.3f}", f"{off:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    (folder / "summary.md").write_text("\n".join([*lines, ""]))
    (folder / "calibration.svg").write_bytes(draw_calibration(drawn, "rule"))
    print("\n".join(lines[:20]))


if __name__ == "__main__":
    write_summary(Path(sys.argv[1]))
