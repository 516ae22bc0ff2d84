"""Exchanges, training steps, recipes and tests on the accelerators of one node, beside copies, gloo and NCCL.

python benchmarks/devices/run.py OUT.json [RANKS ...]        1, 2 and 4 ranks; under 9 minutes in all
python benchmarks/devices/run.py --dry OUT.json              the same, small, on a device that pretends

exchange   allreduce of a tensor on the device, beside its two copies alone, and beside the same allreduce on the host:
           copies and sums overlap, so the bound is the largest of the three
step       a training step, beside the same without an exchange, DDP over gloo, and (one rank for each device) over NCCL
recipes    digits until it has learned, ResNet-50 and AlexNet an epoch on noise, by `unisono train` on 2 ranks
NCCL       sums by NCCL within nodes, of ranks that share a GPU (`shared_nccl.py`): right or not, without times
tests      python -m pytest tests -m device, for as long as there is time

Each part that fails or takes too long is said so, and the others go on; the exit code is then 1.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.device import host_memory, module_of
from unisono.launch import find_mpiexec
from unisono.models import MODELS

ROOT = Path(__file__).resolve().parents[2]

SIZES = [1 << 20, 8 << 20, 64 << 20, 256 << 20]
"""Bytes of exchanged tensors."""

NETWORKS = {"resnet50": 64, "alexnet": 64}
"""Networks of which a step is timed, and samples of a rank's batch."""

ROUNDS = 7
"""Rounds of all contenders, of which the median counts."""

LIMIT_SECONDS, LIMIT_OF_RANKS, LIMIT_OF_A_RECIPE = 520.0, 110.0, 60.0
"""Seconds of everything, of the measurements with one number of ranks, and of a recipe."""

SETTLED_STEPS = 50
"""Steps that do not count: in the first 30 to 40, Unisono tries overlaps and buckets."""

WITHIN_BOUND, LONG_BYTES = 1.15, 64 << 20
"""Largest ratio of a staged exchange to its bound, for the long tensors: of as many bytes and more."""

DRY = "--dry" in sys.argv
if DRY:
    SIZES, NETWORKS, ROUNDS, LONG_BYTES, SETTLED_STEPS = [1 << 12, 1 << 16], {"small_convnet": 4}, 2, 1 << 16, 5

IMAGES = 8 if DRY else 512
"""Images of noise that a recipe of ImageNet is given."""

RECIPES = {
    "digits": ["--set", f"training.epochs={1 if DRY else 15}"],
    "imagenet_resnet50": ["--set", f"training.batch={4 if DRY else 128}", "--set", "optimizer.warm_epochs=0"],
    "imagenet_alexnet": ["--set", f"training.batch={4 if DRY else 128}"],
}
"""Recipes that are run, with the keys that are not those of a cluster."""


def rank_main(out: Path, parts: list[str]) -> None:
    """Measure as one rank; rank 0 writes what all have found."""
    if DRY:
        from unisono.testing.pretend import use_pretend  # noqa: PLC0415

        use_pretend()
    count = torch.accelerator.device_count()
    local = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or os.environ.get("MPI_LOCALRANKID") or 0)
    torch.accelerator.set_device_index(local % count)
    device = torch.zeros(1, device=torch.accelerator.current_accelerator()).device  # before MPI: it looks for a context
    world = unisono.init()
    shared = len(world.node_world().all_gather_object(0)) > count
    results: dict[str, Any] = {
        "ranks": world.size,
        "device": name_of(device),
        "by": library_version().splitlines()[0],
    }
    transports = world.device_transports(device)
    results |= {"transport": str(transports) if world.size > 1 else "alone", "stays": transports.stays}
    if "exchange" in parts:
        results["exchange"] = [exchange(world, device, nbytes) for nbytes in SIZES]
    if "step" in parts:
        results["step"] = {name: step(world, device, name, batch, shared) for name, batch in NETWORKS.items()}
    if world.rank == 0:
        out.write_text(json.dumps(results))


def library_version() -> str:
    """Return the name of the MPI library, which was loaded after the device was opened."""
    from mpi4py import MPI  # noqa: PLC0415

    return str(MPI.Get_library_version())[:40]


