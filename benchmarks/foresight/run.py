"""Runs the benchmark of sealed predictions: probes each cluster of the lab, seals the predictions, measures the runs.

python benchmarks/foresight/run.py SET SEED FOLDER [CLUSTER ...]        SET: drawn, more
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from settings import DRAWS, Cluster

from report import write_summary

HERE = Path(__file__).parent
PROBE_SECONDS = 40


def in_lab(cluster: Cluster, *command: str) -> None:
    """Run a command on all ranks of a cluster."""
    unisono = str(Path(sys.executable).with_name("unisono"))
    subprocess.run(
        [unisono, "lab", *cluster.options, "--", *command], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True
    )


def main(name: str, seed: str, folder: str, *numbers: str) -> None:
    """Measure clusters, all of them without numbers, and write the summary."""
    home, clusters = Path(folder).absolute(), DRAWS[name](int(seed))
    home.mkdir(parents=True, exist_ok=True)
    for number in map(int, numbers or range(len(clusters))):
        cluster, began = clusters[number], time.perf_counter()
        print(f"cluster {number}: {' '.join(cluster.options)}", flush=True)
        machine = home / f"cluster-{number}.toml"
        machine.unlink(missing_ok=True)
        unisono = str(Path(sys.executable).with_name("unisono"))
        in_lab(cluster.probed, unisono, "probe", str(machine), f"--seconds={PROBE_SECONDS}")
        probed = time.perf_counter() - began
        in_lab(cluster, sys.executable, str(HERE / "ranks.py"), name, seed, str(number), str(home))
        took = {"cluster": number, "probe_s": probed, "all_s": time.perf_counter() - began}
        with (home / "times.jsonl").open("a") as file:
            file.write(json.dumps(took) + "\n")
    write_summary(home)


if __name__ == "__main__":
    main(*sys.argv[1:])
