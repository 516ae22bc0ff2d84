"""Results of the collectives beside other libraries, as one table of ratios and as a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from statistics import median
from typing import Any, NamedTuple

from unisono.bench.peer_program import COPY, ORDINARY, TIMINGS, WINDOWS
from unisono.view import heat_map as view
from unisono.view.words import format_bytes, markdown_table

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
    ]
    rows = [
        [
            *(row["collective"], str(row["bytes"])),
            *(_text(cell_of(row, *column)) for column in COLUMNS),
            *(_times(row["us"].get(name)) for name in names),
        ]
        for row in found["rows"]
    ]
    return "\n".join([*lines, *markdown_table(head, rows)])


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


def draw(found: Mapping[str, Any]) -> bytes:
    """Return the ratios as a heat map, as SVG: green where ours is faster, red where it is slower, up to 4 times."""
    rows = found["rows"]
    cells = [[cell_of(row, *column) for column in COLUMNS] for row in rows]
    drawn = [[view.HeatCell(f"{cell.ratio:.2f} {cell.peer}", _share(cell.ratio)) for cell in of] for of in cells]
    names = [f"{row['collective']}, {format_bytes(row['bytes'])}" for row in rows]
    title = f"ours / best peer: {found['ranks']} ranks on one machine, medians of {found['rounds']} rounds"
    columns = [",\n".join(column) for column in COLUMNS]
    return view.draw_heat_maps([view.HeatMap("", ("", ""), names, columns, drawn)], title, view.DIVERGING)


def _share(ratio: float) -> float:
    """Return the place of a ratio on the scale from a quarter, 0, to four times, 1."""
    return min(1.0, max(0.0, 0.5 + log2(ratio) / 4))
