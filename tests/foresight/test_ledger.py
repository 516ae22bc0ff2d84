"""The ledger: lines are whole or alone, however many processes append, and whatever is torn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.foresight.entries import PREDICTION, entry, measured

from unisono.errors import UsageError
from unisono.foresight import ledger as module
from unisono.foresight.ledger import (
    append,
    calibrate,
    changed_seals,
    check_label,
    ended_run,
    labels_of,
    ledger_data,
    ledger_lines,
    part_errors,
    read,
)
from unisono.foresight.seal import Seal, write_seal
from unisono.tables import as_json

ROOT = Path(__file__).parents[2]

ENTRIES = [entry(0.05 + index / 1000, number=str(index), note='"{}\n') for index in range(3)]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The lines of three entries, each with its line feed."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    for run in ENTRIES:
        append(path, run)
    assert read(path) == (ENTRIES, [])
    return path.read_bytes().splitlines(keepends=True)


def reread(path: Path, content: bytes) -> tuple[list[str], list[str]]:
    """The numbers of the entries, and the complaints, of a ledger with this content."""
    path.write_bytes(content)
    entries, complaints = read(path)
    return [run.labels["number"] for run in entries], complaints


@given(data=st.data())
def test_bytes_torn_in_the_middle_of_a_line_lose_that_line_alone(
    data: st.DataObject, lines: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    victim = data.draw(st.integers(0, 2))
    line = lines[victim][:-1]
    begin = data.draw(st.integers(0, len(line) - 1))
    end = data.draw(st.integers(begin + 1, len(line)))
    put = data.draw(st.binary(max_size=40))
    changed = line[:begin] + put + line[end:]
    path = tmp_path_factory.getbasetemp() / "torn.jsonl"
    numbers, complaints = reread(path, b"".join([*lines[:victim], changed + b"\n", *lines[victim + 1 :]]))
    others = [str(index) for index in range(3) if index != victim]
    assert [number for number in numbers if number != str(victim)] == others
    if str(victim) in numbers:  # the same content in other bytes, such as another space
        assert read(path)[0][victim] == ENTRIES[victim]
    elif changed.strip():
        assert complaints
        assert all(complaint.startswith(f"{path}, line {victim + 1}") or put.count(b"\n") for complaint in complaints)


@given(cut=st.integers(1, 200))
def test_a_line_that_a_dying_process_left_torn_stays_alone(
    cut: int, lines: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "dying.jsonl"
    path.write_bytes(lines[0] + lines[1][:-cut])
    append(path, ENTRIES[2])
    entries, complaints = read(path)
    kept = [ENTRIES[0], ENTRIES[1], ENTRIES[2]] if cut == 1 else [ENTRIES[0], ENTRIES[2]]
    assert entries == kept, "only the line feed is missing after a cut of 1"
    assert len(complaints) == (cut > 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "it is torn, or no JSON"),
        (b'{"step": 3}', "it is no entry of a ledger"),
        (b"3", "it is no entry of a ledger"),
        (b'{"check": "00000000", "entry": {}}', "its bytes were changed"),
        (b'{"check": "a3a6bf43", "entry": {}}', "prediction is missing"),
    ],
)
def test_a_foreign_line_is_named_by_file_and_number(
    tmp_path: Path, lines: list[bytes], line: bytes, message: str
) -> None:
    path = tmp_path / "ledger.jsonl"
    numbers, complaints = reread(path, lines[0] + line + b"\n\n" + lines[1])
    assert numbers == ["0", "1"]
    (complaint,) = complaints
    assert complaint.startswith(f"{path}, line 2, is not used: {message}")


def test_a_step_of_no_time_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append(path, entry(0.0))
    assert read(path) == ([], [f"{path}, line 1, is not used: its measured step is not above 0 s"])


def test_an_entry_that_no_run_has_made_is_not_used(tmp_path: Path) -> None:
    path, made = tmp_path / "ledger.jsonl", entry()
    append(path, replace(made, measurement=replace(made.measurement, period=0)))
    append(path, replace(made, prediction=replace(made.prediction, sealed="")))
    (kept,), (complaint,) = read(path)
    assert "line 1, is not used: measurement.period = 0, but it has to be at least 1" in complaint
    assert labels_of(kept)["sealed"] == "-"


def test_processes_that_append_at_the_same_time_tear_nothing(tmp_path: Path) -> None:
    path, count, each = tmp_path / "ledger.jsonl", 4, 25
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.foresight.entries import entry\n"
        "from unisono.foresight.ledger import append\n"
        f"for number in range({each}):\n"
        "    append(Path(sys.argv[1]), entry(process=sys.argv[2], number=str(number), pad='x' * 5000))\n"
    )
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(process)], env={**os.environ, "PYTHONPATH": paths})
        for process in range(count)
    ]
    assert [process.wait() for process in started] == [0] * count
    entries, complaints = read(path)
    assert complaints == []
    labels = [(run.labels["process"], int(run.labels["number"])) for run in entries]
    assert sorted(labels) == [(str(process), index) for process in range(count) for index in range(each)]
    for process in range(count):
        mine = [index for who, index in labels if who == str(process)]
        assert mine == sorted(mine), "in the order in which they were appended"


def test_an_entry_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, write = [], os.write
    monkeypatch.setattr(module.os, "write", lambda file, content: writes.append(content) or write(file, content))
    append(tmp_path / "ledger.jsonl", ENTRIES[0])
    assert [write.count(b"\n") for write in writes] == [1]


def test_a_full_disk_is_reported_and_the_next_line_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "ledger.jsonl", os.write
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", lambda file, content: write(file, content[:10]))
        with pytest.raises(UsageError, match=r"cannot append to the ledger .*: 10 of \d+ bytes written; free space"):
            append(path, ENTRIES[0])
    append(path, ENTRIES[1])
    entries, complaints = read(path)
    assert entries == [ENTRIES[1]]
    assert len(complaints) == 1


def test_ledgers_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot append to the ledger .*: Is a directory"):
        append(tmp_path, ENTRIES[0])
    with pytest.raises(UsageError, match=r"cannot read the ledger .*: No such file"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "new.jsonl").touch()
    assert read(tmp_path / "new.jsonl") == ([], [])


def test_error_and_cover() -> None:
    assert entry(0.052).error == pytest.approx(0, abs=1e-12)
    assert entry(0.065).error == pytest.approx(0.2)
    assert [entry(step).covered for step in (0.047, 0.052, 0.057)] == [False, True, False]
    assert entry().prediction.has_interval


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
    (tmp_path / "log.txt").write_text("epoch 1\nno prediction is sealed: the run ended\nrun: r\n")
    with pytest.raises(UsageError, match=r"has no sealed prediction: the run ended$"):
        ended_run(tmp_path)
    write_seal(tmp_path, PREDICTION)
    with pytest.raises(UsageError, match=r"has no measurement: the run has not ended; .* train --resume .*"):
        ended_run(tmp_path)
    (tmp_path / "log.txt").write_text("epoch 1\nno measurement: the run has no step after the first 5 steps\n")
    with pytest.raises(UsageError, match=r"has no measurement: the run has no step after the first 5 steps$"):
        ended_run(tmp_path)


def test_a_seal_that_was_changed_after_the_run_is_found_out(tmp_path: Path) -> None:
    seal = ended(tmp_path / "run")
    entries = [replace(entry(), run="run/prediction.json", digest=seal.digest), entry()]
    ledger = tmp_path / "ledger.jsonl"
    assert changed_seals(ledger, entries) == []
    change(seal)
    message = f"{seal.path} was changed after the run: its SHA-256 is "
    with pytest.raises(UsageError, match=message):
        ended_run(tmp_path / "run")
    (complaint,) = changed_seals(ledger, entries)
    assert complaint.startswith(message)
    assert seal.digest[:12] in complaint
    seal.path.write_text("{")
    (complaint,) = changed_seals(ledger, entries)
    assert "is no sealed prediction" in complaint
    seal.path.unlink()
    assert changed_seals(ledger, entries) == [], "a run may be removed: the ledger has its prediction"


def test_a_seal_of_a_later_run_in_the_same_folder_is_not_a_changed_one(tmp_path: Path) -> None:
    seal, ledger = ended(tmp_path / "run"), tmp_path / "ledger.jsonl"
    entries = [replace(entry(), run="run/prediction.json", digest=digest) for digest in ("0" * 64, seal.digest)]
    assert changed_seals(ledger, entries) == []
    change(seal)
    assert len(changed_seals(ledger, entries)) == 2


def test_errors_and_cover_of_each_version() -> None:
    """The example of the module, and a version whose predictions have no interval."""
    entries = [entry(0.052), entry(0.054), entry(0.065)]
    (version,) = calibrate(entries)
    assert (version.group, version.runs, version.intervals, version.covered, version.share) == ("1.0", 3, 3, 2, 0.96)
    assert version.median == pytest.approx(0.002 / 0.054)
    assert version.high == pytest.approx(0.2 - 0.1 * (0.2 - 0.002 / 0.054))
    later = entry(0.104, "1.1")
    later = replace(later, prediction=replace(later.prediction, low=0.052, high=0.052))
    first, second = calibrate([later, *entries])
    assert first == version
    assert (second.group, second.median, second.intervals, second.share) == ("1.1", pytest.approx(0.5), 0, 0.0)


def test_groups_by_labels_and_by_facts() -> None:
    entries = [entry(links="fast"), entry(links="slow"), entry()]
    assert [calibration.group for calibration in calibrate(entries, "links")] == ["-", "fast", "slow"]
    assert [(calibration.group, calibration.runs) for calibration in calibrate(entries, "rule")] == [("bsp", 3)]
    assert labels_of(entry(rule="mine"))["rule"] == "mine"
    assert labels_of(entry())["sealed"] == "before"
    for by in ("links", "machine"):
        check_label(entries, by)
    with pytest.raises(UsageError, match=r"--by color: no run has this label; there are links, machine, model, "):
        check_label(entries, "color")
    check_label([], "color")


def test_the_worst_come_first() -> None:
    steps = [0.052, 0.030, 0.080, 0.055]
    lines = list(ledger_lines([entry(step) for step in steps], "rule"))[-4:]
    assert [line.partition("measured ")[2].partition(";")[0] for line in lines] == ["30 ms", "80 ms", "55 ms", "52 ms"]


def test_errors_of_parts_are_shares_of_the_measured_step() -> None:
    errors = part_errors(entry(0.065))
    assert list(errors) == ["step", "computing", "waiting", "loading", "exchanges", "updates"]
    assert errors["step"] == pytest.approx(-0.2)
    assert errors["computing"] + errors["waiting"] + errors["loading"] == pytest.approx(errors["step"])


def test_the_table_of_a_ledger() -> None:
    entries = [entry(0.052), entry(0.065), replace(entry(0.104, "1.1"), run="fast/prediction.json")]
    head, first, second, _, title, worst, *others = ledger_lines(entries, "version")
    assert head.split("  ")[0] == "version"
    assert first.split() == ["1.0", "2", "10.0%", "19.0%", "1", "of", "2,", "nominally", "96%"]
    assert second.split()[:4] == ["1.1", "1", "50.0%", "50.0%"]
    assert title.startswith("the largest errors")
    assert worst.startswith(
        " 50.0%  fast/prediction.json, 1.1: predicted 52 ms, measured 104.0 ms; computing took 130%"
    )
    assert [line.split()[0] for line in others] == ["20.0%", "0.0%"]


def test_runs_without_intervals() -> None:
    run = entry()
    run = replace(run, prediction=replace(run.prediction, low=0.052, high=0.052))
    assert next(line for line in ledger_lines([run], "rule") if line.startswith("bsp")).endswith("no intervals")


def test_the_form_of_a_ledgers_json() -> None:
    entries = [entry(0.065)]
    data = json.loads(json.dumps(ledger_data(entries, ["a complaint"], "rule")))
    assert data == {
        "by": "rule",
        "groups": [
            {
                **{"group": "bsp", "runs": 1, "intervals": 1, "covered": 0, "share": 0.96},
                **dict.fromkeys(("median", "high"), pytest.approx(0.2)),
            }
        ],
        "runs": [{**json.loads(json.dumps(asdict(entries[0]))), "error": pytest.approx(0.2), "covered": False}],
        "complaints": ["a complaint"],
    }
