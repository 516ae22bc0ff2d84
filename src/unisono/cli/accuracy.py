"""`unisono accuracy`: test accuracy of runs, or perplexity of texts, drawn against time and epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unisono.errors import UsageError


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
    from unisono.view.chart import write_picture

    curves = curves_of(runs)
    output = output or Path(f"{curves[0].measure.name}.svg")
    for curve in curves:
        print(summarize(curve))
    try:
        picture = draw(curves, form=output.suffix.removeprefix(".") or "svg")
    except ValueError as error:  # no such format
        raise UsageError(f"--output {output}: {error}") from error
    write_picture(output, picture, "--output")
