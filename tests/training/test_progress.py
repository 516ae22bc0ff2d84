import re
from pathlib import Path

import pytest

from unisono.training.progress import ProgressDisplay
from unisono.training.trainer import KINDS

METRICS = {"epoch": 1, "loss": 0.5, "test_accuracy": 0.981, "samples_per_second": 1234.5}
SPLIT = {"loading": 1.0, "computing": 7.0, "waiting": 2.0, "communicating": 5.0, "updating": 0.5}


def row(lines: list[str], begin: str) -> str:
    """The one row of a table whose first column begins so, without its frame."""
    (match,) = [line for line in lines if line.strip("│ ").startswith(begin)]
    return " ".join(match.replace("│", " ").split())


def test_a_line_for_each_epoch_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(show=True, epochs=12) as report:
        report.step(0, 1, 2)
        report.epoch(METRICS)
    report.end([("test accuracy", "98.10%")], SPLIT)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epoch  1/12  loss 0.5000  test accuracy 98.10%  1,234 samples/s"
    assert row(lines, "test accuracy") == "test accuracy 98.10%"


def test_details_are_in_the_log_file_and_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in (False, True):
        with ProgressDisplay(show=True, epochs=1, verbose=verbose, log_file=tmp_path / "log.txt") as report:
            report.log("short")
            report.detail("long")
    assert capsys.readouterr().out.split() == ["short", "short", "long"]
    assert (tmp_path / "log.txt").read_text().split() == ["short", "long", "short", "long"]


def test_a_log_file_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(show=True, epochs=1, log_file=tmp_path) as report:
        report.log("one")
        report.log("two")
    assert capsys.readouterr().out.splitlines() == ["one", f"{tmp_path} gets no more lines: Is a directory", "two"]


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    for name, value in (
        ("TTY_COMPATIBLE", "1"),
        ("TTY_INTERACTIVE", "1"),
        ("COLUMNS", f"{columns}"),
        ("TERM", "xterm"),
    ):
        monkeypatch.setenv(name, value)


def test_a_narrow_terminal_folds_lines_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(monkeypatch, 60)
    message = " ".join(f"{index / 7:.3f}" for index in range(100))
    with ProgressDisplay(show=True, epochs=1, live=False) as report:
        report.log(message)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(line.strip() for line in lines) == message


def test_a_bar_has_the_loss_of_its_own_epoch_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(monkeypatch, 60)
    with ProgressDisplay(show=True, epochs=12) as report:
        report.step(0, 2, 2, 2.5)
        report.epoch(METRICS)
        capsys.readouterr()
        report.step(1, 1, 2, 0.25)
        report._bar.refresh()
        shown = capsys.readouterr().out
    (bar,) = [line for line in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown).split("\r") if "epoch 2/12" in line]
    assert re.match(r"epoch 2/12 [━╸╺]{10,} 1/2 loss 0\.2500 ", bar), bar
    assert "98.10%" not in bar


def test_the_first_five_guesses_are_reported_where_there_are_more_classes(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(show=True, epochs=12) as report:
        report.epoch({**METRICS, "test_top5": 0.9995})
    assert "test accuracy 98.10% (top-5 99.95%)  1,234 samples/s" in capsys.readouterr().out


def test_shares_are_of_what_follows_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Loading, computing and waiting make up the whole; what goes on beside them adds nothing to it."""
    with ProgressDisplay(show=True, epochs=1) as report:
        report.end([], SPLIT)
    lines = capsys.readouterr().out.splitlines()
    assert [row(lines, kind) for kind in ("loading", "computing", "waiting")] == [
        "loading 1.00 s 10.0%",
        "computing 7.00 s 70.0%",
        "waiting 2.00 s 20.0%",
    ]
    assert row(lines, "communicating") == "communicating, overlapped 5.00 s 50.0%"
    assert row(lines, "updating") == "updating, overlapped 0.50 s 5.0%"


def test_a_run_that_took_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(show=True, epochs=1) as report:
        report.end([], dict.fromkeys(KINDS, 0.0))
    assert row(capsys.readouterr().out.splitlines(), "waiting") == "waiting 0.00 s 0.0%"


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(show=False, epochs=12) as report:
        report.epoch(METRICS)
        report.end([], SPLIT)
    assert capsys.readouterr().out == ""
