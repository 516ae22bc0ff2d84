"""`unisono papers`: the tables and figures of the five papers, theirs beside ours; measures and draws ours."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.papers.figures import PaperFigure


def papers(
    figures: Annotated[list[str] | None, Argument(help="Figures, as dimd-figure-7; with none, all are listed.")] = None,
    measure: Annotated[
        bool, Option("--measure", help="Measure ours on this machine; what has been measured is not repeated.")
    ] = False,
    picture: Annotated[
        Path | None, Option(help="Output file for theirs beside ours; its suffix sets the format: svg, png, pdf.")
    ] = None,
    folder: Annotated[Path, Option(help="Folder of what is measured here.")] = Path("papers"),
) -> None:
    """Print the papers' tables and figures: theirs, ours predicted, ours measured, and the commands that repeat them.

    Predictions are for the papers' own machines and sizes. Measurements are small, and of the machine that is named:
    ours came with this release, until --measure has made those of your machine. Many need root, for `unisono lab`.
    """
    from unisono.papers.figures import counted, find_figure
    from unisono.papers.measure import with_own
    from unisono.papers.report import listing, report

    chosen = [find_figure(name) for name in figures or ()] or counted()
    if picture is not None and len(chosen) != 1:
        raise UsageError(f"--picture {picture}: a picture is of one figure; name it")
    failed = measure and _measure(chosen, folder)
    shown = [with_own(figure, folder) for figure in chosen]
    if picture is not None:
        from unisono.papers.report import draw
        from unisono.view.chart import write_drawing

        write_drawing(picture, partial(draw, shown[0]), "--picture")
    if figures:
        print("\n\n".join("\n".join(report(figure)) for figure in shown))
    else:
        print("\n".join(listing(shown)))
    if failed:
        raise Exit(1)


def _measure(figures: Sequence[PaperFigure], folder: Path) -> bool:
    """Carry out what has not been measured yet of these figures. Return True where a command failed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from unisono.papers.measure import carry_out, collect, runs_of

    console, failed = Console(file=sys.stderr, markup=False, highlight=False, soft_wrap=True), False
    todo = {figure.id: runs_of(figure) for figure in figures}
    runs, begun, since = sum(map(len, todo.values())), 0, time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=runs)
        for figure in figures:
            missing = False
            for run in todo[figure.id]:
                begun += 1
                progress.update(task, description=f"{figure.id} {run.label}")
                if not console.is_terminal:  # a log has no bar
                    minutes = (time.monotonic() - since) / 60
                    console.print(f"{minutes:5.1f} min  {begun} of {runs}  {figure.id} {run.label}".rstrip())
                try:
                    carry_out(run, folder)
                except (UsageError, OSError) as error:
                    console.print(f"unisono: {figure.id}: {error}")
                    missing = True
                progress.advance(task)
            if todo[figure.id] and not missing:
                collect(figure, folder)
            elif not todo[figure.id] and len(figures) == 1:
                console.print(f"{figure.id} has no measurement: {figure.none or 'it is predicted'}")
            failed |= missing
    return failed
