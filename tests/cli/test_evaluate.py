"""The command `unisono evaluate`: real ranks, and one clear line for bad input."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.usage_errors import assert_one_line_error

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_run_is_evaluated_as_it_was_tested(unisono: Run, in_process: Run, tmp_path: Path) -> None:
    done = unisono("train", "digits", "--set", "training.epochs=1", "--run", "mine")
    assert done.returncode == 0, done.stderr
    reported = json.loads((tmp_path / "mine/metrics.jsonl").read_text())
    done = unisono("evaluate", "mine", "--ranks", "2", "--throughput")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "mine: step 23, 360 samples of digits, 2 ranks"
    assert lines[-1] == "wrote mine/evaluation.json and mine/confusion.svg"
    found = json.loads((tmp_path / "mine/evaluation.json").read_text())
    assert found["top1"] == reported["test_accuracy"]
    assert found["top5"] == reported["test_top5"]
    assert any(re.search(rf"top-1 accuracy\W+{found['top1']:.2%}", line) for line in lines)
    assert [entry["batch"] for entry in found["throughput"]] == [2**power for power in range(9)]
    assert (tmp_path / "mine/confusion.svg").read_text().startswith("<svg")
    assert_one_line_error(in_process("evaluate", "mine", "--ranks", "0"), "--ranks 0")
    assert_one_line_error(
        in_process("evaluate", "mine", "--ranks", "1", "--pack", "p"), "--pack p: the run was trained"
    )
    (tmp_path / "mine/checkpoints").rename(tmp_path / "mine/gone")
    assert_one_line_error(in_process("evaluate", "mine", "--ranks", "1"), "mine has no checkpoint yet")
    done = unisono("evaluate", "mine", "--ranks", "2")
    assert_one_line_error(done, "mine has no checkpoint yet")


def test_a_folder_without_a_run_is_refused_before_ranks_start(in_process: Run) -> None:
    assert_one_line_error(in_process("evaluate", "nowhere"), "nowhere holds no run")
