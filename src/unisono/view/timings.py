"""Charts of measured times: bars of layers with their bounds, and times of collectives by size beside their bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.view.chart import color_of, render
from unisono.view.svg import COLORS, INK
from unisono.view.words import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Bar(NamedTuple):
    """Measured time, and the least time that there could be, in seconds."""

    seconds: float
    bound: float


def draw_bars(panels: Mapping[str, Mapping[str, Bar]], names: Sequence[str], title: str) -> bytes:
    """Return bars, by the title of their panel and by their name, as SVG; in each is its bound."""

    def draw(figure: Figure) -> None:
        panes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (panel, bars) in zip(panes, panels.items(), strict=True):
            found = [bars.get(name, Bar(0.0, 0.0)) for name in names]
            axes.barh(names, [bar.seconds for bar in found], color="#9ecae1", label="measured")
            axes.barh(names, [bar.bound for bar in found], color="#08519c", height=0.4, label="bound")
            axes.set_title(panel)
            axes.xaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds) if seconds else "0")
            axes.grid(False, axis="y")
        panes[0].set_ylim(len(names) - 0.4, -0.6)
        panes[0].tick_params(axis="y", labelsize=7)
        panes[-1].legend(loc="lower right")
        figure.suptitle(title)

    return render(draw, 12, 1.5 + 0.22 * len(names))


class Times(NamedTuple):
    """Times of a contender by bytes, in seconds or as multiples of a bound, with low and high ends."""

    nbytes: Sequence[int]
    median: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def draw_times(short: Mapping[str, Times], long: Mapping[str, Times], strong: Sequence[str], title: str) -> bytes:
    """Return seconds of short payloads beside multiples of the bound of long ones, as SVG; `strong` lines are thick."""
    names = list(dict.fromkeys([*short, *long]))

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for axes, lines in ((left, short), (right, long)):
            _draw_lines(axes, lines, names, strong)
        left.set(yscale="log", ylabel="time")
        left.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
        right.set(ylabel="time over the bound", ylim=(0, None))
        right.axhline(1, color=INK, linestyle="--", label="bound")
        right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.suptitle(title)

    return render(draw, 13, 5.5)


def _draw_lines(axes: Axes, lines: Mapping[str, Times], names: Sequence[str], strong: Sequence[str]) -> None:
    from matplotlib.ticker import LogLocator  # noqa: PLC0415  only who draws needs it

    if not any(times.nbytes for times in lines.values()):
        axes.set_axis_off()  # its scale needs a number
        return
    for name, times in lines.items():
        number, thick = names.index(name), name in strong
        style = ("-", "--", ":")[number // len(COLORS) % 3]
        look: Any = {"color": color_of(number), "linewidth": 2.4 if thick else 1, "marker": "o" if thick else "."}
        axes.plot(times.nbytes, times.median, style, label=name, zorder=3 if thick else 2, **look)
        axes.fill_between(times.nbytes, times.low, times.high, color=color_of(number), alpha=0.12)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(16))
    axes.xaxis.set_major_formatter(lambda nbytes, _: format_bytes(nbytes))
    axes.set_xlabel("payload")
