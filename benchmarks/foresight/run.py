"""Runs the benchmark of sealed predictions: probes each cluster of the lab, seals the predictions, measures the runs.

python benchmarks/foresight/run.py SET SEED FOLDER [CLUSTER ...]        SET: drawn, more
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from settings import CHOICES_ON, DRAWS, Cluster

from report import write_summary

HERE = Path(__file__).parent
PROBE_SECONDS = 40


def in_lab(cluster: Cluster, *command: str) -> None:
    """Run a command on all ranks of a cluster."""
    unisono = str(Path(sys.executable).with_name("unisono"))
    subprocess.run(
        [unisono, "lab", *cluster.options, "--", *command], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True
    )


def measure(index: int, cluster: Cluster, home: Path, arguments: list[str], kinds: str) -> None:
    """Probe a cluster that was not probed yet, and measure its runs of these kinds."""
    print(f"cluster {index}: {' '.join(cluster.options)}", flush=True)
    machine = home / f"cluster-{index}.toml"
    if not machine.exists():
        unisono = str(Path(sys.executable).with_name("unisono"))
        in_lab(cluster.probed, unisono, "probe", str(machine), f"--seconds={PROBE_SECONDS}")
    in_lab(cluster, sys.executable, str(HERE / "ranks.py"), *arguments, str(index), str(home), kinds)


def main(name: str, seed: str, folder: str, *numbers: str) -> None:
    """Measure clusters, all of them without numbers: drawn runs first, then choices. Write the summary.

    What a folder has already stays: a run that was stopped goes on.
    """
    home, clusters = Path(folder).absolute(), DRAWS[name](int(seed))
    home.mkdir(parents=True, exist_ok=True)
    wanted = [int(index) for index in numbers or range(len(clusters))]
    for index in wanted:
        measure(index, clusters[index], home, [name, seed], "drawn,repeated")
    write_summary(home)
    for index in wanted:
        if name == "drawn" and index < CHOICES_ON:
            measure(index, clusters[index], home, [name, seed], "choice")
    write_summary(home)


if __name__ == "__main__":
    main(*sys.argv[1:])
