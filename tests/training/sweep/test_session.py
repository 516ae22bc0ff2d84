from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.errors import UsageError, install_command
from unisono.training.run_directory import RunLock
from unisono.training.sweep.grid import Sweep, open_sweep
from unisono.training.sweep.run import plan_given, run_session

Plan = Callable[..., Sweep]


def test_a_sweep_and_its_report(program: tuple[str, ...], planned: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = planned("optimizer.learning_rate=0.1,666,0.2", "training.seed=0,1")
    assert run_session(sweep, program) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:7] == [
        "6 runs into sweep; each writes its output to NAME/output.txt",
        "1/6  learning_rate=0.1, seed=0  test accuracy 12.00%  4.0 s",
        "2/6  learning_rate=0.1, seed=1  test accuracy 12.10%  4.0 s",
        "3/6  learning_rate=666, seed=0  failed, exit code 1: ValueError: no such rate  "
        "(sweep/3-learning_rate=666-seed=0/output.txt)",
        "4/6  learning_rate=666, seed=1  failed, exit code 1: ValueError: no such rate  "
        "(sweep/4-learning_rate=666-seed=1/output.txt)",
        "5/6  learning_rate=0.2, seed=0  test accuracy 22.00%  4.0 s",
        "6/6  learning_rate=0.2, seed=1  test accuracy 22.10%  4.0 s",
    ]
    assert any(re.search(r"0\.2 .* 1 .* 22\.10% .* 22\.10% \(2\) .* 4\.0 s .* 150 .* best", line) for line in lines)
    assert any(re.search(r"0\.2 .* 22\.05% .* 0\.07% .* 2 of 2", line) for line in lines)
    assert lines[-1] == "sweep: sweep/sweep.md"
    content = json.loads(Path("sweep/sweep.json").read_text())
    assert content["best"] == "6-learning_rate=0.2-seed=1"
    pytest.importorskip("matplotlib")
    assert "![heat map](heat_map.svg)\n\n![accuracy](accuracy.svg)\n" in Path("sweep/sweep.md").read_text()
    assert "22.10%" in Path("sweep/heat_map.svg").read_text()
    assert "learning_rate=0.2, seed=1" in Path("sweep/accuracy.svg").read_text()
    assert not Path("sweep/.lock").exists()


def test_the_same_command_continues(
    program: tuple[str, ...], planned: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = planned("optimizer.learning_rate=0.1,666")
    assert run_session(sweep, program) == 1
    Path("repaired").touch()
    for given, expected in (
        (lambda: sweep, "1 have ended before, 1 are resumed"),
        (lambda: open_sweep(Path("sweep"))[0], "2 have ended before, 0 are"),
    ):
        capsys.readouterr()
        assert run_session(given(), program) == 0
        assert expected in capsys.readouterr().out
    assert not Path("sweep/heat_map.svg").exists()


def test_without_matplotlib_a_sweep_has_its_page_and_names_the_remedy(
    program: tuple[str, ...], planned: Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_session(planned("optimizer.learning_rate=0.1,0.2", "training.seed=0,1"), program) == 0
    assert f"no pictures, as matplotlib is not installed: {install_command('view')}" in capsys.readouterr().out
    assert "12.00%" in Path("sweep/sweep.md").read_text()
    assert not list(Path("sweep").glob("*.svg"))


def test_another_sweep_in_the_folder_is_refused(program: tuple[str, ...], planned: Plan) -> None:
    assert run_session(planned("optimizer.learning_rate=0.1,0.2"), program) == 0
    before = {path: path.read_bytes() for path in Path("sweep").rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"holds a sweep over optimizer\.learning_rate=0\.1,0\.2, not"):
        run_session(planned("optimizer.learning_rate=0.1,0.3"), program)
    assert {path: path.read_bytes() for path in Path("sweep").rglob("*") if path.is_file()} == before


def test_one_sweep_at_a_time(program: tuple[str, ...], planned: Plan) -> None:
    sweep = planned("optimizer.learning_rate=0.1,0.2")
    sweep.folder.mkdir()
    lock = RunLock()
    lock.take(sweep.folder)
    try:
        with pytest.raises(UsageError, match="sweep is in use by process"):
            run_session(sweep, program)
    finally:
        lock.release()


def test_a_folder_that_cannot_be_made_is_named(program: tuple[str, ...], planned: Plan) -> None:
    Path("sweep").write_text("a file")
    with pytest.raises(UsageError, match="cannot create the sweep's folder sweep: File exists"):
        run_session(planned("optimizer.learning_rate=0.1,0.2"), program)
    with pytest.raises(UsageError, match="nowhere holds no sweep"):
        open_sweep(Path("nowhere"))
    assert not Path("nowhere").exists()


def test_the_default_folder_has_the_name_of_the_recipe() -> None:
    assert plan_given(Path("digits"), ["rule.every=1,4"], None, None).folder == Path("sweeps/digits")