def name_of(device: torch.device) -> str:
    module: Any = module_of(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else str(device)


def exchange(world: unisono.World, device: torch.device, nbytes: int) -> dict[str, Any]:
    """Return seconds of an allreduce, and of its parts alone, on the slowest rank."""
    tensor = torch.zeros(nbytes // 4, device=device)  # a sum of ones would grow from call to call
    host = host_memory(nbytes // 4, torch.float32, device)
    host.zero_()
    seconds = timed(
        world,
        device,
        {
            "to host": lambda: host.copy_(tensor),
            "to device": lambda: tensor.copy_(host),
            "sum on the host": lambda: world.allreduce(host),
            "exchange": lambda: world.allreduce(tensor),
        },
    )
    bound = max(seconds[name] for name in ("to host", "to device", "sum on the host"))
    return {"bytes": nbytes, **seconds, "of the bound": seconds["exchange"] / bound}


def step(world: unisono.World, device: torch.device, name: str, batch: int, shared: bool) -> dict[str, float]:
    """Return seconds of a step by each contender."""
    classes, side = (10, 8) if DRY else (1000, 224)
    channels = 1 if DRY else 3
    inputs, labels = torch.randn(batch, channels, side, side), torch.randint(classes, (batch,))
    inputs, labels = inputs.to(device), labels.to(device)

    def contender(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Callable[[], object]:
        torch.manual_seed(0)
        model = wrap(MODELS.load(name)(classes, channels).to(device, memory_format=torch.channels_last))
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
    if world.size > 1 and not DRY:
        contenders["DDP, gloo"] = contender(
            lambda model: DistributedDataParallel(model, process_group=group("gloo", world))
        )
    if not shared and not DRY:
        contenders["DDP, NCCL"] = contender(
            lambda model: DistributedDataParallel(model, process_group=group("nccl", world))
        )
    return timed(world, device, contenders, SETTLED_STEPS)


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
    for contender in contenders.values():
        for _ in range(warm_up):
            contender()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            calls = 3
            module.synchronize(device)
            world.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                contender()
            module.synchronize(device)
            took = torch.tensor([(time.perf_counter() - began) / calls], dtype=torch.float64)
            seconds[name].append(world.allreduce(took, op="maximum").item())
    return {name: statistics.median(several) for name, several in seconds.items()}


def ended(command: list[str], limit: float, folder: Path) -> tuple[int, str, float]:
    """Run a command, at most for so many seconds; return its exit code, its output and its seconds."""
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(1.0, limit))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"ended after {limit:.0f} s, which were all it had"
        return process.returncode, output, time.perf_counter() - began


def measured(ranks: int, folder: Path) -> dict[str, Any]:
    """Return the findings of so many ranks, which are printed."""
    out = folder / f"{ranks}.json"
    command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, __file__, "rank", str(out), "exchange,step"]
    code, output, _ = ended([*command, *(["--dry"] if DRY else [])], LIMIT_OF_RANKS, folder)
    if code or not out.is_file():
        print(ranks, "ranks: failed,", output[-2000:])
        return {"ranks": ranks, "failed": output[-2000:]}
    results: dict[str, Any] = json.loads(out.read_text())
    print(ranks, "ranks:", results["by"], results["transport"])
    for row in results["exchange"]:
        print(ranks, "ranks:", {key: f"{value:.3g}" for key, value in row.items()}, flush=True)
    for name, row in results["step"].items():
        print(ranks, "ranks:", name, {key: f"{value * 1e3:.1f} ms" for key, value in row.items()}, flush=True)
    long = [row["of the bound"] for row in results["exchange"] if row["bytes"] >= LONG_BYTES]
    if ranks > 1 and not results["stays"] and not DRY:
        results["overlaps"] = max(long) <= WITHIN_BOUND
        print(ranks, f"ranks: long staged exchanges take {max(long):.2f} x the longest of copies and sum")
    return results


def pack_noise(folder: Path) -> None:
    """Pack images of noise, as those of ImageNet, to train on and to test with."""
    from unisono.data.kinds import RAW  # noqa: PLC0415
    from unisono.data.pack.packing import PackOptions, pack  # noqa: PLC0415
    from unisono.data.sources import Source  # noqa: PLC0415

    shape = 224, 224, 3
    labels, sizes = np.arange(IMAGES) % 10, np.full(IMAGES, 3 * 224 * 224)
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, 3 * 224 * 224, np.uint8).tobytes() for _ in range(16)]
    source = Source(
        RAW, [str(label) for label in range(10)], list(map(str, range(IMAGES))), labels, sizes,
        lambda index: images[index % 16], shape,
    )  # fmt: skip
    for part in ("train", "test"):
        pack(source, folder / part, PackOptions(stripes=2), 4, lambda: None)


