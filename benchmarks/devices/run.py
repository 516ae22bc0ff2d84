"""Exchanges, training steps, recipes and tests on the accelerators of one node, beside copies, gloo and NCCL.

python benchmarks/devices/run.py OUT.json [RANKS ...]        1, 2 and 4 ranks; under 9 minutes in all
python benchmarks/devices/run.py --dry OUT.json              the same, small, on a device that pretends

exchange   allreduce of a tensor on the device, beside its two copies alone, and beside the same allreduce on the host:
           copies and sums overlap, so the bound is the largest of the three
step       a training step, beside the same without an exchange, DDP over gloo, and (one rank for each device) over NCCL
recipes    digits until it has learned, ResNet-50 and AlexNet an epoch on noise, by `unisono train` on 2 ranks
NCCL       sums by NCCL within nodes, of ranks that share a GPU (`shared_nccl.py`): right or not, without times
tests      python -m pytest tests -m device; on 2 ranks those of reducers and of staged collectives

Recipes and tests come first. Each part that fails or takes too long is said so, and the others go on; the exit code is
then 1.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def missing_packages() -> list[str]:
    """Return the packages that are not there, of those that the package and its tests import before they run."""
    paths = [path for folder in ("src/unisono", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = set[str]()
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                named.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                named.add(node.module)
    own = {"benchmarks", "tests", "unisono", *(path.stem for path in (ROOT / "conformance").rglob("*.py"))}
    missing = set[str]()
    for name in {name.split(".")[0] for name in named} - sys.stdlib_module_names - own:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing.add(error.name or name)
    if not any(importlib.metadata.distributions(name="unisono")):
        missing.add("unisono-0.1.0.dist-info/METADATA")
    return sorted(missing)


if __name__ == "__main__" and "rank" not in sys.argv and (MISSING := missing_packages()):
    sys.exit(f"not found: {', '.join(MISSING)}; put unpacked wheels on PYTHONPATH (benchmarks/devices/README.md)")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import unisono  # noqa: E402
from unisono.device import host_memory, module_of  # noqa: E402
from unisono.launch import find_mpiexec  # noqa: E402
from unisono.models import MODELS  # noqa: E402

SIZES = [1 << 20, 8 << 20, 64 << 20, 256 << 20]
"""Bytes of exchanged tensors."""

NETWORKS = {"resnet50": 64, "alexnet": 64}
"""Networks of which a step is timed, and samples of a rank's batch."""

ROUNDS = 7
"""Rounds of all contenders, of which the median counts."""

LIMIT_SECONDS = 520.0
"""Seconds of everything."""

SHARES = {"recipes": 4, "tests": 3, "tests on 2 ranks": 3, "ranks": 5, "NCCL": 2}
"""Parts in their order, each with its share of the time that is left for it and those behind it."""

SETTLED_STEPS = 50
"""Steps that do not count: in the first 30 to 40, Unisono tries overlaps and buckets."""

WITHIN_BOUND, LONG_BYTES = 1.15, 64 << 20
"""Largest ratio of a staged exchange to its bound, for the long tensors: of as many bytes and more."""

DRY = "--dry" in sys.argv
if DRY:
    SIZES, NETWORKS, ROUNDS, LONG_BYTES, SETTLED_STEPS = [1 << 12, 1 << 16], {"small_convnet": 4}, 2, 1 << 16, 5

TESTS = ["tests/measure/test_probes.py" if DRY else "tests", "-m", "device"]
"""Words of pytest for the tests of devices in one process."""

TESTS_ON_RANKS = ["tests/mpi/collectives/test_staged.py", *([] if DRY else ["tests/mpi/reducer/test_devices.py"])]
"""Words of pytest for those of several ranks, which share the device."""

IMAGES = 8 if DRY else 512
"""Images of noise that a recipe of ImageNet is given."""

RECIPES = {
    "digits": ["--set", f"training.epochs={1 if DRY else 15}"],
    "imagenet_resnet50": ["--set", f"training.batch={4 if DRY else 128}", "--set", "optimizer.warm_epochs=0"],
    "imagenet_alexnet": ["--set", f"training.batch={4 if DRY else 128}"],
}
"""Recipes that are run, with the keys that are not those of a cluster."""


class Budget:
    """Seconds from now on, of which each part has a share of those that are left: none is given nothing."""

    def __init__(self, seconds: float, shares: Mapping[str, int]) -> None:
        self._end, self._shares = time.monotonic() + seconds, dict(shares)

    def share(self, name: str) -> float:
        """Return the seconds of a part that begins; those behind it are to come."""
        whole = sum(self._shares.values())
        return (self._end - time.monotonic()) * self._shares.pop(name) / whole


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


