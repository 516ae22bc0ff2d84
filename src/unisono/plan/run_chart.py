"""Chart of planned runs: speedup against nodes, each rule a line with its interval, beside the ideal;
at its end the efficiency on the most nodes.

speedup │        ╱ ideal
        │     ╱ ╱── bsp         The background is transparent, and text and axes are of a gray that is readable
        │  ╱╱      │     efficiency  on white and on black.
        └────────────── nodes
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unisono.errors import UsageError
from unisono.plan.run_row import RunPlan

GRAY = "#7d858e"
"""Color of text and axes: contrast above 3.5 on white and on #0d1117."""

COLORS = ("#0a76c4", "#d9600a", "#0f9960", "#c2589b", "#a5840b", "#7a6fd0")


def draw_chart(plans: Sequence[RunPlan], title: str, machine: str, path: Path) -> None:
    """Write the chart as SVG. Raises UsageError without matplotlib, and for a file that cannot be written."""
    try:
        import matplotlib as mpl  # noqa: PLC0415  only who draws needs it
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise UsageError("--chart needs matplotlib: install unisono[bench]") from error
    with mpl.rc_context(
        {
            "text.color": GRAY,
            "axes.labelcolor": GRAY,
            "axes.edgecolor": GRAY,
            "xtick.color": GRAY,
            "ytick.color": GRAY,
            "svg.fonttype": "none",  # text stays text
        }
    ):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        nodes = sorted({plan.nodes for plan in plans})
        axes.plot(nodes, nodes, color=GRAY, linestyle="--", linewidth=1, label="ideal")
        for number, rule in enumerate(dict.fromkeys(plan.rule for plan in plans)):
            rows = sorted((plan for plan in plans if plan.rule == rule), key=lambda plan: plan.nodes)
            across, color = [plan.nodes for plan in rows], COLORS[number % len(COLORS)]
            low = [plan.speedup * plan.step / plan.high for plan in rows]
            high = [plan.speedup * plan.step / plan.low for plan in rows]
            axes.plot(across, [plan.speedup for plan in rows], color=color, marker="o", markersize=4, label=rule)
            axes.fill_between(across, low, high, color=color, alpha=0.2, linewidth=0)
            axes.annotate(
                f"{rows[-1].efficiency:.0%}", (across[-1], rows[-1].speedup), (7, -3), textcoords="offset points"
            )
        axes.set(xlabel="nodes", ylabel="speedup over one node")
        axes.set_title(title, loc="left", fontweight="bold", pad=22)
        axes.text(0, 1.02, f"on {machine}; bands: from - to, percent: efficiency", transform=axes.transAxes, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(nodes, [f"{one:,}" for one in nodes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(color=GRAY, alpha=0.3)
        axes.legend(frameon=False)
        try:
            figure.savefig(path, format="svg", transparent=True)
        except OSError as error:
            raise UsageError(f"--chart {path}: {error.strerror}") from error
