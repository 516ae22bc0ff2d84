"""Runs the benchmark of the step: in the lab on 4 and 8 hosts with slept computing, and AlexNet on one node.

python benchmarks/overlaps/run.py [PART ...]       the lab needs root and iproute2; about 80 minutes on 2 cores
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layers import NETWORKS

from unisono.launch import find_mpiexec

HERE = Path(__file__).parent
TABLE = HERE.parent / "collectives" / "switch" / "table.toml"
RATE = 100_000_000
"""Bits a second of a host's link: more, and two cores cannot keep up with all hosts' messages."""

CONTENDERS = ("none", "funnel", "concurrent", "chain", "auto", "DDP on gloo", "auto, bfloat16")


def lab(program: str, output: str, hosts: int, network: str) -> None:
    """Slept steps of a network on so many hosts of one switch."""
    options = ["--supernodes=1", f"--hosts={hosts}", f"--rate={RATE // 1_000_000}mbit"]
    command = [sys.executable, str(HERE / program), str(HERE / output), str(RATE), network]
    launch = [sys.executable, "-m", "unisono", "lab", *options, "--", *command]
    subprocess.run(launch, env={**os.environ, "UNISONO_TABLE": str(TABLE), "OMP_NUM_THREADS": "1"}, check=True)


def one_node(dtype: str, block: int, *overlaps: str) -> None:
    """AlexNet on two ranks of this machine."""
    command = [sys.executable, str(HERE / "one_node.py"), str(HERE / f"one_node_{dtype}.json"), dtype, str(block)]
    subprocess.run([str(find_mpiexec()), "-n", "2", *command, *overlaps], check=True)


PARTS: dict[str, Callable[[], None]] = {
    **{
        f"lab_{hosts}:{name}": partial(lab, "steps.py", f"lab_{hosts}.json", hosts, name)
        for hosts in (4, 8)
        for name in NETWORKS
    },
    **{
        f"predictions_{hosts}:{name}": partial(lab, "predictions.py", "predictions.json", hosts, name)
        for hosts in (4, 8)
        for name in NETWORKS
    },
    "one_node_float32": partial(one_node, "float32", 3, "auto", "none", "chain"),
    "one_node_bfloat16": partial(one_node, "bfloat16", 1, "chain"),
}


def row(result: dict[str, Any]) -> str:
    """A network and ratio as a row of the table."""
    step, bounds = result["step_s"], result["float32"]
    auto, peer = step["auto"], step["DDP on gloo"]
    cells = [result["network"], f"{result['ratio']:g}", f"{result['computing_s']:.2f}"]
    cells += [f"{bounds['bound_of_link_s']:.2f}", f"{bounds['bound_of_exchange_s']:.2f}"]
    cells += [f"{step[name]:.2f}" for name in CONTENDERS]
    off = result["auto"]["predicted_s"] / auto - 1
    overlap, size = result["auto"]["setting"]
    cells += [f"{auto / bounds['bound_of_exchange_s']:.2f}", f"{step['none'] / auto:.2f}", f"{peer / auto:.2f}"]
    cells += [f"{peer / step['auto, bfloat16']:.2f}", f"{off:+.0%}", f"{overlap}, {size / (1 << 20):g} MiB"]
    return "| " + " | ".join(cells) + " |"


def predictions(rows: list[dict[str, Any]]) -> list[str]:
    """The table of what was predicted, and how far off it was."""
    lines = ["## The step as `auto` predicted it", "", "| hosts | network | ratio | setting | step | predicted |"]
    lines += ["| ---: | --- | ---: | --- | ---: | ---: |"]
    offs = []
    for row in sorted(rows, key=lambda row: (row["ranks"], row["network"], row["ratio"])):
        (overlap, size), off = row["setting"], row["predicted_s"] / row["step_s"] - 1
        offs.append(abs(off))
        cells = [row["ranks"], row["network"], f"{row['ratio']:g}", f"{overlap}, {size / (1 << 20):g} MiB"]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row['step_s']:.3f} s", f"{off:+.1%}"])) + " |")
    lines += ["", f"Off by {statistics.median(offs):.1%} in the median, {max(offs):.1%} at worst.", ""]
    return lines


def summary() -> str:
    """All results as tables in Markdown."""
    lines = ["# The step: overlaps, bounds and PyTorch's DDP", ""]
    head = ["network", "communication / computing", "computing", "bound (link)", "bound (exchange)", *CONTENDERS]
    head += ["auto / bound", "none / auto", "DDP / auto", "DDP / auto bf16", "predicted", "auto is"]
    for path in sorted(HERE.glob("lab_*.json")):
        rows = json.loads(path.read_text())["rows"]
        hosts = rows[0]["ranks"]
        lines += [f"## {hosts} hosts at {RATE // 1_000_000} Mbit/s, computing slept; seconds of a step", ""]
        lines += ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
        lines += [*map(row, rows), ""]
    if (path := HERE / "predictions.json").exists():
        lines += predictions(json.loads(path.read_text()))
    lines += ["## AlexNet on one node, 2 ranks, batch 16 a rank; seconds of a step", ""]
    for path in sorted(HERE.glob("one_node_*.json")):
        results = json.loads(path.read_text())
        step = results["step_s"]
        first = next(iter(results["settings"]))
        each = ", ".join(f"{name} {seconds:.3f}" for name, seconds in step.items())
        ratio = step["DDP on gloo"] / step[first]
        lines += [f"{results['dtype']}: {each}. DDP on gloo / {first}: {ratio:.2f}.", ""]
    cores = f"{os.cpu_count()} cores ({platform.processor() or platform.machine()})"
    lines += [f"PyTorch {torch.__version__}, Python {platform.python_version()}, {cores}.", ""]
    return "\n".join(lines)


def main(parts: list[str]) -> None:
    """Run the parts that are named, all by default, and write the summary of what there is."""
    for part in parts or PARTS:
        if part not in PARTS:
            sys.exit(f"no part {part!r}; there are {', '.join(PARTS)}")
        PARTS[part]()
    (HERE / "summary.md").write_text(summary())
    print(summary())


if __name__ == "__main__":
    main(sys.argv[1:])
