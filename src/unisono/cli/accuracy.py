"""`unisono accuracy`: test accuracy of runs, or perplexity of texts, drawn against time and epochs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from unisono.errors import UsageError, install_command


def accuracy(
    runs: Annotated[list[Path], typer.Argument(help="Folders of one or more runs.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Output file; its suffix sets the format: svg, png, pdf. Default: accuracy.svg, perplexity.svg."
        ),
    ] = None,
) -> None:
    """Draw the test accuracy of runs, top-1 and top-5, against wall-clock time and against epochs.

    Runs on texts have their test perplexity drawn.
    """
    from unisono.training.curves import curves_of, draw, summarize

    curves = curves_of(runs)
    output = output or Path(f"{curves[0].measure.name}.svg")
    for curve in curves:
        print(summarize(curve))
    if find_spec("matplotlib") is None:
        raise UsageError(f"cannot draw {output}: matplotlib is not installed; {install_command('bench')}")
    try:
        draw(curves, output)
    except (OSError, ValueError) as error:  # no such folder; no such format
        raise UsageError(f"--output {output}: {getattr(error, 'strerror', None) or error}") from error
