"""Groups of ours answer as those that a program has asked for; one whose ranks have not communicated is told."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.progress import Run

from unisono.torch_backend.process_group import ProcessGroup
from unisono.torch_backend.program import CommunicationRecord
from unisono.torch_backend.pytorch import GroupBase

ANSWERS = """
import json, sys
import torch
import torch.distributed as dist
from unisono.torch_backend import name

for named in sys.argv[1:]:
    dist.init_process_group(*named.split())  # "" names none
    world = dist.group.WORLD
    same, other = dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo")
    devices = sorted(map(str, world._device_types))
    answers = [dist.get_backend(), dist.get_backend_config(), world.name(), devices]
    assert answers[0] == dist.get_backend(same) and world._get_backend_name() == world.name()
    answers += [dist.get_backend(other), name(), name(same), name(other)]
    if dist.get_rank() == 0:
        print(json.dumps(answers))
    for group in (None, same, other):
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2, 2]
    dist.destroy_process_group()
"""

OURS = ["unisono", "cpu:unisono,cuda:unisono", "unisono", ["cpu", "cuda"]]

EXPECTED = {
    "gloo": ["gloo", "cpu:gloo,cuda:gloo", "gloo", ["cpu", "cuda"]],
    "mpi": ["mpi", "cpu:mpi,cuda:mpi", "mpi", ["cpu", "cuda"]],
    "cpu:gloo": ["cpu:gloo", "cpu:gloo", "gloo", ["cpu"]],
    "unisono": OURS,
    "nccl": OURS,
}
"""Answers of groups by the backend that was asked for."""


def answers(unisono: Run, folder: Path, *named: str, **environment: str) -> list[list[Any]]:
    """The answers of default groups made one after another, and three times the backend that carries a group."""
    (folder / "answers.py").write_text(ANSWERS)
    options = ("--backend-for", "gloo,mpi,nccl")
    done = unisono("run", "--ranks", "2", *options, str(folder / "answers.py"), *named, **environment)
    assert done.returncode == 0, done.stderr
    assert "Attempted to get default timeout" not in done.stderr
    assert "ran alone" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_groups_answer_the_name_that_was_asked_for(unisono: Run, tmp_path: Path) -> None:
    *named, unnamed = answers(unisono, tmp_path, *EXPECTED, "")
    assert named == [[*expected, "gloo", *["unisono"] * 3] for expected in EXPECTED.values()]
    assert (unnamed[0], *unnamed[4:]) == ("undefined", "gloo", *["unisono"] * 3)  # the rest depends on the machine


def test_they_tell_their_own_name_on_request(unisono: Run, tmp_path: Path) -> None:
    assert answers(unisono, tmp_path, "gloo", UNISONO_BACKEND_NAME="unisono") == [[*OURS, *["unisono"] * 4]]


GLOOS = """
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.distributed.nn.functional as differentiable
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", pg_options=dist.ProcessGroupGloo._Options())
rank, world = dist.get_rank(), dist.group.WORLD
assert torch.distributed.is_gloo_available()
dist.monitored_barrier()
dist.monitored_barrier(dist.new_group([0, 1]), wait_all_ranks=True)
assert c10d._get_pg_default_device() == torch.device("cpu") and c10d._get_object_coll_device() == "cpu"
assert sorted(c10d._device_capability()) == ["cpu", "cuda"] and world._get_backend(torch.device("cpu")) is world
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": 0}, {"rank": 1}]

here, there = torch.full((2,), float(rank)), torch.empty(2)
messages = [dist.P2POp(dist.isend, here, 1 - rank), dist.P2POp(dist.irecv, there, 1 - rank)]
for work in dist.batch_isend_irecv(messages):
    work.wait()
assert there.tolist() == [1 - rank] * 2
assert functional.all_reduce(here, "sum", world).tolist() == [1, 1]
(own, other), parts = torch.ones(2, 2, requires_grad=True), [torch.empty(2) for _ in range(2)]
differentiable.all_to_all(parts, [own * rank, other * rank])  # gloo's branch: scatters
assert [part.tolist() for part in parts] == [[0, 0], [1, 1]]

mesh = init_device_mesh("cpu", (2,))
assert mesh.get_group() is world
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Linear(2, 2)))
model(here[None]).sum().backward()
assert model.module.weight.grad.tolist() == [[0.5, 0.5]] * 2
sharded = torch.nn.Linear(2, 2)
fully_shard(sharded, mesh=mesh)
sharded(here[None]).sum().backward()
assert sharded.weight.grad.full_tensor().tolist() == [[0.5, 0.5]] * 2
state = {"weight": torch.full((2,), 7.0)}
checkpoint.async_save(state, checkpoint_id="saved").result()
loaded = {"weight": torch.zeros(2)}
checkpoint.load(loaded, checkpoint_id="saved")
assert loaded["weight"].tolist() == [7, 7]
(pair, _), own = dist.new_subgroups(1), dist.new_group([rank], use_local_synchronization=True)
assert dist.get_backend(pair) == dist.get_backend(own) == "gloo"
dist.destroy_process_group(own)
dist.destroy_process_group()
dist.init_process_group("gloo")
assert dist.get_backend() == "gloo"
print("all right")
if rank == 0:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5))
    except RuntimeError as error:
        assert "Rank 1 failed to pass monitoredBarrier" in str(error), error
"""


def test_what_pytorch_does_with_groups_of_gloo(unisono: Run, tmp_path: Path) -> None:
    (tmp_path / "gloos.py").write_text(GLOOS)
    done = unisono("run", "--ranks", "2", str(tmp_path / "gloos.py"), TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all right") == 2


ENDS = {
    "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\nraise SystemExit\n": (
        "made a process group, but rank 0 exchanged no tensor"
    ),
    "import torch, unisono.horovod as hvd\nhvd.init()\nhvd.allreduce(torch.ones(1))\n": "",
}
"""Programs, and what is said at their end."""


@pytest.mark.parametrize("program", ENDS)
def test_what_is_said_at_the_end(
    unisono: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, program: str
) -> None:
    (tmp_path / "program.py").write_text(program)
    done = unisono("run", "--ranks", "2", str(tmp_path / "program.py"))
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "ran alone" in line]
    assert len(said) == bool(ENDS[program])
    assert all(line.startswith("unisono: 2 ranks ran alone: ") and ENDS[program] in line for line in said)


def group_of(kind: Any) -> Any:
    """A group as far as the record looks at it."""
    return kind.__new__(kind)


def test_no_group_is_told_and_one_of_another_backend_is_not_judged() -> None:
    communication = CommunicationRecord()
    assert "the program made no process group; call" in communication.describe(2)
    communication.record(group_of(ProcessGroup))
    assert "made a process group, but rank 0 exchanged no tensor" in communication.describe(2)
    assert communication.describe(1) == ""
    communication.record(group_of(GroupBase))
    assert communication.describe(2) == ""


def test_one_group_that_is_used_is_enough() -> None:
    communication = CommunicationRecord()
    first, second = group_of(ProcessGroup), group_of(ProcessGroup)
    communication.record(first)
    communication.record(second)
    communication.record(SimpleNamespace())  # a group that this rank is no member of
    assert communication.describe(4).startswith("unisono: 4 ranks ran alone")
    first.exchanged = True
    assert communication.describe(4) == ""
