"""`unisono accuracy`: test accuracy of runs, drawn against time and epochs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from unisono.errors import UsageError


def accuracy(
    runs: Annotated[list[Path], typer.Argument(help="The folders of one run or several.")],
    output: Annotated[Path, typer.Option(help="The picture; its ending says the format: svg, png, pdf.")] = Path(
        "accuracy.svg"
    ),
) -> None:
    """Draw the test accuracy of runs, top-1 and top-5, against wall-clock time and against epochs."""
    from unisono.training.curves import curve_of, draw, say

    curves = [curve_of(run) for run in runs]
    for curve in curves:
        print(say(curve))
    if find_spec("matplotlib") is None:
        raise UsageError(f"{output} is not drawn: that needs matplotlib; pip install 'unisono[bench]'")
    try:
        draw(curves, output)
    except (OSError, ValueError) as error:  # no such folder; no such format
        raise UsageError(f"--output {output}: {getattr(error, 'strerror', None) or error}") from error
