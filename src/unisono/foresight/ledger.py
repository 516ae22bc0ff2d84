"""Ledger of runs: a line of JSON for each, with its sealed prediction and its measurement.

    {"check": "5f0c...", "entry": {"digest": ..., "labels": ..., "measurement": ..., "prediction": ..., "run": ...}}

    run A ─ lock ─ write, fsync ─ unlock ──────────────▶ ledger.jsonl        one write a line, behind the last line:
    run B ──────── waits ────────── lock ─ write, ... ─▶                     O_APPEND and a lock keep them apart

`check` is the CRC-32 of the entry: a line with changed bytes is not used. A line that a dying process left torn stays
alone: the next one begins on a line of its own. `docs/planning_accuracy.md` has more of both.

Calibration are the errors of predictions and the cover of their intervals, by version or by any label:

    version  runs  error: median, 95th percentile   within the interval        error = |predicted - measured| / measured
    0.1.0      40           3.1%            9.8%    37 of 40, nominally 96%

Worked example: steps of 50, 52 and 60 ms, each predicted as 50 ms +- 7.5%: errors 0, 3.8 and 16.7%, in the median 3.8%,
and 2 of 3 within the interval.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.files import locked, naming_os_errors
from unisono.foresight.compare import errors_of, explain, ms
from unisono.foresight.seal import Measurement, Seal, SealedPrediction, read_measurement, read_seal, seals_of
from unisono.formats import text_table
from unisono.tables import parse

LEDGER = "ledger.jsonl"
"""Name of the ledger beside the folders of its runs."""

NO_MEASUREMENT = "no measurement: "
"""Begin of the line in the log of a run that has ended without a measurement."""


@dataclass(frozen=True)
class LedgerEntry:
    """Run with its prediction and its measurement."""

    prediction: SealedPrediction
    measurement: Measurement
    version: str
    """Version of Unisono that measured."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels to group runs by."""
    run: str = ""
    """Path of the seal, relative to the ledger's folder where it lies below; empty without a file."""
    digest: str = ""
    """SHA-256 of the seal; empty without a file."""

    @property
    def error(self) -> float:
        """Error of the predicted step, relative to the measured one."""
        return abs(self.prediction.step - self.measurement.step.median) / self.measurement.step.median

    @property
    def covered(self) -> bool:
        """True where the measured step is within the interval."""
        return self.prediction.low <= self.measurement.step.median <= self.prediction.high


def append(path: Path, entry: LedgerEntry) -> None:
    """Append an entry to a ledger, which is made where there is none. Processes may append at the same time.

    Raises UsageError where it cannot be written whole.
    """
    content = json.dumps(asdict(entry), sort_keys=True, allow_nan=False).encode()
    line = b'{"check": "%08x", "entry": %s}\n' % (zlib.crc32(content), content)
    # on a file system without locks the kernel appends one write after another
    failing = naming_os_errors(f"cannot append to the ledger {path}")
    with failing, path.open("ab+", buffering=0) as file, locked(path):
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            line = b"\n" + line
        written = os.write(file.fileno(), line)
        os.fsync(file)
    if written < len(line):
        raise UsageError(f"cannot append to the ledger {path}: {written} of {len(line)} bytes written; free space")


def read(path: Path) -> tuple[list[LedgerEntry], list[str]]:
    """Return the entries of a ledger, and a complaint for each line that is none: it names the file and the line.

    Raises UsageError where the file cannot be read.
    """
    with naming_os_errors(f"cannot read the ledger {path}"):
        content = path.read_bytes()
    entries, complaints = [], []
    for line_number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entries.append(_entry_of(line, f"{path}, line {line_number}, is not used"))
        except UsageError as error:
            complaints.append(str(error))
    return entries, complaints


def _entry_of(line: bytes, source: str) -> LedgerEntry:
    """Return the entry of a line. Raises UsageError, which begins with `source`, for a torn and for a foreign one."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: it is torn, or no JSON") from error
    if not isinstance(data, dict) or "check" not in data or "entry" not in data:
        raise UsageError(f"{source}: it is no entry of a ledger")
    content = json.dumps(data["entry"], sort_keys=True).encode()
    if data["check"] != f"{zlib.crc32(content):08x}":
        raise UsageError(f"{source}: its bytes were changed: it does not match its check")
    entry = parse(LedgerEntry, data["entry"], source, UsageError, strict=False)
    if not entry.measurement.step.median > 0:
        raise UsageError(f"{source}: its measured step is not above 0 s")
    return entry


def ended_run(folder: Path) -> tuple[Seal, Measurement]:
    """Return the newest seal of a run that has a measurement, and that measurement.

    Raises UsageError for a folder without seal or measurement, and for a seal that was changed after the run.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no run in {folder}")
    seals = [read_seal(path) for path in seals_of(folder)]
    said = (folder / "log.txt").read_text().splitlines() if (folder / "log.txt").is_file() else []
    if not seals:
        why = [line.partition(": ")[2] for line in said if line.startswith("no prediction is sealed")]
        known = why[-1] if why else "its rule or setting was not predicted; train with --machine"
        raise UsageError(f"{folder} has no sealed prediction: {known}")
    measured = [seal for seal in seals if seal.measurement.exists()]
    if not measured and (why := [line for line in said if line.startswith(NO_MEASUREMENT)]):
        raise UsageError(f"{folder} has {why[-1]}")
    if not measured:
        raise UsageError(
            f"{folder} has no measurement: the run has not ended; continue it with unisono train --resume {folder}"
        )
    seal, measurement = measured[-1], read_measurement(measured[-1].measurement)
    if not measurement.seal:
        raise UsageError(f"{folder} was resumed with other settings than those of its seal, and has none for them")
    if measurement.seal != seal.digest:
        raise UsageError(_changed(seal.path, seal.digest, measurement.seal))
    return seal, measurement


