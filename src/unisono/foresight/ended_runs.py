"""Seals and measurements of ended runs, read back with a check that no seal was changed.

RUN/prediction.json ── SHA-256 ──┬── equal? ── the digest in RUN/measurement.json and in the ledger
                                 └── if not, the seal was changed after the run
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unisono.errors import UsageError
from unisono.foresight.ledger import LedgerEntry
from unisono.foresight.measurement import Measurement, read_measurement
from unisono.foresight.seal import Seal, read_seal, seals_of


def ended_run(folder: Path) -> tuple[Seal, Measurement]:
    """Return the newest seal of a run that has a measurement, and that measurement.

    Raises UsageError for a folder without seal or measurement, and for a seal that was changed after the run.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no run in {folder}")
    found = [read_seal(path) for path in seals_of(folder)]
    if not found:
        raise UsageError(
            f"{folder} has no sealed prediction: its rule or setting was not predicted; train with --machine"
        )
    measured = [seal for seal in found if seal.measurement.exists()]
    if not measured:
        raise UsageError(
            f"{folder} has no measurement: the run has not ended; continue it with unisono train --resume {folder}"
        )
    seal, measurement = measured[-1], read_measurement(measured[-1].measurement)
    if measurement.seal != seal.digest:
        raise UsageError(_changed(seal.path, seal.digest, measurement.seal))
    return seal, measurement


def changed_seals(ledger: Path, entries: Sequence[LedgerEntry]) -> list[str]:
    """Return a complaint for each entry whose seal is still there, but not as it was."""
    complaints = []
    for one in entries:
        path = ledger.parent / one.run
        if not one.run or not path.is_file():
            continue
        try:
            digest = read_seal(path).digest
        except UsageError as error:
            complaints.append(f"{error}; the ledger has it as it was")
            continue
        if digest != one.digest:
            complaints.append(_changed(path, digest, one.digest))
    return complaints


def _changed(path: Path, now: str, before: str) -> str:
    return f"{path} was changed after the run: its SHA-256 is {now[:12]}..., that of the seal was {before[:12]}..."
