"""Results of the collectives beside other libraries, as one table of ratios and as a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from unisono.bench.peer_program import COPY, ORDINARY, TIMINGS, WINDOWS

COLUMNS = [(memory, timing) for timing in TIMINGS for memory in (ORDINARY, WINDOWS)]

LIMITS = (1.05, 1.15)
"""Ratios up to which a cell counts in the summary; above the first, ours is slower by more than the usual spread."""


class Cell(NamedTuple):
    """Ratio of our time to that of the best peer, in one memory, by one timing."""

    ratio: float
    """Ratio of the medians over rounds."""
    low: float
    high: float
    """Least and largest ratio of a round."""
    peer: str


def cell_of(row: Mapping[str, Any], memory: str, timing: str) -> Cell:
    """Return the cell of a collective and a size."""
    us = {name: of[timing] for name, of in row["us"].items()}
    peer = min(us.keys() - {ORDINARY, WINDOWS, COPY}, key=lambda name: (median(us[name]), name))
    ratios = [own / other for own, other in zip(us[memory], us[peer], strict=True)]
    return Cell(median(us[memory]) / median(us[peer]), min(ratios), max(ratios), peer)


def table(found: Mapping[str, Any]) -> str:
    """Return a Markdown table: ratios to the best peer by collective and size, and all medians in microseconds."""
    names = list(found["rows"][0]["us"])
    head = ["collective", "bytes", *map(", ".join, COLUMNS), *(f"{name}, us" for name in names)]
    lines = [
        f"{found['ranks']} ranks on one machine, medians of {found['rounds']} rounds; "
        + "; ".join(f"{name}: {library}" for name, library in found["libraries"].items()),
        "",
        "Ours / best peer (least to largest ratio of a round) and that peer, in bold where ours is slower than "
        f"{LIMITS[0]} times. Microseconds: {' / '.join(TIMINGS)}; the copy is one rank's.",
        "",
        f"| {' | '.join(head)} |",
        f"| --- |{' ---: |' * (len(head) - 1)}",
    ]
    for row in found["rows"]:
        ratios = [_text(cell_of(row, *column)) for column in COLUMNS]
        times = [_times(row["us"].get(name)) for name in names]
        lines.append(f"| {' | '.join([row['collective'], str(row['bytes']), *ratios, *times])} |")
    return "\n".join(lines)


def _times(us: Mapping[str, Sequence[float]] | None) -> str:
    return " / ".join(f"{median(us[timing]):.1f}" for timing in TIMINGS) if us else ""


def _text(cell: Cell) -> str:
    bold = "**" * (cell.ratio > LIMITS[0])
    return f"{bold}{cell.ratio:.2f}{bold} ({cell.low:.2f}-{cell.high:.2f}) {cell.peer}"


def summary(found: Mapping[str, Any]) -> list[str]:
    """Return a line for each memory and timing: the share of cells within LIMITS."""
    return [_shares(column, [cell_of(row, *column).ratio for row in found["rows"]]) for column in COLUMNS]


def _shares(column: tuple[str, str], ratios: Sequence[float]) -> str:
    within = [f"{sum(ratio <= limit for ratio in ratios) / len(ratios):.0%} at most {limit}" for limit in LIMITS]
    return f"{', '.join(column)}: of {len(ratios)} cells {', '.join(within)}"


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios as a heat map: green where ours is faster; the file's suffix sets the format."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415 - only who draws needs it
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = found["rows"]
    cells = [[cell_of(row, *column) for column in COLUMNS] for row in rows]
    figure = Figure(figsize=(9, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    ratios = [[cell.ratio for cell in of] for of in cells]
    image = axes.imshow(ratios, cmap="RdYlGn_r", norm=LogNorm(0.25, 4), aspect="auto")
    for y, of in enumerate(cells):
        for x, cell in enumerate(of):
            axes.text(x, y, f"{cell.ratio:.2f} {cell.peer}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(COLUMNS)), map(",\n".join, COLUMNS))
    axes.set_yticks(range(len(rows)), [f"{row['collective']}, {row['bytes']} B" for row in rows])
    bar = figure.colorbar(image, label="ours / best peer", ticks=[0.25, 0.5, 1, 2, 4], format="{x:g}")
    bar.minorticks_off()
    figure.suptitle(f"{found['ranks']} ranks on one machine, medians of {found['rounds']} rounds")
    figure.savefig(path)
