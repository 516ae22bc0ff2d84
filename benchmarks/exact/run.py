"""Runs the benchmark of exact sums: seeded runs whose weights shall have the same bits, and what the sum costs.

python benchmarks/exact/run.py [RUNS [RANKS,RANKS,... [FOLDER]]]

Runs that `results.json` has are not repeated: the program may be ended and started again.
"""

from __future__ import annotations

import json
import os
import platform
import random
import site
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from unisono.bench.against import folder_of, install
from unisono.launch import find_mpiexec, launch_environment

HERE = Path(__file__).parent
NETWORKS = ("small_convnet", "resnet8", "gpt")
RANKS = "1,2,3,4,8"


def settings(runs: int, ranks: list[int]) -> list[dict[str, Any]]:
    """The runs, drawn with seed 0: each network, rule and number of ranks in turn, all else at random."""
    draw = random.Random(0)
    return [
        {
            "network": NETWORKS[index % 3],
            "ranks": ranks[index % len(ranks)],
            "library": ("mpich", "openmpi")[index // 15 % 2],
            "rule": draw.choice(("bsp", "sharded")),
            "algorithm": draw.choice(("auto", "ring", "direct", "library")),
            "bucket_bytes": draw.choice((None, 2_000, 30_000, 1 << 20)),
            "piece_bytes": draw.choice((None, 16 << 10, 64 << 10)),
            "overlap": draw.choice(("chain", "concurrent", "funnel", "none")),
            "nodes": draw.choice((1, 2)),
            "trainer": draw.random() < 0.5,
        }
        for index in range(runs)
    ]


def launched(library: str, ranks: int, task: str, content: Any) -> Any:
    """What rank 0 of so many has found, with the MPI of this environment or with another."""
    environment = {**launch_environment(os.environ, terminal=False), "OMP_NUM_THREADS": "1"}
    mpiexec, python = find_mpiexec(), sys.executable
    if library == "openmpi":
        install(library, print)
        folder = folder_of(library, os.environ)
        mpiexec, python = folder / "bin" / "mpiexec", str(folder / "bin" / "python")
        packages = [*folder.glob("lib/python*/site-packages"), *site.getsitepackages()]
        environment["PYTHONPATH"] = os.pathsep.join(map(str, [HERE.parents[1] / "src", *packages]))
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "given.json", Path(folder) / "found.json"
        given.write_text(json.dumps(content))
        command = [python, str(HERE / "ranks.py"), task, str(given), str(result)]
        subprocess.run([str(mpiexec), "-n", str(ranks), *command], env=environment, check=True)
        return json.loads(result.read_text())


def main(runs: str = "60", ranks: str = RANKS, folder: str = str(HERE)) -> None:
    """Train all runs, measure the sums on two ranks, and write `results.json` and `summary.md` to a folder."""
    numbers, digests, kept = [int(count) for count in ranks.split(",")], defaultdict(list), Path(folder, "results.json")
    content = json.loads(kept.read_text()) if kept.exists() else {}
    planned, done = settings(int(runs), numbers), content.get("runs", [])
    have = [{key: value for key, value in run.items() if key != "sha256"} for run in done]
    left = sorted((run for run in planned if run not in have), key=_launch)
    for (library, size), several in groupby(left, _launch):
        for run in (batch := list(several)):
            print(run, flush=True)
        digests_of = launched(library, size, "train", batch)
        done += [{**run, "sha256": digest} for run, digest in zip(batch, digests_of, strict=True)]
        kept.write_text(json.dumps({"runs": done}, indent=1) + "\n")
    if "costs" not in content:
        content["costs"], content["errors"] = launched("mpich", 2, "measure", [])
    costs, errors = content["costs"], content["errors"]
    for run in done:
        digests[run["network"]].append(run["sha256"])
    equal = sum(max(map(several.count, several)) for several in digests.values())
    kept.write_text(json.dumps({"runs": done, "costs": costs, "errors": errors}, indent=1) + "\n")
    lines = ["# Exact sums", "", f"**{equal} of {len(done)} runs have the bits of the others** of their network.", ""]
    lines += ["| network | runs | sha256 |", "| --- | ---: | --- |"]
    lines += [
        f"| {name} | {len(hashes)} | {', '.join(sorted({d[:16] for d in hashes}))} |"
        for name, hashes in digests.items()
    ]
    lines += ["", "| 2 ranks, one node | plain, ms | exact, ms | ratio |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {cost['what']} | {cost['plain']:.3f} | {cost['exact']:.3f} | {cost['ratio']:.2f} |" for cost in costs]
    head = "sums of 8 shares | exact: largest error | mean | float32 in rank order: largest | mean | mean sum"
    lines += ["", f"| {head} |"]
    columns = "exact largest", "exact mean", "serial largest", "serial mean", "mean"
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    lines += [f"| {error['network']} | {' | '.join(f'{error[key]:.2e}' for key in columns)} |" for error in errors]
    cores = f"{os.cpu_count()} cores ({platform.processor() or platform.machine()})"
    lines += ["", f"PyTorch {torch.__version__}, Python {platform.python_version()}, {cores}."]
    Path(folder, "summary.md").write_text("\n".join(lines) + "\n")


def _launch(setting: dict[str, Any]) -> tuple[str, int]:
    return setting["library"], setting["ranks"]


if __name__ == "__main__":
    main(*sys.argv[1:])
