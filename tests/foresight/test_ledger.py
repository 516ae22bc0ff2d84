"""The ledger: lines are whole or alone, however many processes append, and whatever is torn."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.foresight.entries import PREDICTION, entry, measured

from unisono.errors import UsageError
from unisono.foresight import ledger as module
from unisono.foresight.ledger import append, changed_seals, check_appendable, ended_run, read
from unisono.foresight.seal import Seal, write_seal
from unisono.tables import as_json

ROOT = Path(__file__).parents[2]

ENTRIES = [entry(0.05 + number / 1000, number=str(number), note='"{}\n') for number in range(3)]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The lines of three entries, each with its line feed."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    for one in ENTRIES:
        append(path, one)
    assert read(path) == (ENTRIES, [])
    return path.read_bytes().splitlines(keepends=True)


def reread(path: Path, content: bytes) -> tuple[list[str], list[str]]:
    """The numbers of the entries, and the complaints, of a ledger with this content."""
    path.write_bytes(content)
    entries, complaints = read(path)
    return [one.labels["number"] for one in entries], complaints


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
    others = [str(number) for number in range(3) if number != victim]
    assert [number for number in numbers if number != str(victim)] == others
    if str(victim) in numbers:  # the same content in other bytes, such as another space
        assert read(path)[0][victim] == ENTRIES[victim]
    elif changed.strip():
        assert complaints
        assert all(one.startswith(f"{path}, line {victim + 1}") or put.count(b"\n") for one in complaints)


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
    ("line", "words"),
    [
        (b"{", "it is torn, or no JSON"),
        (b'{"step": 3}', "it is no entry of a ledger"),
        (b"3", "it is no entry of a ledger"),
        (b'{"check": "00000000", "entry": {}}', "its bytes were changed"),
        (b'{"check": "a3a6bf43", "entry": {}}', "prediction is missing"),
    ],
)
def test_a_foreign_line_is_named_by_file_and_number(
    tmp_path: Path, lines: list[bytes], line: bytes, words: str
) -> None:
    path = tmp_path / "ledger.jsonl"
    numbers, complaints = reread(path, lines[0] + line + b"\n\n" + lines[1])
    assert numbers == ["0", "1"]
    (complaint,) = complaints
    assert complaint.startswith(f"{path}, line 2, is not used: {words}")


def test_a_step_of_no_time_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append(path, entry(0.0))
    assert read(path) == ([], [f"{path}, line 1, is not used: its measured step is not above 0 s"])


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
    assert [one.wait() for one in started] == [0] * count
    entries, complaints = read(path)
    assert complaints == []
    found = [(one.labels["process"], int(one.labels["number"])) for one in entries]
    assert sorted(found) == [(str(process), number) for process in range(count) for number in range(each)]
    for process in range(count):
        mine = [number for who, number in found if who == str(process)]
        assert mine == sorted(mine), "in the order in which they were appended"


def test_an_entry_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, write = [], os.write
    monkeypatch.setattr(module.os, "write", lambda file, content: writes.append(content) or write(file, content))
    append(tmp_path / "ledger.jsonl", ENTRIES[0])
    assert [one.count(b"\n") for one in writes] == [1]


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
    for refused in (lambda: append(tmp_path, ENTRIES[0]), lambda: check_appendable(tmp_path)):
        with pytest.raises(UsageError, match=r"cannot append to the ledger .*: Is a directory"):
            refused()
    with pytest.raises(UsageError, match=r"cannot read the ledger .*: No such file"):
        read(tmp_path / "none.jsonl")
    check_appendable(tmp_path / "new.jsonl")
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
