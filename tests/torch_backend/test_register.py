"""The name is known after the import, in whatever order, and nothing heavy is loaded for it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from tests.progress import run

from unisono.errors import UsageError
from unisono.torch_backend import Options

KNOWN = "assert dist.Backend('unisono') == 'unisono' and 'UNISONO' in dist.Backend._plugins"


def python(program: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-c", program])


def test_the_name_is_known_where_pytorch_is_imported_later_and_registering_loads_neither_it_nor_mpi() -> None:
    done = python(
        "import unisono, sys\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        f"import torch\nimport torch.distributed as dist\n{KNOWN}\nassert 'mpi4py.MPI' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_newer_releases_find_the_backend_by_its_entry_point() -> None:
    (entry,) = entry_points(group="torch.distributed.backends", name="unisono")
    assert entry.load().__module__ == "unisono.torch_backend.register"


def test_a_program_without_a_launcher_is_a_world_of_one() -> None:
    start = f"import torch, unisono\nimport torch.distributed as dist\n{KNOWN}\n"
    rest = "dist.init_process_group('unisono')\nt = torch.ones(2)\ndist.all_reduce(t)\nprint(dist.get_world_size(), t)"
    done = python(start + rest)
    assert done.stdout == "1 tensor([1., 1.])\n", done.stderr


def test_a_larger_world_than_was_started() -> None:
    start = "import torch, unisono\nimport torch.distributed as dist\nstore = dist.HashStore()\n"
    done = python(start + "dist.init_process_group('unisono', store=store, rank=0, world_size=4)")
    assert done.returncode == 1
    assert "a process group of 4 ranks, but MPI started 1: start the program with mpiexec -n 4" in done.stderr


@pytest.mark.parametrize("wrong", [{"wire": "float8"}, {"wire_from": -1}])
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Options(**wrong)
