"""Charts by matplotlib, in the typeface and the colors of `svg`: on a light page dark, on a dark page light."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError, install_command
from unisono.view.svg import COLORS, FONTS, INK, STYLE

if TYPE_CHECKING:
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
    return _follow_scheme(out.getvalue().decode()).encode() if form == "svg" else out.getvalue()


def _follow_scheme(drawn: str) -> str:
    """Return an SVG document of matplotlib's in the colors of the reader's scheme."""
    document = drawn[drawn.index("<svg") :].replace(INK, "currentColor")
    return re.sub(r"(<svg[^>]*>)", lambda found: found[0] + STYLE, document, count=1)


def write_picture(path: Path, picture: bytes, option: str) -> None:
    """Write a picture into the file that an option names. Raises UsageError where that is impossible."""
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from error


def color_of(number: int) -> str:
    """Return the color of the line, group or bar with this number."""
    return COLORS[number % len(COLORS)]
