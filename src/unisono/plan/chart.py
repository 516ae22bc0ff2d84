"""Figure of a chart, written as SVG: text stays text, on a transparent background.

with chart(path, (13, 5)) as figure: draw ──▶ path          text and axes are readable on white and on black
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import UsageError, install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRAY = "#7d858e"
"""Color of text and axes: contrast above 3.5 on white and on #0d1117."""

COLORS = ("#0a76c4", "#d9600a", "#0f9960", "#c2589b", "#a5840b", "#7a6fd0")


@contextmanager
def chart(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield an empty figure of this size in inches, and write what was drawn.

    Raises UsageError without matplotlib, and for a file that cannot be written.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415  only who draws needs it
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(f"--chart needs matplotlib: {install_command('bench')}") from error
    with mpl.rc_context(
        {
            "text.color": GRAY,
            "axes.labelcolor": GRAY,
            "axes.edgecolor": GRAY,
            "xtick.color": GRAY,
            "ytick.color": GRAY,
            "svg.fonttype": "none",
        }
    ):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        try:
            figure.savefig(path, format="svg", transparent=True)
        except OSError as error:
            raise UsageError(f"--chart {path}: {error.strerror}") from error
