"""Runs the benchmark of the shuffle: time, memory and traffic against ranks, groups, interval and scope, in the lab.

python benchmarks/shuffle/run.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from unisono.bench.shuffle import random_pack

HERE = Path(__file__).parent
SUPERNODES, HOSTS, RATE, OVERSUBSCRIBE = 2, (1, 2, 4), "200mbit", 4
SAMPLES = 20_000


def table_of(hosts: int, path: Path) -> Path:
    """The table that has the supernodes of the lab, and no choices."""
    names = [[f"h{supernode * hosts + host}" for host in range(hosts)] for supernode in range(SUPERNODES)]
    path.write_text("".join(f"[[supernode]]\nhosts = {json.dumps(each)}\n\n" for each in names))
    return path


def measure(hosts: int, folder: Path, room: Path) -> None:
    """One size of the cluster."""
    options = [f"--supernodes={SUPERNODES}", f"--hosts={hosts}", f"--rate={RATE}", f"--oversubscribe={OVERSUBSCRIBE}"]
    script = [sys.executable, HERE / "ranks.py", HERE / f"ranks_{SUPERNODES * hosts}.json", folder]
    command = [sys.executable, "-m", "unisono", "lab", *options, "--", *map(str, script)]
    table = table_of(hosts, room / f"table_{hosts}.toml")
    subprocess.run(command, env={**os.environ, "UNISONO_TABLE": str(table), "OMP_NUM_THREADS": "1"}, check=True)


def summary() -> str:
    """All results as Markdown."""
    heads = ["ranks", "groups", "shuffle", "ranks numbered", "s an epoch", "spread", "MB sent", "MB through uplinks"]
    heads += ["MB of a rank's samples", "MB of its memory"]
    lines = ["# The shuffle against ranks, groups, interval and scope", ""]
    lines += ["| " + " | ".join(heads) + " |", "| ---: | ---: | --- | --- |" + " ---: |" * (len(heads) - 4)]
    for hosts in HOSTS:
        for row in json.loads((HERE / f"ranks_{SUPERNODES * hosts}.json").read_text()):
            low, high = row["spread"]
            cells = [row["ranks"], row["groups"], f"`{row['shuffle']}`", row["numbering"], f"{row['seconds']:.2f}"]
            cells.append(f"{low:.2f} to {high:.2f}")
            cells += [f"{row[f'{name}_bytes'] / 1e6:.1f}" for name in ("sent", "uplink", "partition", "memory")]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure all clusters and write the summary."""
    with tempfile.TemporaryDirectory() as room:
        folder = random_pack(Path(room) / "pack", SAMPLES)
        for hosts in HOSTS:
            measure(hosts, folder, Path(room))
    (HERE / "summary.md").write_text(summary())
    print(summary())


if __name__ == "__main__":
    main()
