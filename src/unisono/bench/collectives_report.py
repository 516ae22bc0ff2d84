"""Results of the benchmark of collectives, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.bench.collectives import AUTO, LIBRARY
from unisono.bench.peer_program import COPY, GLOO

SHORT_PAYLOAD_BYTES = 256 << 10
"""Bytes up to which a payload counts as short in the plot."""


def table(found: Mapping[str, Any]) -> str:
    """Return a Markdown table: milliseconds of each contender by size, and ratios of `auto` to peers and bound."""
    names = list(found["sizes"][0]["contenders"])
    lines = [
        f"{found['ranks']} ranks on {found['nodes']} nodes in {found['supernodes']} supernodes, {found['library']}; "
        "medians in ms",
        "",
        f"| bytes | {' | '.join(names)} | bound | library / auto | gloo / auto | auto / bound |",
        "| ---: " * (len(names) + 5) + "|",
    ]
    for row in found["sizes"]:
        median = {name: row["contenders"][name]["median_us"] / 1e3 for name in names if name in row["contenders"]}
        bound = bound_of(row)
        cells = [f"{median[name]:.3f}" if name in median else "" for name in names]
        ratios = [f"{median[peer] / median[AUTO]:.2f}" for peer in (LIBRARY, GLOO)]
        last = [f"{bound / 1e3:.3f}", *ratios, f"{median[AUTO] * 1e3 / bound:.2f}"] if bound else ["", *ratios, ""]
        lines.append(f"| {row['bytes']} | {' | '.join([*cells, *last])} |")
    return "\n".join(lines)


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


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw milliseconds of short payloads, and time over the bound of long ones; the file's suffix sets the format."""
    from matplotlib import colormaps  # noqa: PLC0415 - only who draws needs it
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    short, long = figure.subplots(1, 2)
    names = list(dict.fromkeys(name for row in found["sizes"] for name in row["contenders"] if name != COPY))
    for number, name in enumerate(names):
        strong = name in (AUTO, LIBRARY, GLOO)
        color = colormaps["tab20"](number)
        look = {"color": color, "linewidth": 2.4 if strong else 1, "marker": "o" if strong else "."}
        for axes, among, bounded in ((short, _short(found), False), (long, _long(found), True)):
            rows = [row for row in among if name in row["contenders"]]
            ends = [[_height(row, name, end, bounded) for row in rows] for end in ("median_us", "low_us", "high_us")]
            sizes = [row["bytes"] for row in rows]
            axes.plot(sizes, ends[0], label=name, zorder=3 if name == AUTO else 2, **look)
            axes.fill_between(sizes, ends[1], ends[2], color=color, alpha=0.12)
    short.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms")
    long.set(
        xscale="log", xlabel="bytes", ylabel="time / bound", xlim=(SHORT_PAYLOAD_BYTES / 2, 128 << 20), ylim=(0, None)
    )
    long.axhline(1, color="black", linestyle="--", label="bound")
    for axes in (short, long):
        axes.grid(alpha=0.3)
    long.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    where = f"{found['ranks']} ranks on {found['nodes']} nodes in {found['supernodes']} supernodes"
    figure.suptitle(f"allreduce, {where}, {found['library']}")
    figure.savefig(path)


def _short(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in found["sizes"] if row["bytes"] <= SHORT_PAYLOAD_BYTES]


def _long(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in found["sizes"] if row["bytes"] >= SHORT_PAYLOAD_BYTES and bound_of(row)]


def _height(row: Mapping[str, Any], name: str, end: str, bounded: bool) -> float:
    """Return milliseconds, or a multiple of the bound."""
    took = float(row["contenders"][name][end])
    return took / (bound_of(row) or 1.0) if bounded else took / 1e3
