"""Measures our part of a figure: the figure's command for each value of its axes, and the files that it writes.

    unisono bench shuffle --groups {groups} --output {out}        runs/9f2c41d07a3e/      shuffle.json, rows.json
    groups = [1, 2]                                          ─▶   runs/41b6a2f5c880/      shuffle.json, rows.json
                                                                  dimd-figure-9.json      the rows of both, by label

A run that has ended has `rows.json`, and is not repeated; figures with the same commands share their runs.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.files import write_atomically
from unisono.formats import format_bytes
from unisono.launch import available_cores
from unisono.papers.figures import MeasuredRow, PaperFigure, PaperMeasurement
from unisono.plan.machines import find_machine
from unisono.processor import processor
from unisono.tables import parse
from unisono.training.run_directory import METRICS, read_metrics

ROWS = "rows.json"

MIN_DRAWN_BYTES = 64 << 10
"""Smallest payload of a collective whose time is a row: below, only latency shows."""


class FigureRun(NamedTuple):
    """One call of a figure's command."""

    label: str
    """Values of its axes; empty where there are none."""
    command: str
    """Command with a place for its output."""

    def folder(self, results: Path) -> Path:
        """Return the folder of its output, the same for the same command."""
        return results / "runs" / hashlib.sha256(self.command.encode()).hexdigest()[:12]


def runs_of(figure: PaperFigure) -> list[FigureRun]:
    """Return the calls of a figure's command, one for each point of the grid of its axes."""
    axes = []
    for name, values in figure.axes.items():
        texts = values.items() if isinstance(values, Mapping) else [(f"{name} {value}", value) for value in values]
        axes.append([(name, label, str(text)) for label, text in texts])
    runs = []
    for point in itertools.product(*axes) if figure.measure else ():
        chosen = {name: text for name, _, text in point}
        command = figure.measure.format(out="{out}", **chosen)
        runs.append(FigureRun(", ".join(label for _, label, _ in point), command))
    return runs


def result_file(figure: PaperFigure, results: Path) -> Path:
    """Return the file of what has been measured for a figure."""
    return results / f"{figure.id}.json"


def with_own(figure: PaperFigure, results: Path) -> PaperFigure:
    """Return the figure with what the user has measured in a folder, where there is something."""
    path = result_file(figure, results)
    if not path.exists():
        return figure
    try:
        return replace(figure, measurement=parse(PaperMeasurement, json.loads(path.read_text()), str(path), UsageError))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}; remove it, and measure again") from error


def is_done(run: FigureRun, results: Path) -> bool:
    """Return True where a run has ended."""
    return (run.folder(results) / ROWS).exists()


def carry_out(run: FigureRun, results: Path) -> list[MeasuredRow]:
    """Run a command, unless it has ended before, and return its rows.

    Raises UsageError with the last line of its output where it fails.
    """
    folder = run.folder(results)
    if is_done(run, results):
        try:
            return [MeasuredRow(**row) for row in json.loads((folder / ROWS).read_text())]
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"cannot read {folder / ROWS}: {error}; remove {folder}, and measure again") from error
    shutil.rmtree(folder, ignore_errors=True)  # a run that was interrupted
    folder.parent.mkdir(parents=True, exist_ok=True)
    ours = [sys.executable, "-P", "-m", "unisono"]
    arguments = shlex.split(run.command)
    if not any(word == "{out}" for word in arguments) or "train" not in arguments:
        folder.mkdir()  # a run of training makes its own
    given = [part for word in arguments for part in (ours if word == "unisono" else [word.format(out=folder)])]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or [f"exit code {done.returncode}"]
        raise UsageError(f"{run.command.format(out=folder)}: {said[-1]}")
    rows = list(read_rows(folder))
    with write_atomically(folder / ROWS) as aside:
        aside.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return rows


def collect(figure: PaperFigure, results: Path) -> None:
    """Write what the runs of a figure have measured."""
    rows = []
    for run in runs_of(figure):
        for row in carry_out(run, results):
            if figure.only in ("", row.unit):
                rows.append(asdict(row) | {"name": f"{run.label}: {row.name}" if run.label else row.name})
    machine = f"{processor().name}, {len(available_cores())} cores, PyTorch {version('torch')}"
    date = datetime.datetime.now().astimezone().date().isoformat()
    content = {"date": date, "machine": machine, "command": figure.measure, "rows": rows}
    with write_atomically(result_file(figure, results)) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n")


