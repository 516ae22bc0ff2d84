"""Chart of planned runs: speedup against nodes, each rule a line with its interval, beside the ideal; parts of a step.

speedup │        ╱ ideal             share   │ ▒ ▒ ▓ ▓   communication
        │     ╱ ╱── bsp              of the  │ █ ▒ ▒ ▒   update, loading
        │  ╱╱      │ efficiency      step    │ █ █ █ █   computing
        └────────────── nodes                └─────────── nodes, a bar for each rule
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.plan.chart import COLORS, GRAY, chart
from unisono.plan.run_row import RunPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {"computing": "#0f9960", "update": "#a5840b", "loading": "#c2589b", "communication": "#d9600a"}
"""Parts of a step from bottom to top, and their colors."""

BARS_WIDTH = 0.8
"""Width of the bars of a number of nodes, together; numbers of nodes are 1 apart."""

LEAST_SHARE = 1e-3
"""Share of a step from which a part is drawn."""


def draw_chart(plans: Sequence[RunPlan], title: str, machine: str, path: Path) -> None:
    """Write the chart as SVG. Raises UsageError without matplotlib, and for a file that cannot be written."""
    with chart(path, (13, 5)) as figure:
        left, right = figure.subplots(1, 2)
        _draw_speedups(left, plans)
        left.set_title(title, loc="left", fontweight="bold", pad=22)
        left.text(0, 1.02, f"on {machine}; bands: from - to, percent: efficiency", transform=left.transAxes, fontsize=9)
        _draw_parts(right, plans)


def _draw_speedups(axes: Axes, plans: Sequence[RunPlan]) -> None:
    nodes = sorted({plan.nodes for plan in plans})
    axes.plot(nodes, nodes, color=GRAY, linestyle="--", linewidth=1, label="ideal")
    for number, rule in enumerate(dict.fromkeys(plan.rule for plan in plans)):
        rows = sorted((plan for plan in plans if plan.rule == rule), key=lambda plan: plan.nodes)
        across, color = [plan.nodes for plan in rows], COLORS[number % len(COLORS)]
        low = [plan.speedup * plan.step / plan.high for plan in rows]
        high = [plan.speedup * plan.step / plan.low for plan in rows]
        axes.plot(across, [plan.speedup for plan in rows], color=color, marker="o", markersize=4, label=rule)
        axes.fill_between(across, low, high, color=color, alpha=0.2, linewidth=0)
        axes.annotate(f"{rows[-1].efficiency:.0%}", (across[-1], rows[-1].speedup), (7, -3), textcoords="offset points")
    axes.set(xlabel="nodes", ylabel="speedup over one node")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(nodes, [f"{one:,}" for one in nodes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color=GRAY, alpha=0.3)
    axes.legend(frameon=False)


def _draw_parts(axes: Axes, plans: Sequence[RunPlan]) -> None:
    nodes, rules = sorted({plan.nodes for plan in plans}), list(dict.fromkeys(plan.rule for plan in plans))
    width = BARS_WIDTH / len(rules)
    across = [nodes.index(one.nodes) + width * (rules.index(one.rule) - (len(rules) - 1) / 2) for one in plans]
    below = [0.0] * len(plans)
    for part, color in PARTS.items():
        shares = [getattr(plan, part) / plan.step for plan in plans]
        if max(shares) > LEAST_SHARE:
            axes.bar(across, shares, 0.9 * width, below, color=color, label=part)
        below = [one + share for one, share in zip(below, shares, strict=True)]
    axes.set(xlabel="nodes", ylabel="share of the step", ylim=(0, 1))
    axes.set_xticks(range(len(nodes)), [f"{one:,}" for one in nodes])
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_title("parts of a step that do not hide", loc="left", fontweight="bold", pad=22)
    bars = f"bars from left to right: {', '.join(rules)}" if len(rules) > 1 else rules[0]
    axes.text(0, 1.02, bars, transform=axes.transAxes, fontsize=9)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
