"""Runs the benchmark of weight gradients first, and writes its summary.

python benchmarks/weight_first/run.py [SAMPLES [ROUNDS [FOLDER]]]
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unisono.launch import find_mpiexec, launch_environment

HERE = Path(__file__).parent
NETWORKS = ("alexnet", "vgg_a")
FIRST, OWN = "weights first", "PyTorch's order"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median, and least to largest, as text."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(results: dict[str, Any]) -> list[str]:
    """A network's results as lines of Markdown."""
    steps, begins, shares = results["step_s"], results["begin_s"], results["begin_share"]
    gains = [stock / first for stock, first in zip(steps[OWN], steps[FIRST], strict=True)]
    lines = [f"## {results['network']}, {results['ranks']} ranks, {results['samples']} samples a rank", ""]
    lines += [f"| | {OWN} | {FIRST} |", "| --- | ---: | ---: |"]
    for name, key in (("step, s", "step_s"), ("backward pass, s", "backward_s")):
        lines.append(f"| {name} | {spread(results[key][OWN])} | {spread(results[key][FIRST])} |")
    lines += ["", f"{OWN} / {FIRST}, round by round: {spread(gains)}.", ""]
    lines += [f"| exchange of | begins, {OWN}, s | {FIRST}, s | share of the pass | {FIRST} |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for layer in begins[OWN]:
        cells = [layer, spread(begins[OWN][layer]), spread(begins[FIRST][layer])]
        cells += [f"{statistics.median(shares[order][layer]):.1%}" for order in (OWN, FIRST)]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def main(samples: str = "16", rounds: str = "9", folder: str = str(HERE)) -> None:
    """Measure all networks on two ranks of this machine, and write `NETWORK.json` and `summary.md` to a folder."""
    lines = ["# Weight gradients first", ""]
    for name in NETWORKS:
        output = Path(folder) / f"{name}.json"
        command = [sys.executable, str(HERE / "steps.py"), str(output), name, samples, rounds]
        environment = {**launch_environment(os.environ, terminal=False), "OMP_NUM_THREADS": "1"}
        subprocess.run([str(find_mpiexec()), "-n", "2", *command], env=environment, check=True)
        lines += table(json.loads(output.read_text()))
    cores = f"{os.cpu_count()} cores ({platform.processor() or platform.machine()})"
    lines += [f"PyTorch {torch.__version__}, Python {platform.python_version()}, {cores}.", ""]
    (Path(folder) / "summary.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