def changed_seals(ledger: Path, entries: Sequence[LedgerEntry]) -> list[str]:
    """Return a complaint for each entry whose seal is still there, but not as it was, and is not that of another entry:
    a run whose folder was removed, and used again."""
    complaints, known = [], {(entry.run, entry.digest) for entry in entries}
    for entry in entries:
        path = ledger.parent / entry.run
        if not entry.run or not path.is_file():
            continue
        try:
            digest = read_seal(path).digest
        except UsageError as error:
            complaints.append(f"{error}; the ledger has it as it was")
            continue
        if (entry.run, digest) not in known:
            complaints.append(_changed(path, digest, entry.digest))
    return complaints


def _changed(path: Path, now: str, before: str) -> str:
    return f"{path} was changed after the run: its SHA-256 is {now[:12]}..., that of the seal was {before[:12]}..."


WORST = 5
"""Number of runs with the largest errors that are listed."""


class Calibration(NamedTuple):
    """Errors of a group of runs. Errors and shares are relative, 0 to 1 and more."""

    group: str
    runs: int
    median: float
    high: float
    """95th percentile."""
    intervals: int
    """Runs whose prediction has an interval."""
    covered: int
    """Runs whose measured step is within it."""
    share: float
    """Nominal share of covered runs, mean over the intervals; 0 without any."""


def calibrate(entries: Sequence[LedgerEntry], by: str = "version") -> list[Calibration]:
    """Return the calibration of each group, in the order of their names."""
    calibrations = []
    for name, runs in grouped(entries, by).items():
        median, high = np.percentile([run.error for run in runs], [50, 95]).tolist()
        shares = [run.prediction.share for run in runs if run.prediction.has_interval]
        covered = sum(run.covered for run in runs if run.prediction.has_interval)
        share = float(np.mean(shares)) if shares else 0.0
        calibrations.append(Calibration(name, len(runs), median, high, len(shares), covered, share))
    return calibrations


def grouped(entries: Sequence[LedgerEntry], by: str) -> dict[str, list[LedgerEntry]]:
    """Return the runs by their values of a label, in the order of these; "-" has those that lack it."""
    groups: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        groups.setdefault(labels_of(entry).get(by, "-"), []).append(entry)
    return dict(sorted(groups.items()))


def check_label(entries: Sequence[LedgerEntry], by: str) -> None:
    """Raise UsageError, listing the labels, for one that no run has."""
    known = sorted({name for entry in entries for name in labels_of(entry)})
    if entries and by not in known:
        raise UsageError(f"--by {by}: no run has this label; there are {', '.join(known)}")


def labels_of(entry: LedgerEntry) -> Mapping[str, str]:
    """Return what a run can be grouped by: facts of its prediction, and labels of its own."""
    run = entry.prediction.run
    return {
        "version": entry.version,
        "sealed": entry.prediction.sealed.partition(" ")[0] or "-",
        "recipe": run.recipe,
        "model": run.model,
        "rule": run.rule,
        "machine": run.machine or "-",
        "ranks": str(run.ranks),
        "nodes": str(run.nodes),
        "overlap": entry.prediction.program.overlap,
        "wire": entry.prediction.program.wire or "-",
        **entry.labels,
    }


def ledger_lines(entries: Sequence[LedgerEntry], by: str) -> Iterator[str]:
    """Yield a table of the groups, and the worst runs with the cost that was wrong."""
    rows = [(by, "runs", "error, median", "95th percentile", "within the interval")]
    for name, runs, median, high, intervals, covered, share in calibrate(entries, by):
        cover = f"{covered} of {intervals}, nominally {share:.0%}" if intervals else "no intervals"
        rows.append((name, str(runs), f"{median:.1%}", f"{high:.1%}", cover))
    yield from text_table(rows, left={0})
    yield ""
    yield "the largest errors of a step, |predicted - measured| / measured:"
    for entry in sorted(entries, key=lambda run: run.error, reverse=True)[:WORST]:
        name = entry.run or entry.prediction.run.recipe
        step = f"predicted {ms(entry.prediction.step)}, measured {ms(entry.measurement.step.median)}"
        yield f"{entry.error:6.1%}  {name}, {entry.version}: {step}; {explain(entry.prediction, entry.measurement)}"


def ledger_data(entries: Sequence[LedgerEntry], complaints: Sequence[str], by: str) -> dict[str, Any]:
    """Return the groups, the runs and the complaints as data for JSON: seconds, and shares of 1."""
    return {
        "by": by,
        "groups": [group._asdict() for group in calibrate(entries, by)],
        "runs": [{**asdict(entry), "error": entry.error, "covered": entry.covered} for entry in entries],
        "complaints": list(complaints),
    }


def part_errors(entry: LedgerEntry) -> dict[str, float]:
    """Return the errors of a run's parts: predicted less measured seconds, over those of the measured step."""
    parts = errors_of(entry.prediction, entry.measurement)
    return {name: -error.off / entry.measurement.step.median for name, error in parts.items()}
