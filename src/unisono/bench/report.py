"""What the benchmark of the collectives has found, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.bench.collectives import AUTO, COPY, GLOO, LIBRARY


def table(found: Mapping[str, Any]) -> str:
    """A Markdown table: milliseconds of each contender by size, and what `auto` is beside its peers and the bound."""
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
    """(algorithm, bytes, simulated / measured) for payloads of `smallest` bytes or more."""
    return [
        (name, row["bytes"], entry["simulated_us"] / entry["median_us"])
        for row in found["sizes"]
        if row["bytes"] >= smallest
        for name, entry in row["contenders"].items()
        if entry["simulated_us"] is not None
    ]


def bound_of(row: Mapping[str, Any]) -> float | None:
    """Microseconds that a size takes at least: by the links, or on one node by the memory."""
    if row["bound_us"] is not None:
        return float(row["bound_us"])
    copy = row["contenders"].get(COPY)
    return float(copy["median_us"]) if copy else None


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw time over the bound by size, both logarithmic, with the intervals; the file's ending says the format."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only who draws needs it

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    names = [name for name in found["sizes"][0]["contenders"] if name != COPY]
    for name in names:
        rows = [row for row in found["sizes"] if name in row["contenders"]]
        sizes = [row["bytes"] for row in rows]
        entries = [row["contenders"][name] for row in rows]
        strong = name in (AUTO, LIBRARY, GLOO)
        axes.plot(
            sizes,
            [entry["median_us"] / 1e3 for entry in entries],
            label=name,
            marker="o" if strong else ".",
            linewidth=2.4 if strong else 1,
            zorder=3 if name == AUTO else 2,
        )
        low, high = ([entry[end] / 1e3 for entry in entries] for end in ("low_us", "high_us"))
        axes.fill_between(sizes, low, high, alpha=0.12)
    bounded = [(row["bytes"], bound) for row in found["sizes"] if (bound := bound_of(row))]
    if bounded:
        axes.plot(*zip(*((size, bound / 1e3) for size, bound in bounded), strict=True), "k--", label="bound")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms")
    axes.set_title(f"allreduce, {found['ranks']} ranks on {found['nodes']} nodes, {found['supernodes']} supernodes")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path)
