"""Progress of a run on the screen: bars on a terminal, a line for each epoch elsewhere, a table at the end.

log      shown, and written to the run's log file
detail   written to the log file; shown too with `verbose`
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from unisono.training.measures import describe_speed, describe_test
from unisono.training.trainer import CONCURRENT_KINDS, SEQUENTIAL_KINDS


class ProgressDisplay:
    """Shows a run's progress if `show`; shows nothing on other ranks."""

    def __init__(
        self, show: bool, epochs: int, live: bool = True, verbose: bool = False, log_file: Path | None = None
    ) -> None:
        """Make a display: `live`, with bars on a terminal, which one rank alone can have; `verbose`, with details. All
        lines are appended to `log_file`."""
        self.console = Console(file=sys.stdout, quiet=not show, highlight=False, emoji=False)
        self.console.soft_wrap = not self.console.is_terminal  # a terminal's lines are folded between words
        self._epochs, self._verbose = epochs, verbose
        self._log_file = log_file if show else None
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}/" + str(epochs)),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not (show and live and self.console.is_terminal),
        )
        self._task = self._bar.add_task("", epoch=1, loss="", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def log(self, line: str) -> None:
        self.console.print(line, markup=False)
        self._write(line)

    def detail(self, line: str) -> None:
        """Write a line of text for those who want to know more to the log file, and print it if they have said so."""
        if self._verbose:
            self.log(line)
        else:
            self._write(line)

    def _write(self, line: str) -> None:
        if self._log_file is None:
            return
        try:
            with self._log_file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:  # the run itself does not need it
            self.console.print(f"{self._log_file} gets no more lines: {error.strerror or error}", markup=False)
            self._log_file = None

    def step(self, epoch: int, step: int, steps: int, loss: float | None = None) -> None:
        """Show that `step` of `steps` steps of an epoch are done, the last with `loss`; epochs count from 0."""
        text = "" if loss is None else f"loss {loss:.4f}"
        self._bar.update(self._task, epoch=epoch + 1, completed=step, total=steps, loss=text)

    def epoch(self, metrics: dict[str, Any]) -> None:
        self._bar.update(self._task, loss="")
        count = f"{metrics['epoch']:>{len(str(self._epochs))}}/{self._epochs}"
        self.log(f"epoch {count}  loss {metrics['loss']:.4f}  {describe_test(metrics)}  {describe_speed(metrics)}")

    def end(self, rows: list[tuple[str, str]], split: Mapping[str, float]) -> None:
        """Print the table at the end: results, and the split of time (seconds, mean over ranks)."""
        self._bar.stop()  # the table stays below everything else
        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in rows:
            table.add_row(name, value)
        total = sum(split[kind] for kind in SEQUENTIAL_KINDS) or 1.0
        for kinds, what in ((SEQUENTIAL_KINDS, ""), (CONCURRENT_KINDS, ", overlapped")):
            table.add_section()
            for kind in kinds:
                table.add_row(f"{kind}{what}", f"{split[kind]:.2f} s  {split[kind] / total:6.1%}")
        self.console.print(table)
