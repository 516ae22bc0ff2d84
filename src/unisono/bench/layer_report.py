"""The layer report as a table, as JSON and as a bar chart."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from unisono.bench.layers import LayerTiming
from unisono.bench.peak import Peak
from unisono.compute.geometry import Pass
from unisono.view.chart import Bar, draw_bars


def as_data(rows: Sequence[LayerTiming], peak: Peak, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return all measurements as data for JSON: seconds, operations, bytes."""
    return {
        **about,
        "peak": asdict(peak),
        "medians": medians(rows, peak),
        "rows": [
            {
                **asdict(row),
                "share_of_bound": row.share_of_bound(peak),
                "bound": "memory" if peak.memory_bound(row.operations, row.least_bytes) else "products",
            }
            for row in rows
        ],
    }


def medians(rows: Sequence[LayerTiming], peak: Peak) -> dict[str, float]:
    """Return, for each pass, the share of the bound that the median convolution reaches."""
    found = {}
    for which in Pass:
        shares = [row.share_of_bound(peak) for row in rows if row.kind == "Conv2d" and row.pass_name == which.value]
        if shares:
            found[which.value] = statistics.median(shares)
    return found


def as_table(rows: Sequence[LayerTiming], peak: Peak) -> Table:
    """Return a table with a row for each pass of each layer."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", "kind", "pass"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "GFLOP/s", "of peak", "bytes/FLOP", "of bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    last = ""
    for row in rows:
        table.add_row(*(("", "") if row.layer == last else (row.layer, row.kind)), *_cells(row, peak))
        last = row.layer
    return table


def sums(rows: Sequence[LayerTiming]) -> list[tuple[str, float]]:
    """Return the seconds of each kind of layer and pass, the longest first."""
    found: dict[str, float] = {}
    for row in rows:
        name = f"{row.kind}, {row.pass_name}"
        found[name] = found.get(name, 0.0) + row.seconds
    return sorted(found.items(), key=lambda item: -item[1])


def draw(rows: Sequence[LayerTiming], peak: Peak, title: str) -> bytes:
    """Return a bar for each layer and pass with its bound inside, as SVG."""
    panels = {
        which.value: {
            row.layer: Bar(row.seconds, row.seconds * min(1.0, row.share_of_bound(peak)))
            for row in rows
            if row.pass_name == which.value
        }
        for which in Pass
    }
    return draw_bars(panels, list(dict.fromkeys(row.layer for row in rows)), title)


def _cells(row: LayerTiming, peak: Peak) -> tuple[str, ...]:
    shared = f"{row.share_of_bound(peak):.0%} {'memory' if peak.memory_bound(row.operations, row.least_bytes) else ''}"
    first = row.pass_name, f"{1e3 * row.seconds:.2f}"
    if not row.operations:
        return *first, "", "", "", shared.strip(), ""
    rate = row.operations / row.seconds
    return (
        *first,
        f"{rate / 1e9:.0f}",
        f"{rate / peak.operations_per_second:.0%}",
        f"{row.least_bytes / row.operations:.3f}",
        shared.strip(),
        row.algorithm,
    )
