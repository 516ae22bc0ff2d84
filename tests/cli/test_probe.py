"""The command `unisono probe`: it writes a machine file that `unisono plan` reads; its errors are one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.plan.machines import find_machine


def test_a_file_is_written_and_planned_with(unisono: Run, in_process: Run, tmp_path: Path) -> None:
    done = unisono("probe", "ours.toml", "--ranks=2", "--seconds=5", "--name=ours", "--disk=.")
    assert done.returncode == 0, done.stderr
    assert "left out, links: one node has no links" in done.stdout
    assert "wrote ours.toml" in done.stdout
    machine = find_machine(str(tmp_path / "ours.toml"))
    assert machine.name == "ours"
    assert machine.products
    assert machine.probe.ranks == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "ours.toml"]
    done = in_process("plan", "--machine=ours.toml", "--model=small_convnet", "--ranks-per-node=2")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ours"], "ours: a machine file ends in .toml"),
        (["ours.toml", "--seconds=4"], "--seconds 4: a probe needs 5 seconds or more"),
        (["ours.toml", "--seconds=nan"], "--seconds nan: a probe needs 5 seconds or more"),
        (["ours.toml", "--ranks=0"], "--ranks 0: the number of ranks must be at least 1"),
    ],
)
def test_bad_input_starts_no_rank(in_process: Run, arguments: list[str], message: str) -> None:
    assert_one_line_error(in_process("probe", *arguments), message)


def test_what_cannot_be_written_or_read_is_known_before_anything_is_measured(on_ranks: Run) -> None:
    assert_one_line_error(on_ranks("probe", "nowhere/ours.toml"), "cannot write nowhere/ours.toml")
    assert_one_line_error(on_ranks("probe", "ours.toml", "--disk=gone"), "--disk gone: there is no such folder")
    assert_one_line_error(on_ranks("probe", "ours.toml", "--device=qpu"), 'device = "qpu" is no device of PyTorch')
