"""What networks learn on real data: with everything that makes them fast and without, on one rank and on several.

    python benchmarks/accuracy/run.py PACKS                             all; hours on 2 cores
    python benchmarks/accuracy/run.py PACKS ranks clothing:ResNet-50    some of: the names in PARTS, one run of one

PACKS holds the packs that the recipes name: fashion_mnist, cifar10, spoken_digits, clothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unisono.launch import cores
from unisono.processor import processor
from unisono.training.measures import Curve, draw

HERE = Path(__file__).parent

PLAIN = ("compute.precision=float32", "compute.convolutions=library")
"""Float32, and PyTorch's own convolutions."""


@dataclass(frozen=True)
class Run:
    """A recipe, and what is changed in it."""

    recipe: str
    label: str
    ranks: int = 2
    changes: tuple[str, ...] = field(default=())
    algorithm: str = ""
    """Of all convolutions that can take it; else of each the fastest."""


def seeds(recipe: str, *numbers: int) -> list[Run]:
    """With and without all that makes it fast."""
    runs = []
    for number in numbers:
        seed = f"training.seed={number}"
        runs += [
            Run(recipe, f"seed {number}", changes=(seed,)),
            Run(recipe, f"seed {number}, plain", changes=(seed, *PLAIN)),
        ]
    return runs


def said(ranks: int, batch: int) -> str:
    """How a run is called."""
    return f"{ranks} rank{'s' * (ranks > 1)}, batch {batch}"


PARTS = {
    "fashion_mnist": seeds("fashion_mnist", 0, 1, 2),
    "cifar10": seeds("cifar10", 0),
    "spoken_digits": [Run("spoken_digits", "seed 0")],
    "clothing": [
        Run("clothing", "AlexNet-BN"),
        Run("clothing", "ResNet-50", changes=("model.name=resnet50",)),
    ],
    "ranks": [Run("fashion_mnist", said(ranks, 128), ranks) for ranks in (1, 2, 4)],
    "winograd": [
        Run("fashion_mnist", f"seed {seed}, 4 x 4 tiles", 2, (f"training.seed={seed}",), "winograd 4x4, 3x3")
        for seed in (0, 1, 2)
    ],
    "local_sgd": [
        Run("fashion_mnist", "BSP"),
        *(
            Run("fashion_mnist", f"local SGD, every {every}", 2, ("rule.name=local_sgd", f"rule.every={every}"))
            for every in (4, 16)
        ),
    ],
    "streamed": [
        Run("fashion_mnist", f"seed {seed}, {name}", 2, (f"training.seed={seed}", f"data.storage={name}", *more))
        for seed in (0, 1, 2)
        for name, more in (("partitioned", ()), ("streamed", ("data.buffer_megabytes=5",)))
    ],
    "growing": [
        Run(
            "fashion_mnist",
            said(ranks, 64 * ranks),
            ranks,
            (f"training.batch={64 * ranks}", "optimizer.for_batch=64", "optimizer.learning_rate=0.05"),
        )
        for ranks in (1, 2, 4)
    ],
}


def main(packs: Path, parts: list[str]) -> None:
    for asked in parts or PARTS:
        part, _, label = asked.partition(":")
        for run in PARTS[part]:
            if label in ("", run.label):
                keep(part, run, train(run, packs))
                plot(part)
                write_summary()


def train(run: Run, packs: Path) -> list[dict[str, Any]]:
    """The metrics of each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        changes = (f"data.pack={packs / run.recipe}", *run.changes)
        if run.algorithm:
            plan = Path(folder, "plan.json")
            changes = (*changes, f"compute.plan={plan}")
            carry_out(run, Path(folder, "trial"), (*changes, "training.epochs=1"))
            take_only(run.algorithm, plan)
        home = Path(folder, "run")
        carry_out(run, home, changes)
        return [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]


def carry_out(run: Run, home: Path, changes: Sequence[str]) -> None:
    """Train it, in this folder."""
    command = [sys.executable, "-m", "unisono", "train", run.recipe]
    options = [f"--ranks={run.ranks}", f"--run={home}", *(f"--set={change}" for change in changes)]
    subprocess.run([*command, *options], check=True)


def take_only(algorithm: str, plan: Path) -> None:
    """Leave a plan no choice where this algorithm was timed."""
    machines = json.loads(plan.read_text())
    for machine in machines:
        passes = machine["measured"].items()
        machine["measured"] = {
            key: {algorithm: times[algorithm]} if algorithm in times else times for key, times in passes
        }
    plan.write_text(json.dumps(machines))


def keep(part: str, run: Run, epochs: list[dict[str, Any]]) -> None:
    path = HERE / f"{part}.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    products = "float32" if set(PLAIN) <= set(run.changes) or not processor().bfloat16 else "bfloat16"
    machine = {"processor": processor().name, "cores": cores(), "torch": torch.__version__}
    results[run.label] = {"ranks": run.ranks, "changes": run.changes, "products": products, **machine, "epochs": epochs}
    path.write_text(json.dumps(results, indent=1) + "\n")


def plot(part: str) -> None:
    """Draw the runs of a part against time and epochs."""
    curves = []
    for label, result in json.loads((HERE / f"{part}.json").read_text()).items():
        epochs = result["epochs"]
        columns = [tuple(epoch[key] for epoch in epochs) for key in ("epoch", "elapsed", "test_accuracy")]
        curves.append(Curve(label, *columns))
    (HERE / f"{part}.svg").write_bytes(draw(curves))


def write_summary() -> None:
    lines = ["# Accuracy: what was measured", ""]
    for part in PARTS:
        path = HERE / f"{part}.json"
        if not path.is_file():
            continue
        lines += [
            f"## {part}",
            "",
            "| run | products in | epochs | test accuracy | top 5 |",
            "| --- | --- | ---: | ---: | ---: |",
        ]
        for label, result in json.loads(path.read_text()).items():
            last = result["epochs"][-1]
            five = f"{last['test_top5']:.2%}" if "test_top5" in last else ""
            shares = f"{last['test_accuracy']:.2%} | {five}"
            lines.append(f"| {label} | {result['products']} | {last['epoch']} | {shares} |")
        lines.append("")
    (HERE / "summary.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
