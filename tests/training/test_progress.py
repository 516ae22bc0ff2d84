import pytest

from unisono.training.progress import Report

METRICS = {"epoch": 1, "loss": 0.5, "test_accuracy": 0.981, "samples_per_second": 1234.5}
SPLIT = {"loading": 1.0, "computing": 7.0, "communicating": 1.0, "waiting": 1.0}


def test_a_line_for_each_epoch_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with Report(show=True, epochs=12) as report:
        report.step(0, 1, 2)
        report.epoch(METRICS)
    report.end([("test accuracy", "98.10%")], SPLIT)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epoch  1/12  loss 0.5000  test accuracy 98.10%  1,234 samples/s"
    assert any("computing" in line and "7.00 s" in line and "70.0%" in line for line in lines)


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Report(show=False, epochs=12) as report:
        report.epoch(METRICS)
        report.end([], SPLIT)
    assert capsys.readouterr().out == ""
