"""Disturb an elastic run on hosts of the lab, and compare it with one that nothing disturbs.

python benchmarks/elastic/run.py OUT.json [--epochs 400] [--every 29] [--hosts 4] [--seed 0]

Both make the same epochs of digits. Every 29 s in the mean, one of: kill -9 of a rank, SIGSTOP of a rank, a host's link
down for 15 s (gone, and back: two disturbances). Needs root (`unisono lab`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from unisono.elastic.generations import ElasticRun
from unisono.lab.plan import HOME
from unisono.processor import processor
from unisono.startup import read_process

SETTINGS = ("training.virtual_ranks=4", "compute.convolutions=library")
AWAY_SECONDS = 15.0
SETTLED_SECONDS = 3.0
"""Seconds after the first step of a generation before it is disturbed again."""


def lines_of(home: Path) -> list[dict[str, Any]]:
    """Return the lines about generations."""
    path = home / "generations.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ranks_of(run: ElasticRun) -> list[int]:
    """Return the processes of the ranks, which standbys have forked: both have the same command line."""
    every = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    found = [one for one in every if read_process(one, "cmdline").split(b"\0")[3:4] == [run.standby.encode()]]
    children = {int(child) for one in found for child in read_process(one, f"task/{one}/children").split()}
    return [one for one in found if one in children]


def link(host: str, state: str) -> None:
    """Take a host's link up or down."""
    command = ["nsenter", f"--net={HOME}/{host}/net", "ip", "link", "set", "eth0", state]
    subprocess.run(command, check=True)


class Disturber:
    """Disturbances of a run, by chance."""

    def __init__(self, home: Path, hosts: list[str], every: float, seed: int) -> None:
        self._run, self._hosts, self._every, self._chance = ElasticRun(home), hosts, every, random.Random(seed)
        self.made: list[dict[str, Any]] = []

    def play(self, process: subprocess.Popen[bytes]) -> None:
        """Disturb the run until it ends."""
        due = time.time() + self._wait()
        while process.poll() is None:
            time.sleep(0.05)
            lines = lines_of(self._run.home)
            if time.time() < due or not lines or "first_step" not in lines[-1]:
                continue
            if time.time() - lines[-1]["time"] < SETTLED_SECONDS:
                continue
            kind = self._chance.choice(["kill", "kill", "stop", "stop", "host"])
            if kind == "host":
                self._take_away(self._chance.choice(self._hosts), process)
            elif ranks := ranks_of(self._run):
                self._note(kind)
                os.kill(self._chance.choice(ranks), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            due = time.time() + self._wait()

    def _take_away(self, host: str, process: subprocess.Popen[bytes]) -> None:
        self._note("host gone", host)
        link(host, "down")
        until = time.time() + AWAY_SECONDS
        while time.time() < until and process.poll() is None:
            time.sleep(0.05)
        self._note("host back", host)
        link(host, "up")

    def _wait(self) -> float:
        return self._chance.expovariate(1 / self._every)

    def _note(self, kind: str, host: str = "") -> None:
        self.made.append({"kind": kind, "host": host, "time": time.time()})


def measure(home: Path, options: argparse.Namespace, disturbed: bool) -> dict[str, Any]:
    """Train once; return times, disturbances and the hash of the weights."""
    hosts = [f"h{number}" for number in range(options.hosts)]
    settings = [word for change in (*SETTINGS, f"training.epochs={options.epochs}") for word in ("--set", change)]
    command = [sys.executable, "-m", "unisono", "train", "digits", "--elastic", "--run", str(home), *settings]
    command += ["--hosts", ",".join(hosts), "--ranks", str(options.hosts)]
    disturber = Disturber(home, hosts, options.every, options.seed)
    with (home.parent / f"{home.name}.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as run:
        if disturbed:
            disturber.play(run)
    lines = lines_of(home)
    first = [line["time"] for line in lines if "first_step" in line]
    newest = max((home / "checkpoints").iterdir())
    for made in disturber.made:
        made["seconds"] = min((at for at in first if at > made["time"]), default=math.inf) - made["time"]
    return {
        "code": run.returncode,
        "seconds": lines[-1]["time"] - first[0],
        "generations": sum("generation" in line for line in lines),
        "step": newest.name,
        "sha256": hashlib.sha256((newest / "weights.safetensors").read_bytes()).hexdigest(),
        "disturbances": disturber.made,
    }


def inside(options: argparse.Namespace) -> None:
    """Measure in the lab's head."""
    os.environ |= {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": f"{HOME}/enter", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        found: dict[str, Any] = {"processor": processor().name, "hosts": options.hosts, "every": options.every}
        for name in ("undisturbed", "disturbed"):
            found[name] = measure(Path(folder, name), options, disturbed=name == "disturbed")
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    plain, disturbed = found["undisturbed"], found["disturbed"]
    kinds = sorted({made["kind"] for made in disturbed["disturbances"]})
    print(f"{disturbed['step']}; same bits: {plain['sha256'] == disturbed['sha256']}")
    print(
        f"{plain['seconds']:.0f} s undisturbed are {plain['seconds'] / disturbed['seconds']:.1%} of the disturbed time"
    )
    for kind in kinds:
        seconds = [made["seconds"] for made in disturbed["disturbances"] if made["kind"] == kind]
        median, most = statistics.median(seconds), max(seconds)
        print(f"{kind}: {len(seconds)} times; seconds to the next step: median {median:.2f}, most {most:.2f}")


def main() -> None:
    """Run the lab, whose launcher is this program again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--every", type=float, default=29.0)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", default="1gbit")
    options = parser.parse_args()
    options.out = options.out.absolute()
    if "UNISONO_LAB_HEAD" in os.environ:
        inside(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        launcher = Path(folder, "launcher")  # the lab asks it for its version first
        again = " ".join([sys.executable, str(Path(__file__).absolute()), *sys.argv[1:2], *sys.argv[2:]])
        launcher.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nUNISONO_LAB_HEAD=1 exec {again}\n')
        launcher.chmod(0o755)
        lab = [sys.executable, "-m", "unisono", "lab", "--hosts", str(options.hosts), "--rate", options.rate]
        raise SystemExit(subprocess.run([*lab, "--mpiexec", str(launcher), "--", "true"], check=False).returncode)


if __name__ == "__main__":
    shutil.which("ip") or sys.exit("unisono lab needs ip: add /usr/sbin to PATH")
    main()
