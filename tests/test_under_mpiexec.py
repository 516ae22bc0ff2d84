"""Runs the tests in tests/mpi on real ranks, for as long as they make progress: rank 0 prints a dot a test.

On 1, 2, 3 and 4 ranks what depends on their number: who exchanges what with whom. What stands on that is run on 1 rank,
and on as few as show it: 3 are more than a machine of 2 cores has, and take several times as long as 2.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.progress import SILENCE_SECONDS, run

from unisono.launch import find_mpiexec, launch_environment

MPI_TESTS = Path(__file__).parent / "mpi"

LEFT_OUT: dict[int, tuple[str, ...]] = {
    1: (),
    2: (
        "collectives/test_direct.py",
        "collectives/test_watch.py",
        "data",
        "reducer/test_bits.py",
        "reducer/test_rules.py",
        "reducer/test_sharded.py",
        "rules",
        "step/test_store.py",
        "tensor_parallel/test_layouts.py",
        "tensor_parallel/test_layers.py",
        "tensor_parallel/test_losses.py",
        "training",
    ),
    3: (
        "horovod",
        "loops/test_split_layers.py",
        "measure",
        "reducer/test_buffers.py",
        "reducer/test_devices.py",
        "reducer/test_failed_passes.py",
        "reducer/test_life.py",
        "reducer/test_models.py",
        "reducer/test_step.py",
        "reducer/test_weight_first.py",
        "tensor_parallel/test_choose_plan.py",
        "tensor_parallel/test_runs.py",
        "torch_backend/test_buckets.py",
    ),
    4: (
        "collectives/test_direct.py",
        "collectives/test_ops.py",
        "collectives/test_ready.py",
        "collectives/test_staged.py",
        "collectives/test_trials.py",
        "collectives/test_waits.py",
        "collectives/test_watch.py",
        "data",
        "horovod",
        "loops/test_loops.py",
        "measure",
        "reducer",
        "rules",
        "step",
        "torch_backend",
        "training",
    ),
}
"""By the number of ranks, what is not run on so many.

2: what shows more where shares are uneven, sums have an order, and a node has ranks beside another node's; layers split
over 2 ranks, which 4 ranks have too, beside those split over all.
3: what sees itself and others, and shows with one other what it would with two.
4: whatever stands on collectives. Process groups of 4 have programs of their own in tests/torch_backend.
"""


STDERR_TO_A_FILE = 'exec "$@" 2> "$0/$$.txt"'
"""Shell script that runs its arguments. A launcher that ends all ranks drops what it still holds of their errors."""


PYTEST = ("-m", "pytest", "-v", "-x", "--capture=sys", "-p", "no:cacheprovider", "--durations=20")
"""Arguments of each rank. pytest leaves descriptor 2 alone: what it would hold of it is lost when a thread, or the MPI
library, prints an error and ends the process in the middle of a test."""


def run_pytest(ranks: int, folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run pytest on all ranks; return how it ended, and the errors of all ranks, whose files are in `folder`."""
    program = ["sh", "-c", STDERR_TO_A_FILE, str(folder), sys.executable, *PYTEST, *arguments]
    command = [str(find_mpiexec()), "-n", str(ranks), *program]
    done = run(command, SILENCE_SECONDS, None, launch_environment(os.environ, terminal=False))
    return done, "".join(f"{file.name}:\n{file.read_text()[-6000:]}\n" for file in sorted(folder.iterdir()))


@pytest.mark.parametrize("ranks", [1, *(pytest.param(ranks, marks=pytest.mark.launches) for ranks in (2, 3, 4))])
def test_on_ranks(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_out = [f"--ignore={MPI_TESTS / name}" for name in LEFT_OUT[ranks]]
    done, errors = run_pytest(ranks, tmp_path, str(MPI_TESTS), *left_out)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{errors}"
    passed = [int(count) for count in re.findall(r"^=+ (\d+) passed", done.stdout, re.MULTILINE)]
    assert passed, done.stdout[-3000:]
    assert passed[0] > 50, "the tests were not collected"
    slowest = re.search(r"=+ slowest .*?(?=^=)", done.stdout, re.MULTILINE | re.DOTALL)
    assert slowest, done.stdout[-3000:]
    with capsys.disabled():
        print(f"\non {ranks} ranks: {slowest[0]}")


def test_last_words_in_the_middle_of_a_test_are_kept(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    file = tmp_path / "test_it.py"
    file.write_text("import os\ndef test_it():\n    os.write(2, b'last words')\n    os._exit(1)\n")
    done, errors = run_pytest(1, tmp_path / "errors", "--rootdir", str(tmp_path), str(file))
    assert done.returncode == 1
    assert "last words" in errors


def test_what_is_left_out_exists() -> None:
    assert all((MPI_TESTS / name).exists() for names in LEFT_OUT.values() for name in names)


def test_every_file_is_run_on_one_rank_and_on_several() -> None:
    assert list(LEFT_OUT) == [1, 2, 3, 4]
    for file in MPI_TESTS.rglob("test_*.py"):
        name = str(file.relative_to(MPI_TESTS))
        on = [ranks for ranks, names in LEFT_OUT.items() if not name.startswith(names)]
        assert 1 in on, name
        assert set(on) & {2, 3}, name
