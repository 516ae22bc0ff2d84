"""`unisono run`: programs for torchrun run unmodified."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from unisono.cli.run import SEVERAL_NODES

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


ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NODELIST": "none[1-2]"}
ALLOCATION |= {"SLURM_JOBID": "7", "SLURM_JOB_NODELIST": "none[1-2]", "SLURM_NTASKS": "2"}


def test_a_program_for_torchrun(program: Path, unisono: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Within an allocation of Slurm, too, its ranks are those of this machine."""
    done = unisono("run", "--ranks", "2", str(program), "--steps", "3", **ALLOCATION)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.replace("][", "]\n[").splitlines() if line.startswith("[")]
    assert len(lines) == 2
    assert len(set(lines)) == 1
    assert lines[0].startswith("[gloo, gloo, 2.0, ")


def test_a_mesh_and_a_module_and_an_exit_code(
    tmp_path: Path, unisono: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "secrets.py").write_text("raise ImportError('not the standard library')\n")  # before -m finds ours
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
    told = [line for line in done.stderr.splitlines() if "Error: " in line or "File " in line]
    assert told == [  # once, from the program's first frame on
        f'rank 1 of 2:   File "{tmp_path / "broken.py"}", line 4, in <module>',
        "rank 1 of 2: EOFError: mine",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "nothing"), "there is no module nothing, neither in {folder} nor installed"),
        (("nothing.py",), "there is no program {folder}/nothing.py"),
        (("nothing",), "there is no program {folder}/nothing; run a module with: unisono run -m nothing"),
        (("--nnodes", "2", "a.py"), "--nnodes 2: {nodes}"),
        (("--node_rank=1", "a.py"), "--node-rank 1: {nodes}"),
        (("--resume", "r", "-m", "a"), "--resume needs --elastic"),
        (("--resume", "r", "--elastic", "-m", "a"), "--resume r: there is no checkpoint in it"),
        (("--max-restarts=3", "a.py"), "--max-restarts 3: a program with a loop of unisono.elastic goes on {elastic}"),
    ],
)
def test_bad_input_gets_one_line(
    in_process: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = in_process("run", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    told = message.format(folder=tmp_path, nodes=SEVERAL_NODES, elastic="with --elastic; others begin anew")
    assert done.stderr == f"unisono: {told}\n"


@pytest.mark.parametrize(
    ("options", "ranks", "warned"),
    [
        ("-n 2", 2, False),
        ("--nproc-per-node 2 --standalone", 2, False),
        ("--nproc_per_node=2 --nnodes=1:1 --node_rank 0 --max_restarts=0", 2, False),
        ("--ranks 2 --rdzv-backend c10d --rdzv_endpoint=a:0 --rdzv-id 1 --master_addr a --master-port 1", 2, False),
        ("--ranks 2 --rdzv-conf timeout=9", 2, False),
        ("--ranks 99", 99, True),
    ],
)
def test_options_of_torchrun_start_ranks(
    in_process: Callable[..., subprocess.CompletedProcess[str]],
    program: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    ranks: int,
    warned: bool,
) -> None:
    started: list[tuple[int, ...]] = []
    command = import_module("unisono.cli.run")
    monkeypatch.setattr(command, "cores", lambda: 2)
    monkeypatch.setattr(command, "launch", lambda *given: started.append(given) or 0)
    done = in_process("run", *options.split(), str(program), "--steps", "-n", "3")
    assert done.returncode == 0
    assert started == [(ranks,)]
    warning = "unisono: 99 ranks take turns on 2 cores; fewer would be faster\n"
    assert done.stderr == (warning if warned else "")


def test_a_backend_name_that_is_not_known_is_refused(
    in_process: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "program.py").touch()
    done = in_process("run", str(tmp_path / "program.py"), UNISONO_BACKEND_NAME="gloo")
    assert (done.returncode, done.stdout) == (2, "")
    assert "UNISONO_BACKEND_NAME=gloo: it is unisono, or not set" in done.stderr
