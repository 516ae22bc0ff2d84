"""Runs the tests in tests/mpi on real ranks, for as long as they make progress: rank 0 prints a dot a test.

On 1, 2, 3 and 4 ranks what depends on their number: who exchanges what with whom. What stands on that is run on 1 rank,
and on as few as show it: 3 are more than a machine of 2 cores has, and take several times as long as 2.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from tests.progress import SILENCE_SECONDS, run

from unisono.launch import find_mpiexec, launch_environment

MPI_TESTS = Path(__file__).parent / "mpi"

LEFT_OUT: dict[int, tuple[str, ...]] = {
    1: (),
    2: (
        "data",
        "step/test_store.py",
        "reducer/test_bits.py",
        "torch_backend/test_direct.py",
        "training",
        "tuning",
    ),
    3: (
        "reducer/test_failed_passes.py",
        "reducer/test_life.py",
        "reducer/test_step.py",
        "tensor_parallel/test_runs.py",
    ),
    4: ("data", "probe", "step", "reducer", "torch_backend/test_direct.py", "training", "tuning"),
}
"""By the number of ranks, what is not run on so many.

2: what shows more where shares are uneven, sums have an order, and a node has ranks beside another node's.
3: what sees itself and others, and shows with one other what it would with two.
4: whatever stands on collectives. Process groups of 4 have programs of their own in tests/torch_backend.
"""


STDERR_TO_A_FILE = 'exec "$@" 2> "$0/$$.txt"'
"""Shell script that runs its arguments. A launcher that ends all ranks drops what it still holds of their errors."""


@pytest.mark.parametrize("ranks", [1, *(pytest.param(ranks, marks=pytest.mark.launches) for ranks in (2, 3, 4))])
def test_on_ranks(ranks: int, tmp_path: Path) -> None:
    left_out = [f"--ignore={MPI_TESTS / name}" for name in LEFT_OUT[ranks]]
    tests = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", str(MPI_TESTS), *left_out]
    command = [str(find_mpiexec()), "-n", str(ranks), "sh", "-c", STDERR_TO_A_FILE, str(tmp_path), *tests]
    done = run(command, SILENCE_SECONDS, None, launch_environment(os.environ, terminal=False))
    errors = "".join(f"{file.name}:\n{file.read_text()[-6000:]}\n" for file in sorted(tmp_path.iterdir()))
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{errors}"
    passed = [int(count) for count in re.findall(r"^=+ (\d+) passed", done.stdout, re.MULTILINE)]
    assert passed, done.stdout[-3000:]
    assert passed[0] > 50, "the tests were not collected"


def test_what_is_left_out_exists() -> None:
    assert all((MPI_TESTS / name).exists() for names in LEFT_OUT.values() for name in names)


def test_every_file_is_run_on_one_rank_and_on_several() -> None:
    assert list(LEFT_OUT) == [1, 2, 3, 4]
    for file in MPI_TESTS.rglob("test_*.py"):
        name = str(file.relative_to(MPI_TESTS))
        on = [ranks for ranks, names in LEFT_OUT.items() if not name.startswith(names)]
        assert 1 in on, name
        assert set(on) & {2, 3}, name
