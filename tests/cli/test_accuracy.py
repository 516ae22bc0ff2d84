import subprocess
from collections.abc import Callable
from pathlib import Path

from unisono.training.run_directory import add_metrics

Run = Callable[..., subprocess.CompletedProcess[str]]


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
    assert "one, top-1" in drawn
    assert "other, top-1" in drawn
    for arguments, words in (
        (("one", "nowhere"), "nowhere has no run with a finished epoch"),
        (("one", "--output", "no/picture.svg"), "--output no/picture.svg: No such file"),
        (("one", "--output", "picture.xyz"), "--output picture.xyz: Format 'xyz' is not supported"),
    ):
        done = in_process("accuracy", *arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert words in done.stderr


def test_without_matplotlib_the_error_names_the_extra(command: Run, tmp_path: Path) -> None:
    add_metrics(tmp_path, {"epoch": 1, "elapsed": 60.0, "test_accuracy": 0.5})
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'matplotlib' else found(name, *more)\n"
    )
    done = command("accuracy", ".", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "50.00% after 1 epochs" in done.stdout
    assert "pip install '.[bench]'" in done.stderr
    assert not (tmp_path / "accuracy.svg").exists()