def trained(name: str, changes: list[str], folder: Path, limit: float) -> dict[str, Any]:
    """Return how the run of a recipe ended, which is printed."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = (
        "cpu" if accelerator is None else f"{accelerator.type}:0" if torch.accelerator.device_count() < 2 else "auto"
    )
    command = [sys.executable, "-m", "unisono", "train", name, "--ranks", "2", "--run", str(folder / name), *changes]
    command += ["--set", f"compute.device={device}"]
    if name != "digits":
        keys = "data.pack=noise", "data.augment=none", "training.epochs=1"
        command += [word for key in keys for word in ("--set", key)]
    code, output, seconds = ended(command, limit, folder)
    lines = [line for line in output.splitlines() if line.strip()]
    print(
        f"recipe {name} on {device}: {'ended' if code == 0 else 'FAILED'} after {seconds:.0f} s;",
        *lines[-3:],
        sep="\n  ",
    )
    return {"returncode": code, "seconds": seconds, "said": lines[-12:], "device": device}


def summed_by_nccl(ranks: int, mode: str, folder: Path, limit: float) -> dict[str, Any]:
    """Return what `shared_nccl.py` said, which is printed."""
    program = str(Path(__file__).with_name("shared_nccl.py"))
    command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, program, mode]
    code, output, seconds = ended(command, min(limit, 45.0), folder)
    lines = [line for line in output.splitlines() if line.startswith(("NVIDIA", f"{ranks} ranks", "sums", "rank 0:"))]
    print(*lines, sep="\n", flush=True)
    return {"ranks": ranks, "mode": mode, "returncode": code, "seconds": seconds, "said": lines}


def main() -> None:
    """Measure with all numbers of ranks, run the recipes and the tests, and write what was found."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--dry"]
    if arguments[0] == "rank":
        rank_main(Path(arguments[1]), arguments[2].split(","))
        return
    began, out, ranks = (
        time.monotonic(),
        Path(arguments[0]).resolve(),
        [int(count) for count in arguments[1:]] or [1, 2, 4],
    )
    environment = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    results: dict[str, Any] = {"environment": environment, "runs": [], "recipes": {}}

    def left() -> float:
        return LIMIT_SECONDS - (time.monotonic() - began)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pack_noise(folder / "noise")
        for name, changes in RECIPES.items():
            results["recipes"][name] = trained(name, changes, folder, min(LIMIT_OF_A_RECIPE, left()))
            out.write_text(json.dumps(results, indent=1) + "\n")
        for count in ranks:
            results["runs"].append(measured(count, folder))
            out.write_text(json.dumps(results, indent=1) + "\n")
        if torch.cuda.is_available():
            modes = (2, "one"), (4, "nodes"), (2, "late")
            results["shared NCCL"] = [summed_by_nccl(*mode, folder, left()) for mode in modes]
        tests = [
            "tests/measure/test_probes.py" if DRY else "tests",
            "-m",
            "device",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
        ]
        code, output, seconds = ended([sys.executable, "-m", "pytest", *tests], left(), ROOT)
    results["tests"] = {"returncode": code, "seconds": seconds, "said": output.splitlines()[-15:]}
    print("tests:", *results["tests"]["said"], sep="\n  ")
    out.write_text(json.dumps(results, indent=1) + "\n")
    failed = [run for run in results["runs"] if "failed" in run or not run.get("overlaps", True)]
    sys.exit(bool(failed or code or any(run["returncode"] for run in results["recipes"].values())))


if __name__ == "__main__":
    main()