def read_rows(folder: Path) -> Iterator[MeasuredRow]:
    """Yield the rows of what a command has written into a folder."""
    for path in sorted(folder.iterdir()):
        if path.name in READERS:
            yield from READERS[path.name](path)


def _row(name: str, unit: str, samples: Sequence[float]) -> MeasuredRow:
    digits = [float(f"{value:.4g}") for value in (statistics.median(samples), min(samples), max(samples))]
    return MeasuredRow(name, unit, *digits)


def _training(path: Path) -> Iterator[MeasuredRow]:
    """Yield the times of the epochs after the first, and the losses and the test of the last."""
    lines = read_metrics(path.parent)
    yield _row("an epoch", "s", [line["seconds"] for line in lines[1:] or lines])
    for name, key in {"computing": "computing", "exchange": "communicating", "waiting": "waiting"}.items():
        sums = [0.0, *(line[key] for line in lines)]  # of the run so far
        took = [after - before for before, after in itertools.pairwise(sums)]
        yield _row(f"{name} in an epoch", "s", took[1:] or took)
    last = lines[-1]
    yield _row("test accuracy", "%", [100 * last["test_accuracy"]])
    if "test_top5" in last:
        yield _row("top-5 accuracy", "%", [100 * last["test_top5"]])
        yield _row("top-5 error", "%", [100 - 100 * last["test_top5"]])
    yield _row("test loss", "", [last["test_loss"]])
    yield _row("training loss", "", [last["loss"]])
    yield _row("the whole run", "s", [last["elapsed"]])


def _networks(path: Path) -> Iterator[MeasuredRow]:
    """Yield the rates of training steps and of scoring: ours, and PyTorch's as it is."""
    for row in json.loads(path.read_text())["networks"]:
        for contender in ("ours", "stock"):
            for work, key in (("training", "seconds"), ("scoring", "scoring")):
                rates = [row["batch"] / seconds for seconds in row[key][contender]]
                yield _row(f"{row['network']}, {work}, {contender}", "images/s", rates)


def _layers(path: Path) -> Iterator[MeasuredRow]:
    """Yield the time of each pass of each layer, also by each algorithm, and of products their share of the peak."""
    results = json.loads(path.read_text())
    for row in results["rows"]:
        name = f"{row['layer']}, {row['pass_name']}"
        peak = row["operations"] / results["peak"]["operations_per_second"]
        for by, seconds in (("", row["seconds"]), *((f" by {way}", took) for way, took in row["times"].items())):
            yield _row(f"{name}{by}", "ms", [1e3 * seconds])
            if row["operations"]:
                yield _row(f"{name}{by}: share of peak", "%", [100 * peak / seconds])


def _collectives(path: Path) -> Iterator[MeasuredRow]:
    """Yield the times of each contender with long payloads."""
    for size in json.loads(path.read_text())["sizes"]:
        for contender, took in size["contenders"].items() if size["bytes"] >= MIN_DRAWN_BYTES else ():
            samples = [took[key] / 1e3 for key in ("low_us", "median_us", "high_us")]
            yield _row(f"{contender}, {format_bytes(size['bytes'])}", "ms", samples)


def _messages(path: Path) -> Iterator[MeasuredRow]:
    """Yield the latency of short messages and the bandwidth of long ones, from the file of a probe."""
    link = find_machine(str(path)).link
    yield _row("latency of 4 bytes", "ms", [1e3 * link.latency])
    yield _row("bandwidth of long messages", "MB/s", [link.bandwidth / 1e6])


def _listed(path: Path) -> Iterator[MeasuredRow]:
    """Yield rows that are there as such: a name, a unit and samples."""
    for row in json.loads(path.read_text()):
        yield _row(row["name"], row["unit"], row["samples"])


READERS: Mapping[str, Callable[[Path], Iterator[MeasuredRow]]] = {
    METRICS: _training,
    "networks.json": _networks,
    "layers.json": _layers,
    "results.json": _collectives,
    "probe.toml": _messages,
    **dict.fromkeys(("shuffle.json", "memory.json", "messages.json", "ablation.json", "storage.json"), _listed),
}
"""Readers of the files that commands write."""