def measured(ranks: int, folder: Path, limit: float) -> dict[str, Any]:
    """Return the findings of so many ranks, which are printed."""
    out = folder / f"{ranks}.json"
    command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, __file__, "rank", str(out), "exchange,step"]
    code, output, _ = ended([*command, *(["--dry"] if DRY else [])], limit, folder)
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
    code, output, seconds = ended(command, limit, folder)
    lines = [line for line in output.splitlines() if line.startswith(("NVIDIA", f"{ranks} ranks", "sums", "rank 0:"))]
    print(*lines, sep="\n", flush=True)
    right = any(line.startswith("rank 0:" if mode == "late" else "sums that are not the host's: 0;") for line in lines)
    record = {"ranks": ranks, "mode": mode, "returncode": code, "seconds": seconds, "said": lines}
    return {**record, "right": right and (code == 0 or mode == "late")}  # whose ranks end as they can


def main() -> None:
    """Run the recipes and the tests, measure with all numbers of ranks, and write what was found."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--dry"]
    if arguments[0] == "rank":
        rank_main(Path(arguments[1]), arguments[2].split(","))
        return
    out, ranks = Path(arguments[0]).resolve(), [int(count) for count in arguments[1:]] or [1, 2, 4]
    environment = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    results: dict[str, Any] = {"environment": environment}
    failed: list[str] = []
    parts: dict[str, Callable[[float, Path], dict[str, bool]]] = {
        "recipes": lambda limit, folder: run_recipes(limit, folder, results),
        "tests": lambda limit, _: run_tests("tests", limit, results, [], TESTS),
        "tests on 2 ranks": lambda limit, _: run_tests(
            "tests on 2 ranks", limit, results, [str(find_mpiexec()), "-n", "2"], TESTS_ON_RANKS
        ),
        "ranks": lambda limit, folder: run_ranks(ranks, limit, folder, results),
        "NCCL": lambda limit, folder: run_nccl(limit, folder, results),
    }
    budget = Budget(LIMIT_SECONDS, SHARES)
    with tempfile.TemporaryDirectory() as temporary:
        for name, part in parts.items():
            failed += [f"{name}: {of}" for of, right in part(budget.share(name), Path(temporary)).items() if not right]
            out.write_text(json.dumps(results, indent=1) + "\n")
    print("failed:", *failed or ["nothing"], sep="\n  ")
    sys.exit(bool(failed))


def run_recipes(limit: float, folder: Path, results: dict[str, Any]) -> dict[str, bool]:
    """Run the recipes; return for each whether it has ended."""
    pack_noise(folder / "noise")
    budget = Budget(limit, dict.fromkeys(RECIPES, 1))
    results["recipes"] = {name: trained(name, changes, folder, budget.share(name)) for name, changes in RECIPES.items()}
    return {name: run["returncode"] == 0 for name, run in results["recipes"].items()}


def run_tests(
    name: str, limit: float, results: dict[str, Any], launcher: list[str], files: list[str]
) -> dict[str, bool]:
    """Run tests by pytest, behind the words of a launcher; return whether they have passed."""
    words = [*launcher, sys.executable, "-m", "pytest", *files, "-q", "-n", "0", "-p", "no:cacheprovider"]
    code, output, seconds = ended(words, limit, ROOT)
    results[name] = {"returncode": code, "seconds": seconds, "said": output.splitlines()[-15:]}
    print(f"{name}: {seconds:.0f} s", *results[name]["said"], sep="\n  ", flush=True)
    return {" ".join(files): code == 0}


def run_ranks(ranks: list[int], limit: float, folder: Path, results: dict[str, Any]) -> dict[str, bool]:
    """Measure on each number of ranks; return for each whether it has ended, with copies that overlap."""
    budget = Budget(limit, dict.fromkeys(map(str, ranks), 1))
    results["runs"] = [measured(count, folder, budget.share(str(count))) for count in ranks]
    return {
        f"{count} ranks": "failed" not in run and run.get("overlaps", True)
        for count, run in zip(ranks, results["runs"], strict=True)
    }


def run_nccl(limit: float, folder: Path, results: dict[str, Any]) -> dict[str, bool]:
    """Sum by NCCL, where there is CUDA; return for each mode whether it was right."""
    if not torch.cuda.is_available():
        print("NCCL: there is no CUDA")
        return {}
    modes = {"one": 2, "nodes": 4, "late": 2}
    budget = Budget(limit, dict.fromkeys(modes, 1))
    runs = {mode: summed_by_nccl(count, mode, folder, budget.share(mode)) for mode, count in modes.items()}
    results["shared NCCL"] = [*runs.values()]
    return {mode: run["right"] for mode, run in runs.items()}


if __name__ == "__main__":
    main()
