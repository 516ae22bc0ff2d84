"""Exchanges and training steps of ranks that share the accelerators of one node, beside copies, gloo and NCCL.

python benchmarks/devices/run.py OUT.json [RANKS ...]        1, 2 and 4 ranks; about 3 minutes

exchange   allreduce of a tensor on the device, beside its two copies alone, and beside the same allreduce on the host:
           copies and sums overlap, so the bound is the largest of the three
step       a training step, beside the same without an exchange, DDP over gloo, and (one rank for each device) over NCCL
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.device import host_memory, module_of
from unisono.launch import find_mpiexec
from unisono.models import MODELS

SIZES = [1 << 20, 8 << 20, 64 << 20, 256 << 20]
"""Bytes of exchanged tensors."""

NETWORKS = {"resnet50": 64, "alexnet": 64}
"""Networks of which a step is timed, and samples of a rank's batch."""

ROUNDS = 7
"""Rounds of all contenders, of which the median counts."""


def rank_main(out: Path, parts: list[str]) -> None:
    """Measure as one rank; rank 0 writes what all have found."""
    count = torch.accelerator.device_count()
    local = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or os.environ.get("MPI_LOCALRANKID") or 0)
    torch.accelerator.set_device_index(local % count)
    device = torch.zeros(1, device=torch.accelerator.current_accelerator()).device  # before MPI: it looks for a context
    world = unisono.init()
    shared = len(world.node_world().all_gather_object(0)) > count
    found: dict[str, Any] = {
        "ranks": world.size,
        "device": name_of(device),
        "by": library_version().splitlines()[0],
    }
    found["direct"] = world.reaches_device(device)
    if "exchange" in parts:
        found["exchange"] = [exchange(world, device, nbytes) for nbytes in SIZES]
    if "step" in parts:
        found["step"] = {name: step(world, device, name, batch, shared) for name, batch in NETWORKS.items()}
    if world.rank == 0:
        out.write_text(json.dumps(found))


def library_version() -> str:
    """Return the name of the MPI library, which was loaded after the device was opened."""
    from mpi4py import MPI  # noqa: PLC0415

    return str(MPI.Get_library_version())[:40]


def name_of(device: torch.device) -> str:
    module: Any = module_of(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else str(device)


def exchange(world: unisono.World, device: torch.device, nbytes: int) -> dict[str, Any]:
    """Return seconds of an allreduce, and of its parts alone, on the slowest rank."""
    tensor = torch.ones(nbytes // 4, device=device)
    host = host_memory(nbytes // 4, torch.float32, device)
    host.fill_(1)
    found = timed(
        world,
        device,
        {
            "to host": lambda: host.copy_(tensor),
            "to device": lambda: tensor.copy_(host),
            "sum on the host": lambda: world.allreduce(host.fill_(1) if world.size > 1 else host),
            "exchange": lambda: world.allreduce(tensor),
        },
    )
    bound = max(found[name] for name in ("to host", "to device", "sum on the host"))
    return {"bytes": nbytes, **found, "of the bound": found["exchange"] / bound}


def step(world: unisono.World, device: torch.device, name: str, batch: int, shared: bool) -> dict[str, float]:
    """Return seconds of a step by each contender."""
    inputs, labels = torch.randn(batch, 3, 224, 224, device=device), torch.randint(1000, (batch,), device=device)

    def contender(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Callable[[], object]:
        torch.manual_seed(0)
        model = wrap(MODELS.load(name)(1000, 3).to(device, memory_format=torch.channels_last))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.9)

        def one() -> None:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()

        return one

    contenders = {
        "no exchange": contender(lambda model: model),
        "unisono": contender(lambda model: unisono.parallel(model, world)),
    }
    if world.size > 1:
        contenders["DDP, gloo"] = contender(
            lambda model: DistributedDataParallel(model, process_group=group("gloo", world))
        )
    if not shared:
        contenders["DDP, NCCL"] = contender(
            lambda model: DistributedDataParallel(model, process_group=group("nccl", world))
        )
    return timed(world, device, contenders, warm_up=12)


def group(backend: str, world: unisono.World) -> dist.ProcessGroup:
    """Return a process group of all ranks."""
    if not dist.is_initialized():
        path = world.call_on_root(lambda: f"/tmp/unisono-devices-{os.getpid()}")
        dist.init_process_group("gloo", f"file://{path}", timedelta(seconds=60), rank=world.rank, world_size=world.size)
    return dist.new_group(backend=backend)


def timed(
    world: unisono.World, device: torch.device, contenders: dict[str, Callable[[], object]], warm_up: int = 3
) -> dict[str, float]:
    """Return the median seconds of each contender on the slowest rank, in turns."""
    module: Any = module_of(device)
    for one in contenders.values():
        for _ in range(warm_up):
            one()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, one in contenders.items():
            calls = 3
            module.synchronize(device)
            world.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                one()
            module.synchronize(device)
            took = torch.tensor([(time.perf_counter() - began) / calls], dtype=torch.float64)
            seconds[name].append(world.allreduce(took, op="maximum").item())
    return {name: statistics.median(several) for name, several in seconds.items()}


def main() -> None:
    """Start all numbers of ranks, and write what they found."""
    if sys.argv[1] == "rank":
        rank_main(Path(sys.argv[2]), sys.argv[3].split(","))
        return
    out, ranks = Path(sys.argv[1]), [int(one) for one in sys.argv[2:]] or [1, 2, 4]
    found = []
    for number in ranks:
        part = out.with_suffix(f".{number}")
        command = [str(find_mpiexec()), "-n", str(number), sys.executable, __file__, "rank", str(part), "exchange,step"]
        subprocess.run(command, check=True, timeout=200)
        found.append(json.loads(part.read_text()))
        part.unlink()
        print(number, "ranks:", found[-1]["by"], "direct:", found[-1]["direct"])
        for row in found[-1]["exchange"]:
            print(number, "ranks:", {key: f"{value:.3g}" for key, value in row.items()}, flush=True)
        for name, row in found[-1]["step"].items():
            print(number, "ranks:", name, {key: f"{value * 1e3:.1f} ms" for key, value in row.items()}, flush=True)
    environment = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    out.write_text(json.dumps({"environment": environment, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
