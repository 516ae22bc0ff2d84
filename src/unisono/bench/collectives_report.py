"""Results of the benchmark of collectives, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.bench.collectives import AUTO, LIBRARY
from unisono.bench.peer_program import COPY, GLOO
from unisono.view.chart import Times, draw_times
from unisono.view.words import markdown_table

SHORT_PAYLOAD_BYTES = 256 << 10
"""Bytes up to which a payload counts as short in the plot."""


def table(found: Mapping[str, Any]) -> str:
    """Return a Markdown table: milliseconds of each contender by size, and ratios of `auto` to peers and bound."""
    names = list(found["sizes"][0]["contenders"])
    about = f"{found['ranks']} ranks on {found['nodes']} nodes in {found['supernodes']} supernodes, {found['library']}"
    rows = []
    for row in found["sizes"]:
        median = {name: row["contenders"][name]["median_us"] / 1e3 for name in names if name in row["contenders"]}
        bound = bound_of(row)
        cells = [f"{median[name]:.3f}" if name in median else "" for name in names]
        ratios = [f"{median[peer] / median[AUTO]:.2f}" for peer in (LIBRARY, GLOO)]
        last = [f"{bound / 1e3:.3f}", *ratios, f"{median[AUTO] * 1e3 / bound:.2f}"] if bound else ["", *ratios, ""]
        rows.append([str(row["bytes"]), *cells, *last])
    header = ["bytes", *names, "bound", "library / auto", "gloo / auto", "auto / bound"]
    return "\n".join([f"{about}; medians in ms", "", *markdown_table(header, rows, left=())])


def simulated(found: Mapping[str, Any], smallest: int = 1 << 20) -> list[tuple[str, int, float]]:
    """Return (algorithm, bytes, simulated / measured) for payloads of `smallest` bytes or more."""
    return [
        (name, row["bytes"], entry["simulated_us"] / entry["median_us"])
        for row in found["sizes"]
        if row["bytes"] >= smallest
        for name, entry in row["contenders"].items()
        if entry["simulated_us"] is not None
    ]


def bound_of(row: Mapping[str, Any]) -> float | None:
    """Return the least microseconds for a size: by the links, or on one node by the memory; None where unknown."""
    if row["bound_us"] is not None:
        return float(row["bound_us"])
    copy = row["contenders"].get(COPY)
    return float(copy["median_us"]) if copy else None


def draw(found: Mapping[str, Any]) -> bytes:
    """Return the times of short payloads, and those of long ones over their bound, as SVG."""
    short = [row for row in found["sizes"] if row["bytes"] <= SHORT_PAYLOAD_BYTES]
    long = [row for row in found["sizes"] if row["bytes"] >= SHORT_PAYLOAD_BYTES and bound_of(row)]
    names = list(dict.fromkeys(name for row in found["sizes"] for name in row["contenders"] if name != COPY))
    lines = [{name: _times(rows, name, bounded) for name in names} for rows, bounded in ((short, False), (long, True))]
    where = f"{found['ranks']} ranks on {found['nodes']} nodes in {found['supernodes']} supernodes"
    return draw_times(lines[0], lines[1], (AUTO, LIBRARY, GLOO), f"allreduce, {where}, {found['library']}")


def _times(rows: Sequence[Mapping[str, Any]], name: str, bounded: bool) -> Times:
    """Return the seconds of a contender, or multiples of the bound."""
    mine = [row for row in rows if name in row["contenders"]]
    units = [(bound_of(row) or 1.0) if bounded else 1e6 for row in mine]
    ends = (
        [float(row["contenders"][name][end]) / unit for row, unit in zip(mine, units, strict=True)]
        for end in ("median_us", "low_us", "high_us")
    )
    return Times([row["bytes"] for row in mine], *ends)
