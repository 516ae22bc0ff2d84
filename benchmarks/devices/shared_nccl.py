"""Sums by NCCL within nodes, checked on a machine with one GPU: each rank is a host of its own to NCCL.

mpiexec -n 2 python benchmarks/devices/shared_nccl.py            one node of 2 ranks
mpiexec -n 4 python benchmarks/devices/shared_nccl.py nodes      two nodes of 2 ranks, as far as the program knows
mpiexec -n 2 python benchmarks/devices/shared_nccl.py late       rank 1 comes too late: rank 0's wait ends after 6 s

NCCL refuses ranks that share a device, by the name of their host and the device's number. With names that differ it
goes through sockets of the loopback: right, and slow. So results count here, and no time does.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple

RANK = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
os.environ |= {"NCCL_HOSTID": f"host{RANK}", "NCCL_SOCKET_IFNAME": "lo", "UNISONO_DEVICE_TRANSPORT": "nccl"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import unisono  # noqa: E402
from unisono.collectives import device_transports  # noqa: E402
from unisono.errors import StallError  # noqa: E402
from unisono.placement import place  # noqa: E402
from unisono.world import World  # noqa: E402

LENGTH = (1 << 21) + 3
"""Elements of a sum: more than go by way of the host, and a number that ranks do not divide."""

OPS = {
    "sum": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "product": (torch.float32,),
    "minimum": (torch.bfloat16,),
    "maximum": (torch.int64,),
}


class Nccl:
    """NCCL for a group that is not the program's default one, by a PyTorch below 2.14."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._nccl = dist.ProcessGroupNCCL(store, rank, size, options)
        self.allreduce, self.abort = self._nccl.allreduce, self._nccl.abort
        self.reduce_scatter_single, self.all_gather_single = (
            self._nccl._reduce_scatter_base,
            self._nccl._allgather_base,
        )
        self.shutdown = getattr(self._nccl, "shutdown", None) or self._nccl._shutdown


class Plugin(NamedTuple):
    """Row of PyTorch's table of backends."""

    creator_fn: Any
    extended_api: bool


def different_sums(world: World, device: torch.device) -> int:
    """Return the number of sums that are not the host's, of tensors that are computed while the call begins and read at
    once."""
    wrong = 0
    for op, dtypes in OPS.items():
        for dtype in dtypes:
            for seed in range(10):
                here = ((torch.arange(LENGTH) + seed) % 3 + world.rank % 2).to(dtype)
                result = world.allreduce(here.to(device).mul(2), op=op).mul(1)
                wrong += not torch.equal(result.cpu(), world.allreduce(here.mul(2), op=op))
    return wrong


def trained(world: World, transport: str, device: torch.device) -> list[torch.Tensor]:
    """Return the weights after 10 steps, whose gradients go by this transport."""
    os.environ[device_transports.VARIABLE] = transport
    these, width = World(world.comm.Dup(), world.placement, world.table), 2048
    torch.manual_seed(0)
    layers = torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 10)
    model = unisono.parallel(torch.nn.Sequential(*layers).double().to(device), these)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(world.rank)
    for _ in range(10):
        inputs = torch.randn(32, width, generator=draw, dtype=torch.float64).to(device)
        labels = torch.randint(10, (32,), generator=draw).to(device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def main() -> None:
    """Check as one rank; rank 0 prints what was found."""
    mode, device = (sys.argv[1:] or ["one"])[0], torch.device("cuda", 0)
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        dist.Backend._plugins["NCCL"] = Plugin(Nccl, extended_api=False)
        device_transports._backend_name = lambda _: "nccl"
    device_transports.identity_of = lambda _: RANK
    torch.zeros(1, device=device)  # before MPI: a CUDA-aware library looks for a context
    world = unisono.init(timeout=6.0) if mode == "late" else unisono.init()
    if mode == "nodes":
        world = World(world.comm.Dup(), place([rank % 2 for rank in range(world.size)]), world.table)
    transports = world.device_transports(device)
    if mode == "late":
        if world.rank == 1:
            device_transports.NodeBackend._reduce = lambda *_: time.sleep(12)
        try:
            world.allreduce(torch.ones(LENGTH, device=device))
        except StallError as error:
            print(f"rank {RANK}: {error}", flush=True)
        os._exit(0)
    wrong = different_sums(world, device)
    pairs = zip(trained(world, "nccl", device), trained(world, "staged", device), strict=True)
    largest = max(float((by_nccl - staged).abs().max()) for by_nccl, staged in pairs)
    if world.rank == 0:
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
        print(f"{world.size} ranks, {world.nodes} nodes: {transports}")
        print(f"sums that are not the host's: {wrong}; largest difference of weights from staged sums: {largest:.1e}")
    world.barrier()


if __name__ == "__main__":
    main()
