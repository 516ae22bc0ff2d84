"""Charts by matplotlib, in the typeface and the colors of `svg`: on a light page dark, on a dark page light.

Curves are those of a measure over time and over epochs, for one or more runs (as in DIMD's figures 13 to 16); bars are
layers with their bounds; times are those of collectives by size, beside their bound.

accuracy                         accuracy
│      ╭──── other               │      ╭──── other
│   ╭──╯ ╭── one                 │   ╭──╯ ╭── one
│  ╱  ╭──╯                       │  ╱  ╭──╯
└──────────── minutes            └──────────── epochs
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.errors import UsageError, install_command
from unisono.files import naming_os_errors
from unisono.formats import format_bytes, format_seconds
from unisono.view.svg import COLORS, FONTS, INK, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOK: Any = {
    "font.sans-serif": FONTS[:2],
    "svg.fonttype": "none",
    "svg.hashsalt": "unisono",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": INK, "grid.alpha": 0.2},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **{"axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": 11},
    **{"figure.titleweight": "bold", "figure.titlesize": 11},
    **{"legend.frameon": False, "legend.fontsize": 9, "lines.markersize": 4},
}


def no_pictures() -> str:
    """Return the reason why charts cannot be drawn, with the remedy; empty where they can."""
    if find_spec("matplotlib") is not None:
        return ""
    return f"no pictures, as matplotlib is not installed: {install_command('view')}"


def render(draw: Callable[[Figure], None], width: float, height: float, form: str = "svg") -> bytes:
    """Return what `draw` draws on an empty figure of this size in inches, in a format: svg, png, pdf.

    Raises UsageError without matplotlib, ValueError for a format that it does not know.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415  only who draws needs it
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(f"a picture needs matplotlib: {install_command('view')}") from error
    out = io.BytesIO()
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        figure.savefig(out, format=form, transparent=form == "svg", metadata={"Date": None} if form == "svg" else None)
    if form != "svg":
        return out.getvalue()
    drawn = out.getvalue().decode()
    document = drawn[drawn.index("<svg") :].replace(INK, "currentColor")  # the color of the reader's scheme
    return re.sub(r"(<svg[^>]*>)", lambda tag: tag[0] + STYLE, document, count=1).encode()


def write_drawing(path: Path, draw: Callable[[str], bytes], option: str) -> None:
    """Write what `draw` returns for a format: that of the suffix, or svg. Raises UsageError where that fails."""
    try:
        drawn = draw(path.suffix.removeprefix(".") or "svg")
    except ValueError as error:  # no such format
        raise UsageError(f"{option} {path}: {error}") from error
    write_picture(path, drawn, option)


def write_picture(path: Path, picture: bytes, option: str) -> None:
    """Write a picture into the file that an option names. Raises UsageError where that is impossible."""
    if picture.startswith(b"<svg") and path.suffix not in ("", ".svg"):
        raise UsageError(f"{option} {path}: the picture is SVG; name it {path.with_suffix('.svg').name}")
    with naming_os_errors(f"{option} {path}"):
        path.write_bytes(picture)


def color_of(index: int) -> str:
    """Return the color of the line, group or bar with this number."""
    return COLORS[index % len(COLORS)]


UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))

STYLES = ("-", "--", "-.", ":")
"""Lines of runs that share a color."""

MAX_DOTS = 60
"""Epochs of a run above which they get no dots."""

LEGEND_ROW = 0.2
"""Height of a row of the legend, in inches."""


class Line(NamedTuple):
    """Values of a run after each of its epochs."""

    name: str
    epochs: Sequence[int]
    seconds: Sequence[float]
    """Seconds since the run began."""
    values: Sequence[float]
    beside: bool = False
    """True for a second measure of the run before, which has its color and is dotted."""


def draw_curves(lines: Sequence[Line], measure: str, percent: bool, title: str = "", form: str = "svg") -> bytes:
    """Return the picture of lines of one measure, over time beside over epochs. Each has one epoch at least."""
    longest = max(line.seconds[-1] for line in lines)
    seconds, unit = next((unit for unit in UNITS if longest >= 2 * unit[0]), UNITS[-1])

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        index = -1
        for line in lines:
            index += not line.beside
            style = ":" if line.beside else STYLES[index // len(COLORS) % len(STYLES)]
            look = {"color": color_of(index), "linestyle": style, "label": line.name}
            marker = "." if len(line.epochs) <= MAX_DOTS else ""
            left.plot([second / seconds for second in line.seconds], line.values, marker=marker, **look)
            right.plot(line.epochs, line.values, marker=marker, **look)
        left.set(xlabel=unit, ylabel=measure, xlim=(0, None))
        right.set(xlabel="epochs", xlim=(0, None))
        right.xaxis.get_major_locator().set_params(integer=True)
        if percent:
            left.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
        figure.suptitle(title, x=0.01, ha="left")
        named = zip(*right.get_legend_handles_labels(), strict=True)
        from_top = [pair for _, pair in sorted(zip(lines, named, strict=True), key=lambda pair: -pair[0].values[-1])]
        figure.legend(*zip(*from_top, strict=True), loc="outside right upper")

    return render(draw, 12, max(4.5, LEGEND_ROW * len(lines) + 1), form)


class Bar(NamedTuple):
    """Measured time, and the least time that there could be, in seconds."""

    seconds: float
    bound: float


def draw_bars(panels: Mapping[str, Mapping[str, Bar]], names: Sequence[str], title: str) -> bytes:
    """Return bars, by the title of their panel and by their name, as SVG; in each is its bound."""

    def draw(figure: Figure) -> None:
        panes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (panel, bars) in zip(panes, panels.items(), strict=True):
            drawn = [bars.get(name, Bar(0.0, 0.0)) for name in names]
            axes.barh(names, [bar.seconds for bar in drawn], color="#9ecae1", label="measured")
            axes.barh(names, [bar.bound for bar in drawn], color="#08519c", height=0.4, label="bound")
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
        _draw_lines(left, short, names, strong)
        _draw_lines(right, long, names, strong)
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
        index, thick = names.index(name), name in strong
        style = ("-", "--", ":")[index // len(COLORS) % 3]
        look: Any = {"color": color_of(index), "linewidth": 2.4 if thick else 1, "marker": "o" if thick else "."}
        axes.plot(times.nbytes, times.median, style, label=name, zorder=3 if thick else 2, **look)
        axes.fill_between(times.nbytes, times.low, times.high, color=color_of(index), alpha=0.12)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(16))
    axes.xaxis.set_major_formatter(lambda nbytes, _: format_bytes(nbytes))
    axes.set_xlabel("payload")
