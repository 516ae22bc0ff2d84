"""Seals and measurements of ended runs, and seals that were changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.foresight.entries import PREDICTION, entry, measured

from unisono.errors import UsageError
from unisono.foresight.ended_runs import changed_seals, ended_run
from unisono.foresight.form import as_json
from unisono.foresight.seal import Seal, write_seal


def ended(folder: Path) -> Seal:
    """Seal and measure a run in a folder."""
    folder.mkdir(exist_ok=True)
    seal = write_seal(folder, PREDICTION)
    seal.measurement.write_bytes(as_json(replace(measured(0.05, 0.012), seal=seal.digest)))
    return seal


def change(seal: Seal) -> None:
    """Change the interval in a sealed file, as by hand."""
    seal.path.chmod(0o644)
    seal.path.write_text(seal.path.read_text().replace("0.0559", "0.0859"))


def test_the_newest_measured_seal_counts(tmp_path: Path) -> None:
    first = ended(tmp_path)
    assert ended_run(tmp_path) == (first, replace(measured(0.05, 0.012), seal=first.digest))
    second = write_seal(tmp_path, replace(PREDICTION, low=0.01))
    assert ended_run(tmp_path)[0] == first, "the resumed part has not ended"
    second.measurement.write_bytes(as_json(replace(measured(0.05, 0.012), seal=second.digest)))
    assert ended_run(tmp_path)[0] == second


def test_runs_that_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no run in .*none"):
        ended_run(tmp_path / "none")
    with pytest.raises(UsageError, match=r"has no sealed prediction: .*; train with --machine"):
        ended_run(tmp_path)
    write_seal(tmp_path, PREDICTION)
    with pytest.raises(UsageError, match=r"has no measurement: the run has not ended; .* train --resume .*"):
        ended_run(tmp_path)


def test_a_seal_that_was_changed_after_the_run_is_found_out(tmp_path: Path) -> None:
    seal = ended(tmp_path / "run")
    entries = [replace(entry(), run="run/prediction.json", digest=seal.digest), entry()]
    ledger = tmp_path / "ledger.jsonl"
    assert changed_seals(ledger, entries) == []
    change(seal)
    words = f"{seal.path} was changed after the run: its SHA-256 is "
    with pytest.raises(UsageError, match=words):
        ended_run(tmp_path / "run")
    (complaint,) = changed_seals(ledger, entries)
    assert complaint.startswith(words)
    assert seal.digest[:12] in complaint
    seal.path.write_text("{")
    (complaint,) = changed_seals(ledger, entries)
    assert "is no sealed prediction" in complaint
    seal.path.unlink()
    assert changed_seals(ledger, entries) == [], "a run may be removed: the ledger has its prediction"
