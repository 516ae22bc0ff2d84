"""The command `unisono sweep`: real runs, and one clear line for bad input."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.progress import Run, Watched
from tests.usage_errors import assert_one_line_error

from unisono.launch import launch_environment

SETTINGS = ("compute.convolutions=library", "rule.overlap=chain", "exchange.bucket_megabytes=1", "training.epochs=2")
LEAN = tuple(part for change in SETTINGS for part in ("--set", change))

NETWORK = """
import time
from pathlib import Path
from torch import nn
class Slow(nn.Sequential):
    def forward(self, inputs):
        if Path("slow").exists():
            time.sleep(0.2)
        return super().forward(inputs)
def slow(classes, channels): return Slow(nn.Flatten(), nn.Linear(64, classes))
def bad(classes, channels): raise ValueError("no such width")
"""


@pytest.mark.launches
def test_sigterm_saves_and_resume_makes_the_rest(unisono: Run, tmp_path: Path) -> None:
    """One of three runs fails, on two ranks. The first one is stopped in its second epoch."""
    (tmp_path / "nets.py").write_text(NETWORK)
    (tmp_path / "slow").touch()
    grid = ("--set", "model.name=nets:slow,nets:bad", *LEAN)
    command = [sys.executable, "-m", "unisono", "sweep", "digits", *grid]
    first, second = (tmp_path / "sweeps/digits" / name for name in ("1-name=nets_slow", "2-name=nets_bad"))
    with Watched(command, cwd=tmp_path, env=launch_environment(os.environ, terminal=False)) as watched:
        watched.until((first / "metrics.jsonl").is_file)
        watched.process.terminate()
        done = watched.finish()
    assert done.returncode == 143, done.stderr
    assert "1/2  name=nets:slow  interrupted" in done.stdout
    assert done.stdout.splitlines()[-1] == "stopped by SIGTERM; resume with: unisono sweep --resume sweeps/digits"
    assert "on SIGTERM to" in (first / "output.txt").read_text()
    assert not second.exists()
    (tmp_path / "slow").unlink()
    done = unisono("sweep", "--resume", "sweeps/digits")
    assert done.returncode == 1, done.stderr
    assert "0 have ended before, 1 are resumed" in done.stdout
    assert "resumes after step" in (first / "output.txt").read_text()
    assert "2/2  name=nets:bad  failed, exit code 1: ValueError: no such width" in done.stdout
    content = json.loads((tmp_path / "sweeps/digits/sweep.json").read_text())
    assert [(run["status"], run.get("epochs")) for run in content["runs"]] == [("ended", 2), ("failed", None)]
    metrics = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert content["runs"][0]["test_accuracy"] == metrics[-1]["test_accuracy"]
    assert "nets:slow" in (tmp_path / "sweeps/digits/accuracy.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "missing recipe: unisono sweep RECIPE --set KEY=a,b"),
        (("digits",), "nothing to sweep"),
        (("digit", "--set", "rule.every=1,4"), "no recipe digit: did you mean digits?"),
        (("digits", "--set", "rule.evry=1,4"), "unknown key rule.evry; did you mean rule.every?"),
        (("digits", "--set", "rule.every=1,4,0"), "rule.every = 0, but it has to be at least 1"),
        (("digits", "--set", "rule.every=1,4", "--ranks", "0"), "ranks = 0, but it has to be at least 1"),
        (("--resume", "nowhere"), "nowhere holds no sweep: there is no sweep.json in it"),
        (("digits", "--resume", "nowhere"), "--resume nowhere takes recipe, grid and ranks from that folder"),
        (("--resume", "nowhere", "--folder", "x"), "omit all other arguments"),
    ],
)
def test_bad_input_is_refused_before_any_run(
    in_process: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert_one_line_error(in_process("sweep", *arguments), message)
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_a_launcher_cannot_sweep(command: Run) -> None:
    done = command("sweep", "digits", "--set", "rule.every=1,4", PMI_SIZE="2")
    assert_one_line_error(done, "start it without mpiexec or srun")
