"""The command `unisono audit`: real ranks, and one clear line for bad input."""

from __future__ import annotations

from pathlib import Path

from tests.progress import Run
from tests.usage_errors import assert_one_line_error


def test_a_step_of_a_run_is_recomputed(on_ranks: Run, in_process: Run, tmp_path: Path) -> None:
    keys = "training.epochs=1", "training.batch=256", "training.virtual_ranks=4", "compute.convolutions=library"
    keys = *keys, "rule.overlap=chain", "audit.chain=true", "audit.fraction=0.5"
    done = on_ranks("train", "digits", *(argument for key in keys for argument in ("--set", key)), "--run", "mine")
    assert done.returncode == 0, done.stderr
    before = {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    done = on_ranks("audit", "mine", "--step", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "step 2 is the same, recomputed from the seed on 2 ranks: samples, gradients, weights"
    )
    assert {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()} == before
    assert_one_line_error(in_process("audit", "mine", "--ranks", "5"), "training.virtual_ranks = 4, but 5 ranks")
    assert_one_line_error(in_process("audit", "mine", "--ranks", "1", "--step", "7"), "chain.jsonl has steps 1 to 6")
    lines = (tmp_path / "mine/chain.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "mine/chain.jsonl").write_text("".join(lines[:2] + lines[3:]))
    assert_one_line_error(in_process("audit", "mine", "--ranks", "1"), "line 3 of mine/chain.jsonl (step 3) does not")


def test_what_has_no_chain_is_refused_before_ranks_start(in_process: Run, tmp_path: Path) -> None:
    assert_one_line_error(in_process("audit", "nowhere"), "nowhere holds no run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/recipe.toml").write_text("ranks = 2\n")
    assert_one_line_error(in_process("audit", "mine"), "mine has no virtual ranks")
    for key, message in (("fraction=2", "at most 1"), ("chain=true", "set training.virtual_ranks")):
        assert_one_line_error(in_process("train", "digits", "--set", f"audit.{key}"), message)
