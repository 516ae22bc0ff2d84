import pytest

from unisono.training.progress import ProgressDisplay
from unisono.training.recorder import KINDS

METRICS = {"epoch": 1, "loss": 0.5, "test_accuracy": 0.981, "samples_per_second": 1234.5}
SPLIT = {"loading": 1.0, "computing": 7.0, "waiting": 2.0, "communicating": 5.0, "updating": 0.5}


def row(lines: list[str], begin: str) -> str:
    """The one row of a table whose first column begins so, without its frame."""
    (found,) = [line for line in lines if line.strip("│ ").startswith(begin)]
    return " ".join(found.replace("│", " ").split())


def test_a_line_for_each_epoch_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(show=True, epochs=12) as report:
        report.step(0, 1, 2)
        report.epoch(METRICS)
    report.end([("test accuracy", "98.10%")], SPLIT)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epoch  1/12  loss 0.5000  test accuracy 98.10%  1,234 samples/s"
    assert row(lines, "test accuracy") == "test accuracy 98.10%"


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
