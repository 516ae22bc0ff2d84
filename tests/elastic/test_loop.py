"""A loop of a user's own goes on after a death, with the bits of one that nothing disturbs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.progress import Run

PROGRAM = Path(__file__).with_name("summing.py")


@pytest.mark.launches
def test_a_loop_goes_on_from_the_state_that_was_kept(tmp_path: Path, unisono: Run, mpiexec: Run) -> None:
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    for folder in (disturbed, whole):
        folder.mkdir()
    done = unisono("run", "--elastic", "--ranks", "2", str(PROGRAM), str(disturbed), "8")
    assert done.returncode == 0, done.stderr
    assert "goes on" in done.stderr
    steps = [int(line) for line in (disturbed / "steps").read_text().split()]
    assert steps[: steps.index(8) + 1] == list(range(9))
    assert steps[steps.index(8) + 1] in range(1, 9), "a copy was kept after the first step at the latest"
    assert steps[-1] == 11
    plain = mpiexec(1, str(PROGRAM), str(whole), "-1")
    assert plain.returncode == 0, plain.stderr
    assert (disturbed / "hash").read_text() == (whole / "hash").read_text()
