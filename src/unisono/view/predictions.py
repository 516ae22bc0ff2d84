"""Charts of predictions: of planned runs, and of sealed predictions beside what was measured.

speedup │        ╱ ideal             share   │ ▒ ▒ ▓ ▓   communication
        │     ╱ ╱── bsp              of the  │ █ ▒ ▒ ▒   update, loading
        │  ╱╱      │ efficiency      step    │ █ █ █ █   computing
        └────────────── nodes                └─────────── nodes, a bar for each rule

predicted │      ╱ ┃              updates    ·  │ ··        A vertical bar is the interval of a prediction; the dashed
          │    ╱┃●                exchanges    ·│·          line is that of equal times. On the right each dot is a
          │  ╱● ┃                 waiting     ··│ ·         run: predicted less measured seconds over those of the
          │╱                      computing    ·│··   ·     measured step.
          └────────── measured    └─────────────┴─────
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unisono.errors import UsageError
from unisono.foresight.ledger import LedgerEntry, grouped, part_errors
from unisono.formats import format_seconds
from unisono.view.chart import color_of, render
from unisono.view.svg import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from unisono.plan.run_plan import RunPlan  # loads PyTorch, which a chart does not need

PARTS = {"computing": "#0f9960", "update": "#a5840b", "loading": "#c2589b", "communication": "#d9600a"}
"""Parts of a step from bottom to top, and their colors."""

BARS_WIDTH = 0.8
"""Width of the bars of a number of nodes, together; numbers of nodes are 1 apart."""

LEAST_SHARE = 1e-3
"""Share of a step from which a part is drawn."""

ROW = 0.7
"""Height of a part's row in which the dots of its groups lie, in rows."""


def draw_plans(plans: Sequence[RunPlan], title: str, machine: str) -> bytes:
    """Return the chart of planned runs, each rule a line, as SVG."""
    nodes, rules = sorted({plan.nodes for plan in plans}), list(dict.fromkeys(plan.rule for plan in plans))

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _draw_speedups(left, plans, nodes, rules)
        left.set_title(f"{title}\non {machine}; bands: from - to, percent: efficiency")
        _draw_shares(right, plans, nodes, rules)

    return render(draw, 13, 5)


def _draw_speedups(axes: Axes, plans: Sequence[RunPlan], nodes: Sequence[int], rules: Sequence[str]) -> None:
    axes.plot(nodes, nodes, color=INK, linestyle="--", linewidth=1, label="ideal")
    for index, rule in enumerate(rules):
        rows = sorted((plan for plan in plans if plan.rule == rule), key=lambda plan: plan.nodes)
        across, color = [plan.nodes for plan in rows], color_of(index)
        low = [plan.speedup * plan.step / plan.high for plan in rows]
        high = [plan.speedup * plan.step / plan.low for plan in rows]
        axes.plot(across, [plan.speedup for plan in rows], color=color, marker="o", label=rule)
        axes.fill_between(across, low, high, color=color, alpha=0.2, linewidth=0)
        axes.annotate(f"{rows[-1].efficiency:.0%}", (across[-1], rows[-1].speedup), (7, -3), textcoords="offset points")
    axes.loglog(base=2)
    axes.set(xlabel="nodes", ylabel="speedup over one node")
    axes.set_xticks(nodes, [f"{count:,}" for count in nodes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend()


def _draw_shares(axes: Axes, plans: Sequence[RunPlan], nodes: Sequence[int], rules: Sequence[str]) -> None:
    width = BARS_WIDTH / len(rules)
    across = [nodes.index(plan.nodes) + width * (rules.index(plan.rule) - (len(rules) - 1) / 2) for plan in plans]
    below = [0.0] * len(plans)
    for part, color in PARTS.items():
        shares = [getattr(plan, part) / plan.step for plan in plans]
        if max(shares) > LEAST_SHARE:
            axes.bar(across, shares, 0.9 * width, below, color=color, label=part)
        below = [bottom + share for bottom, share in zip(below, shares, strict=True)]
    axes.set(xlabel="nodes", ylabel="share of the step", ylim=(0, 1))
    axes.set_xticks(range(len(nodes)), [f"{count:,}" for count in nodes])
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    bars = f"bars from left to right: {', '.join(rules)}" if len(rules) > 1 else rules[0]
    axes.set_title(f"parts of a step that do not hide\n{bars}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def draw_calibration(entries: Sequence[LedgerEntry], by: str) -> bytes:
    """Return the chart of a ledger's runs, with a color for each group, as SVG. Raises UsageError without runs."""
    if not entries:
        raise UsageError("the ledger has no runs to draw: unisono train adds one at its end")
    groups = grouped(entries, by)

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _draw_steps(left, groups, by)
        _draw_errors(right, groups)

    return render(draw, 11, 5)


def _draw_steps(axes: Axes, groups: Mapping[str, Sequence[LedgerEntry]], by: str) -> None:
    from matplotlib.ticker import LogLocator  # noqa: PLC0415  only who draws needs it

    entries = [entry for rows in groups.values() for entry in rows]
    ends = [entry.measurement.step.median for entry in entries] + [entry.prediction.step for entry in entries]
    low, high = min(ends) / 1.3, max(ends) * 1.3
    axes.plot([low, high], [low, high], color=INK, linestyle="--", linewidth=1, label="equal")
    for index, (name, rows) in enumerate(groups.items()):
        measured, color = [entry.measurement.step.median for entry in rows], color_of(index)
        bars = [entry.prediction.low for entry in rows], [entry.prediction.high for entry in rows]
        axes.vlines(measured, *bars, color=color, linewidth=1)
        predicted = [entry.prediction.step for entry in rows]
        axes.plot(measured, predicted, color=color, linestyle="", marker="o", markersize=3, label=f"{by} {name}")
    axes.set(xlabel="measured step", ylabel="predicted step", xscale="log", yscale="log")
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    axes.minorticks_off()
    axes.legend()


def _draw_errors(axes: Axes, groups: Mapping[str, Sequence[LedgerEntry]]) -> None:
    parts = list(part_errors(next(iter(groups.values()))[0]))[::-1]
    for index, rows in enumerate(groups.values()):
        shift = ROW * (0.5 - (index + 0.5) / len(groups))
        errors = [part_errors(entry) for entry in rows]
        across = [error[part] for error in errors for part in parts]
        up = [place + shift for _ in errors for place in range(len(parts))]
        axes.plot(across, up, color=color_of(index), linestyle="", marker="o", alpha=0.7)
    axes.axvline(0, color=INK, linewidth=1)
    axes.set(xlabel="predicted less measured, of the measured step")
    axes.set_yticks(range(len(parts)), parts)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:+.0%}" if share else "0")
