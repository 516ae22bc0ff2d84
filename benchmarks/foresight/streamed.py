"""Seals predictions of runs that stream a pack from a disk of limited rate, then measures them. Needs root and blkio.

    probe in the control group ─▶ disk.bandwidth ─▶ predictions ─▶ SEALED.jsonl ─▶ epochs 0 and 1 ─▶ streamed.md

python benchmarks/foresight/streamed.py SEED FOLDER                     on one node with 2 ranks, about 12 minutes
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from ranks import TRACED, rule_named, slept_machine, slept_run, small_layers
from settings import BATCHES, MORE_LINK_SECONDS, NETWORKS, Cluster, Run

import unisono
from unisono.data import Loader
from unisono.data.kinds import RAW
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source
from unisono.launch import find_mpiexec
from unisono.plan.loading import SampleFacts
from unisono.plan.machines import MachineFacts, find_machine
from unisono.plan.planned_run import PlannedRun
from unisono.plan.run_plan import predict_run

RUNS, RANKS, SAMPLES, SIDE, BUFFER_MEGABYTES = 8, 2, 1_500, 300, 16
MEGABYTES = (4, 6, 10, 20)
"""Rates of the disk, in MB/s. Two ranks ask for 6.75 MB/s: with half of the rates the disk is slower than the step."""

CLUSTER = Cluster(1, RANKS, 25, 1, 0.0, link_seconds=MORE_LINK_SECONDS)
"""Emulates nothing here: sizes the networks, and the computing of a sample, as in the other runs."""

GROUP = Path("/sys/fs/cgroup/blkio/unisono_foresight")
PROBE_SECONDS = 60


@dataclass(frozen=True)
class StreamedRun:
    """Run that streams a pack."""

    run: Run
    megabytes: int
    """Rate of the disk in MB/s."""


def draw(seed: int) -> list[StreamedRun]:
    """Return the runs, two with each rate of the disk."""
    chance = random.Random(seed)
    rates = chance.sample(2 * MEGABYTES, RUNS)
    return [StreamedRun(Run(chance.choice(NETWORKS), chance.choice(BATCHES), "bsp", ""), rate) for rate in rates]


def limited(megabytes: int, command: list[str]) -> None:
    """Run a command in a control group that reads at most so many MB/s from the disk of this folder."""
    device = Path.cwd().stat().st_dev
    GROUP.mkdir(exist_ok=True)
    limit = f"{os.major(device)}:{os.minor(device)} {megabytes * 1_000_000}"
    (GROUP / "blkio.throttle.read_bps_device").write_text(limit)
    join = f'echo $$ > {GROUP / "cgroup.procs"}; exec "$@"'
    subprocess.run(["sh", "-c", join, "sh", *command], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


def noise(folder: Path) -> None:
    """Write a pack of grey images of random bytes, 90 kB each."""
    for part, count in (("train", SAMPLES), ("test", 100)):
        labels, sizes = np.arange(count) * 10 // count, np.full(count, SIDE * SIDE)
        keys = [str(index) for index in range(count)]

        def read(index: int) -> bytes:
            return np.random.default_rng(index).bytes(SIDE * SIDE)

        source = Source(RAW, tuple("0123456789"), keys, labels, sizes, read, (SIDE, SIDE))
        pack(source, folder / part, PackOptions(), 2, lambda: None)


def predict(streamed: StreamedRun, probed: MachineFacts) -> dict[str, float]:
    """Return the predicted step in seconds, its interval, and the step without loading."""
    layers = small_layers(streamed.run, CLUSTER)
    machine = slept_machine(probed, layers, CLUSTER, 0.0)
    flops = machine.node.flops
    assert flops is not None
    machine = replace(machine, node=replace(machine.node, flops=RANKS * flops))
    rule, minibatch = rule_named("bsp", ""), RANKS * streamed.run.batch
    run = PlannedRun(machine, layers, TRACED, rule, minibatch, ranks_per_node=RANKS)
    alone = predict_run(run)[0]
    row = predict_run(replace(run, samples=SampleFacts(nbytes=SIDE * SIDE, from_disk=True)))[0]
    return {"step": row.step, "low": row.low, "high": row.high, "alone": alone.step, "reading": row.reading}


def measure(streamed: StreamedRun, probed: MachineFacts, folder: Path, output: Path) -> None:
    """Write the mean step of the second epoch: what the first leaves in the shuffle buffer comes before it."""
    world = unisono.init()
    trainer, _ = slept_run(world, probed, CLUSTER, streamed.run)
    batch, inputs, labels = RANKS * streamed.run.batch, torch.ones(1, 1), torch.zeros(1)
    with Loader(folder, world, batch, storage="streamed", buffer_megabytes=BUFFER_MEGABYTES) as loader:
        for _ in range(2):
            world.call_on_root(lambda: forget(folder))
            world.barrier()
            begin, steps = time.perf_counter(), 0
            for _ in loader:
                trainer.step(inputs, labels)
                steps += 1
            trainer.wait()
            world.barrier()
        seconds = time.perf_counter() - begin
        if world.rank == 0:
            output.write_text(json.dumps({"measured": seconds / steps, "steps": steps}) + "\n")


def forget(folder: Path) -> None:
    """Ask the system to drop the stripes from its page cache."""
    for stripe in folder.rglob("stripe-*.arrow"):
        file = os.open(stripe, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def seal(path: Path, runs: list[StreamedRun], home: Path) -> list[dict[str, float]]:
    """Return the predictions of all runs, from a file that is written before the first of them."""
    if not path.exists():
        predictions = [predict(run, find_machine(str(home / f"disk-{run.megabytes}.toml"))) for run in runs]
        pairs = zip(runs, predictions, strict=True)
        lines = "".join(json.dumps([asdict(run), each]) + "\n" for run, each in pairs)
        path.write_text(lines)
        print(f"sealed {len(runs)} predictions: {hashlib.sha256(lines.encode()).hexdigest()}", flush=True)
    return [json.loads(line)[1] for line in path.read_text().splitlines()]


def table(runs: list[StreamedRun], sealed: list[dict[str, float]], measured: list[float]) -> str:
    """Return the runs beside their predictions, as Markdown."""
    errors = [each["step"] / step - 1 for each, step in zip(sealed, measured, strict=True)]
    within = sum(each["low"] <= step <= each["high"] for each, step in zip(sealed, measured, strict=True))
    median = float(np.median(np.abs(errors)))
    lines = [
        "# Streamed runs and their predictions",
        "",
        f"Error of the step {median:.1%} in the median, {max(map(abs, errors)):.1%} at most; "
        f"{within} of {len(runs)} within the interval.",
        "",
        "| MB/s | network | samples a rank | without loading, ms | reading | predicted | measured | error |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for streamed, each, step, error in zip(runs, sealed, measured, errors, strict=True):
        times = [f"{1e3 * seconds:.0f}" for seconds in (each["alone"], each["reading"], each["step"], step)]
        cells = [str(streamed.megabytes), streamed.run.network, str(streamed.run.batch), *times, f"{error:+.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main(seed: str, folder: str) -> None:
    """Probe each rate of the disk, predict all runs, then measure them; what the folder has already stays."""
    home, runs = Path(folder).absolute(), draw(int(seed))
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)
    if not (home / "pack").exists():
        noise(home / "pack")
    unisono_program = str(Path(sys.executable).with_name("unisono"))
    for megabytes in sorted({run.megabytes for run in runs}):
        machine = home / f"disk-{megabytes}.toml"
        options = [f"--ranks={RANKS}", f"--seconds={PROBE_SECONDS}", f"--disk={home}"]
        if not machine.exists():
            limited(megabytes, [unisono_program, "probe", str(machine), *options])
    sealed = seal(home / "sealed.jsonl", runs, home)
    for index, run in enumerate(runs):
        output = home / f"run-{index}.json"
        ranks = [str(find_mpiexec()), "-n", str(RANKS), sys.executable, str(Path(__file__).absolute())]
        if not output.exists():
            limited(run.megabytes, [*ranks, "measure", seed, str(index), str(home)])
        print(f"run {index}: {output.read_text().strip()}, predicted {sealed[index]['step']:.3f}", flush=True)
    measured = [json.loads((home / f"run-{index}.json").read_text())["measured"] for index in range(len(runs))]
    (home / "streamed.md").write_text(table(runs, sealed, measured))
    print(table(runs, sealed, measured))


def measure_one(seed: str, index: str, folder: str) -> None:
    """Measure one run, on each of its ranks."""
    home, run = Path(folder), draw(int(seed))[int(index)]
    probed = find_machine(str(home / f"disk-{run.megabytes}.toml"))
    measure(run, probed, home / "pack", home / f"run-{index}.json")


COMMANDS: dict[str, Callable[..., None]] = {"measure": measure_one}

if __name__ == "__main__":
    COMMANDS.get(sys.argv[1], main)(*sys.argv[2 if sys.argv[1] in COMMANDS else 1 :])
