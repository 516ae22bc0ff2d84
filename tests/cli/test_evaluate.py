"""The command `unisono evaluate`: real ranks, and one clear line for bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error


def test_a_run_is_evaluated_as_it_was_tested(on_ranks: Run, in_process: Run, tmp_path: Path) -> None:
    lean = ("--set", "compute.convolutions=library", "--set", "rule.overlap=chain")
    done = on_ranks("train", "digits", "--set", "training.epochs=1", *lean, "--run", "mine")
    assert done.returncode == 0, done.stderr
    reported = json.loads((tmp_path / "mine/metrics.jsonl").read_text())
    done = on_ranks("evaluate", "mine", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "mine: step 23, 360 samples of digits, 2 ranks"
    assert lines[-1] == "wrote mine/evaluation.json and mine/confusion.svg"
    evaluation = json.loads((tmp_path / "mine/evaluation.json").read_text())
    assert evaluation["top1"] == reported["test_accuracy"]
    assert evaluation["top5"] == reported["test_top5"]
    assert any(re.search(rf"top-1 accuracy\W+{evaluation['top1']:.2%}", line) for line in lines)
    assert (tmp_path / "mine/confusion.svg").read_text().startswith("<svg")
    assert_one_line_error(in_process("evaluate", "mine", "--ranks", "0"), "--ranks 0")
    assert_one_line_error(
        in_process("evaluate", "mine", "--ranks", "1", "--pack", "p"), "--pack p: the run was trained"
    )
    (tmp_path / "mine/checkpoints").rename(tmp_path / "mine/gone")
    assert_one_line_error(in_process("evaluate", "mine", "--ranks", "1"), "mine has no checkpoint yet")
    done = on_ranks("evaluate", "mine", "--ranks", "2")
    assert_one_line_error(done, "mine has no checkpoint yet")


def test_a_folder_without_a_run_is_refused_before_ranks_start(in_process: Run) -> None:
    assert_one_line_error(in_process("evaluate", "nowhere"), "nowhere holds no run")


TEXT_RECIPE = """\
[data]
pack = "packs"
threads = 1

[model]
name = "gpt_small"

[optimizer]
name = "adamw"
learning_rate = 1e-3

[rule]
overlap = "none"

[exchange]
bucket_megabytes = 1

[training]
epochs = 1
batch = 16
"""


def test_a_text_has_perplexity_and_no_confusion(unisono: Run, on_ranks: Run, in_process: Run, tmp_path: Path) -> None:
    """Evaluated as a person would: the command starts the ranks."""
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(400))))
    (tmp_path / "recipe.toml").write_text(TEXT_RECIPE)
    assert in_process("pack", "text.txt", "packs", "--window", "8").returncode == 0
    done = on_ranks("train", "recipe.toml", "--run", "mine")
    assert done.returncode == 0, done.stderr
    reported = json.loads((tmp_path / "mine/metrics.jsonl").read_text())
    done = unisono("evaluate", "mine", "--ranks", "2", "--throughput")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "wrote mine/evaluation.json; tokens have no picture of their confusion"
    assert any(re.search(rf"perplexity\W+{reported['test_perplexity']:.2f}", line) for line in lines)
    assert any("tokens/s" in line for line in lines)
    evaluation = json.loads((tmp_path / "mine/evaluation.json").read_text())
    assert evaluation["loss"] == pytest.approx(reported["test_loss"], rel=1e-3)
    assert evaluation["tokens"] == 8 * evaluation["samples"]
    assert [entry["batch"] for entry in evaluation["throughput"]] == [2**power for power in range(9)]
    assert all(entry["tokens_per_second"] > 0 for entry in evaluation["throughput"])
    assert not (tmp_path / "mine/confusion.svg").exists()
