"""`unisono run`: programs for torchrun run unmodified."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = '''
"""Program written for torchrun, without MPI and unisono."""
import argparse, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from beside import rate

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1)
given = parser.parse_args()
rank, local, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"]) > 0 and os.environ["LOCAL_WORLD_SIZE"] == str(size)
dist.init_process_group("gloo")
assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
for _ in range(given.steps):
    optimizer.zero_grad()
    model(torch.full((2, 3), float(rank))).sum().backward()
    optimizer.step()
pair = dist.new_group([0, 1], backend="gloo")
total = torch.ones(1)
dist.all_reduce(total, group=pair)
print(f"[{dist.get_backend()}, {dist.get_backend(pair)}, {total.item()}, {model.module.weight.sum().item():.4f}]")
dist.destroy_process_group()
'''


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("rate = 0.5\n")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_a_program_for_torchrun(program: Path, unisono: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = unisono("run", "--ranks", "2", str(program), "--steps", "3")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.replace("][", "]\n[").splitlines() if line.startswith("[")]
    assert len(lines) == 2
    assert len(set(lines)) == 1
    assert lines[0].startswith("[gloo, gloo, 2.0, ")


def test_a_mesh_and_a_module_and_an_exit_code(
    tmp_path: Path, unisono: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "meshed.py").write_text(
        "import sys, torch.distributed as dist\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "from unisono.torch_backend import name\n"
        "mesh = init_device_mesh('cpu', (2,))\nassert name() == 'unisono', name()\n"
        "assert mesh.size() == 2 and sys.argv[1:] == ['--x']\ndist.destroy_process_group()\nsys.exit(3)\n"
    )
    done = unisono("run", "--ranks", "2", "-m", "meshed", "--x")
    assert done.returncode == 3, done.stderr


def test_an_error_of_the_program_ends_all_ranks(
    tmp_path: Path, unisono: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "broken.py").write_text(
        "import os, torch, torch.distributed as dist\ndist.init_process_group()\n"
        "if os.environ['RANK'] == '1':\n    raise EOFError('mine')\ndist.barrier()\n"
    )
    done = unisono("run", "--ranks", "2", str(tmp_path / "broken.py"))
    assert done.returncode not in (0, 2)
    assert "rank 1 of 2" in done.stderr
    assert "EOFError: mine" in done.stderr


def test_bad_input_gets_one_line(in_process: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    done = in_process("run", str(tmp_path / "nothing.py"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no program" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    (tmp_path / "program.py").touch()
    done = in_process("run", str(tmp_path / "program.py"), UNISONO_BACKEND_NAME="gloo")
    assert (done.returncode, done.stdout) == (2, "")
    assert "UNISONO_BACKEND_NAME=gloo: it is unisono, or not set" in done.stderr
