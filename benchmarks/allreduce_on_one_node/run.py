"""Runs the benchmark with 2 and with 4 ranks, writes results.json and prints the table.

python benchmarks/allreduce_on_one_node/run.py
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from unisono.launch import find_mpiexec

HERE = Path(__file__).parent

PEERS = ("library", "library, tensor", "gloo")


def run(ranks: int) -> dict[str, Any]:
    """What `measure.py` found on `ranks` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, str(HERE / "measure.py"), f"{folder}/store"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=1800, check=True)
    results: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def table(results: dict[str, Any]) -> str:
    """Medians, ratios and the quartiles of the window's time, a line for each size."""
    head = (
        "| bytes | window us (quartiles) | anywhere us | library us | library, tensor us | gloo us | copy us "
        "| library/window | gloo/window | copy/window | library/anywhere |"
    )
    lines = [f"{results['ranks']} ranks, {results['library']}", "", head, "| ---: " * 11 + "|"]
    for row in results["sizes"]:
        median = {name: row[name]["median_us"] for name in ("window", "anywhere", *PEERS, "copy")}
        window = median["window"]
        spread = f"{row['window']['lower_us']:.1f}-{row['window']['upper_us']:.1f}"
        times = " | ".join(f"{median[name]:.1f}" for name in ("anywhere", *PEERS, "copy"))
        ratios = " | ".join(f"{median[name] / window:.2f}" for name in ("library", "gloo", "copy"))
        last = median["library"] / median["anywhere"]
        lines.append(f"| {row['bytes']} | {window:.1f} ({spread}) | {times} | {ratios} | {last:.2f} |")
    return "\n".join(lines)


def table_of_new(results: dict[str, Any]) -> str:
    """Medians and quartiles of sums of new tensors, a line for each size that has them."""
    names = "new tensors", "library, new tensors"
    lines = [f"{results['ranks']} ranks, a new tensor in each call", ""]
    lines += ["| bytes | new tensors us (quartiles) | library, new tensors us | ratio |", "| ---: " * 4 + "|"]
    for row in results["sizes"]:
        if names[0] in row:
            ours, library = (row[name] for name in names)
            times = (
                f"{ours['median_us']:.1f} ({ours['lower_us']:.1f}-{ours['upper_us']:.1f}) | {library['median_us']:.1f}"
            )
            lines.append(f"| {row['bytes']} | {times} | {library['median_us'] / ours['median_us']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    results = {"machine": machine(), "runs": [run(ranks) for ranks in (2, 4)]}
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    for run_results in results["runs"]:
        print(table(run_results), table_of_new(run_results), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
