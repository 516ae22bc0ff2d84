"""Runs the benchmark of exact sums: seeded runs whose weights shall have the same bits, and what the sum costs.

python benchmarks/exact/run.py [RUNS [RANKS,RANKS,... [FOLDER]]]
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from unisono.launch import find_mpiexec, launch_environment

HERE = Path(__file__).parent
NETWORKS = ("small_convnet", "resnet8", "gpt")
RANKS = "1,2,3,4,8"


def settings(runs: int, ranks: list[int]) -> list[dict[str, Any]]:
    """The runs, drawn with seed 0: each network, rule and number of ranks in turn, all else at random."""
    draw = random.Random(0)
    return [
        {
            "network": NETWORKS[number % 3],
            "ranks": ranks[number % len(ranks)],
            "rule": draw.choice(("bsp", "sharded")),
            "algorithm": draw.choice(("auto", "ring", "direct", "library")),
            "bucket_bytes": draw.choice((None, 2_000, 30_000, 1 << 20)),
            "overlap": draw.choice(("chain", "concurrent", "funnel", "none")),
            "nodes": draw.choice((1, 2)),
            "trainer": draw.random() < 0.5,
        }
        for number in range(runs)
    ]


def launched(ranks: int, task: str, content: Any) -> Any:
    """What rank 0 of so many has found."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given.json", Path(folder) / "found.json"
        given.write_text(json.dumps(content))
        environment = {**launch_environment(os.environ, terminal=False), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "ranks.py"), task, str(given), str(found)]
        subprocess.run([str(find_mpiexec()), "-n", str(ranks), *command], env=environment, check=True)
        return json.loads(found.read_text())


def main(runs: str = "60", ranks: str = RANKS, folder: str = str(HERE)) -> None:
    """Train all runs, measure the sums on two ranks, and write `results.json` and `summary.md` to a folder."""
    numbers, digests = [int(one) for one in ranks.split(",")], defaultdict(list)
    planned, done = settings(int(runs), numbers), []
    for number in sorted(set(numbers)):
        mine = [one for one in planned if one["ranks"] == number]
        done += [{**one, "sha256": digest} for one, digest in zip(mine, launched(number, "train", mine), strict=True)]
    costs = launched(2, "cost", [])
    for one in done:
        digests[one["network"]].append(one["sha256"])
    equal = sum(max(map(several.count, several)) for several in digests.values())
    Path(folder, "results.json").write_text(json.dumps({"runs": done, "costs": costs}, indent=1) + "\n")
    lines = ["# Exact sums", "", f"**{equal} of {len(done)} runs have the bits of the others** of their network.", ""]
    lines += ["| network | runs | sha256 |", "| --- | ---: | --- |"]
    lines += [f"| {name} | {len(own)} | {', '.join(sorted({d[:16] for d in own}))} |" for name, own in digests.items()]
    lines += ["", "| 2 ranks, one node | plain, ms | exact, ms | ratio |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {one['what']} | {one['plain']:.3f} | {one['exact']:.3f} | {one['ratio']:.2f} |" for one in costs]
    cores = f"{os.cpu_count()} cores ({platform.processor() or platform.machine()})"
    lines += ["", f"PyTorch {torch.__version__}, Python {platform.python_version()}, {cores}."]
    Path(folder, "summary.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
