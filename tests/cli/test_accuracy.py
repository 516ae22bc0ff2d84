import sys
from pathlib import Path

import pytest
from tests.progress import Run

from unisono.training.run_directory import add_metrics


def test_runs_side_by_side(in_process: Run, tmp_path: Path) -> None:
    for name, top1 in (("one", 0.5), ("other", 0.75)):
        (tmp_path / name).mkdir()
        for epoch in (1, 2):
            add_metrics(tmp_path / name, {"epoch": epoch, "elapsed": 60.0 * epoch, "test_accuracy": top1 * epoch / 2})
    done = in_process("accuracy", "one", "other", "--output", "both.svg")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "one: 50.00% after 2 epochs, 2:00 min",
        "other: 75.00% after 2 epochs, 2:00 min",
    ]
    drawn = (tmp_path / "both.svg").read_text()
    assert ">one<" in drawn
    assert ">other<" in drawn
    for name, line in (("lacks", '{"epoch": 1}\n'), ("torn", "{epoch}\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(line)
    for arguments, message in (
        (("lacks",), "lacks/metrics.jsonl: a line has no 'elapsed'"),
        (("torn",), "torn/metrics.jsonl: a line is no JSON"),
        (("one", "nowhere"), "nowhere has no run with a finished epoch"),
        (("one", "--output", "no/picture.svg"), "--output no/picture.svg: No such file"),
        (("one", "--output", "picture.xyz"), "--output picture.xyz: Format 'xyz' is not supported"),
    ):
        done = in_process("accuracy", *arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert message in done.stderr


def test_the_loss_of_a_test_is_drawn_as_well(in_process: Run, tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        add_metrics(tmp_path, {"epoch": epoch, "elapsed": 60.0 * epoch, "test_accuracy": 0.5, "test_loss": 1 / epoch})
    done = in_process("accuracy", ".", "--loss")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{tmp_path.name}: loss 0.3333 after 3 epochs, 3:00 min"]
    assert ">test loss<" in (tmp_path / "loss.svg").read_text()


def test_without_matplotlib_the_error_names_the_extra(
    in_process: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_metrics(tmp_path, {"epoch": 1, "elapsed": 60.0, "test_accuracy": 0.5})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = in_process("accuracy", ".")
    assert done.returncode == 2
    assert "50.00% after 1 epochs" in done.stdout
    assert "pip install '.[view]'" in done.stderr
    assert not (tmp_path / "accuracy.svg").exists()
