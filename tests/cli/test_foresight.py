"""The command `unisono foresight`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.foresight.entries import entry
from tests.foresight.test_ledger import change, ended
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.foresight.ledger import append


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A ledger of three runs at the default place, with a torn line."""
    path = tmp_path / "runs" / "ledger.jsonl"
    path.parent.mkdir()
    append(path, entry(0.055, links="slow"))
    append(path, entry(0.065, links="fast"))
    with path.open("ab") as file:
        file.write(b'{"check": "5f0')
    append(path, entry(0.050, "1.1", links="fast"))
    return path


def test_a_table_by_version_and_the_torn_line(in_process: Run, ledger: Path) -> None:
    done = in_process("foresight")
    assert done.returncode == 0
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:3]] == [["1.0", "2"], ["1.1", "1"]]
    assert done.stderr == "unisono: runs/ledger.jsonl, line 3, is not used: it is torn, or no JSON\n"


def test_json_by_a_label(in_process: Run, ledger: Path) -> None:
    done = in_process("foresight", str(ledger), "--by=links", "--json")
    data = json.loads(done.stdout)
    assert [(group["group"], group["runs"]) for group in data["groups"]] == [("fast", 2), ("slow", 1)]
    assert len(data["complaints"]) == 1


def test_a_chart(in_process: Run, ledger: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert in_process("foresight", "--by=links", "--chart=calibration.svg").returncode == 0
    assert "links slow" in (tmp_path / "calibration.svg").read_text()


def test_a_changed_seal_is_named(in_process: Run, tmp_path: Path) -> None:
    seal = ended(tmp_path / "run")
    append(tmp_path / "ledger.jsonl", replace(entry(), run="run/prediction.json", digest=seal.digest))
    assert in_process("foresight", "ledger.jsonl").stderr == ""
    change(seal)
    (line,) = in_process("foresight", "ledger.jsonl").stderr.splitlines()
    assert line.startswith("unisono: run/prediction.json was changed after the run: its SHA-256 is ")


def test_bad_input(in_process: Run, ledger: Path, tmp_path: Path) -> None:
    assert_one_line_error(in_process("foresight", "none.jsonl"), "cannot read the ledger none.jsonl: No such file")
    assert_one_line_error(in_process("foresight", "--by=color"), "--by color: no run has this label; there are ")
    (tmp_path / "empty.jsonl").touch()
    assert_one_line_error(in_process("foresight", "empty.jsonl"), "empty.jsonl has no runs")
