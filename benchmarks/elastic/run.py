"""Disturb an elastic run on hosts of the lab, and compare it with one that nothing disturbs.

python benchmarks/elastic/run.py OUT.json [--epochs 2500] [--every 29] [--hosts 4] [--seed 0]

The other has one rank, and as many epochs of digits; short runs on all hosts and on all but one measure what those that
are there could do, before it and after. Every 29 s in the mean: kill -9 of a rank, SIGSTOP of a rank, or a host's link
down for 15 s (gone, and back: two disturbances). Needs root (`unisono lab`). The ranks record the samples that they
train on (`sample_keys.py`): those of the steps that counted are compared with the order of the seed.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

from sample_keys import check, keys_of

from unisono.elastic.generations import ElasticRun
from unisono.lab.plan import HOME
from unisono.processor import processor
from unisono.startup import read_process
from unisono.training.run_directory import recipe_of

SHARES = 4

SETTINGS = (
    f"training.virtual_ranks={SHARES}",
    "compute.convolutions=library",
    "model.name=sample_keys:network",
    f"model.folder={Path(__file__).resolve().parent}",
)
AWAY_SECONDS = 15.0
RATE_EPOCHS = 100
"""Epochs of the runs whose rate is what a number of hosts could do: that of the second half, when the search and all
but the last trials have ended."""

SETTLED_SECONDS = 3.0
"""Seconds after the first step of a generation before it is disturbed again."""


def lines_of(home: Path) -> list[dict[str, Any]]:
    """Return the lines about generations."""
    path = home / "generations.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ranks_of(run: ElasticRun) -> list[int]:
    """Return the processes of the ranks, which standbys have forked: both have the same command line."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    standby = [b"unisono.elastic.standby", run.standby.encode()]
    processes = [pid for pid in pids if read_process(pid, "cmdline").split(b"\0")[3:5] == standby]
    children = {int(child) for pid in processes for child in read_process(pid, f"task/{pid}/children").split()}
    return [pid for pid in processes if pid in children]


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


def rate_of(home: Path) -> float:
    """Return the steps per second of a run that nothing disturbed, in its second half."""
    epochs = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    first, last = epochs[len(epochs) // 2], epochs[-1]
    return float((last["step"] - first["step"]) / (last["elapsed"] - first["elapsed"]))


def measure(home: Path, options: argparse.Namespace, hosts: int, epochs: int, disturbed: bool) -> dict[str, Any]:
    """Train once; return times, disturbances and the hash of the weights. One that is there already, or under way,
    is only read when it has ended."""
    names = [f"h{host}" for host in range(hosts)]
    settings = [word for change in (*SETTINGS, f"training.epochs={epochs}") for word in ("--set", change)]
    command = [sys.executable, "-m", "unisono", "train", "digits", "--elastic", "--run", str(home), *settings]
    command += ["--hosts", ",".join(names), "--ranks", str(hosts)]
    disturber = Disturber(home, names, options.every, options.seed)
    if not home.exists():
        with home.with_suffix(".log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as run:
            if disturbed:
                disturber.play(run)
    while "code" not in (lines := lines_of(home))[-1]:
        time.sleep(1)
    first = [line["time"] for line in lines if "first_step" in line]
    newest = max((home / "checkpoints").iterdir())
    steps, made = (
        int(newest.name.partition("-")[2]),
        [event for event in disturber.made if event["time"] < lines[-1]["time"]],
    )
    for event in made:
        event["seconds"] = min((moment for moment in first if moment > event["time"]), default=math.inf) - event["time"]
    ends = [line["time"] for line in lines if "generation" in line]
    lost = {"noticing": 0.0, "between_generations": 0.0}
    for before, end in pairwise(ends):
        lost["between_generations"] += min([end, *(moment for moment in first if moment > before)]) - before
    for event in made:  # a host that is back is asked while the others train
        ended = min((moment for moment in ends if moment > event["time"]), default=event["time"])
        lost["noticing"] += (ended - event["time"]) * (event["kind"] != "host back")
    return {
        "lost_seconds": lost,
        "code": lines[-1]["code"],
        "hosts": hosts,
        "seconds": lines[-1]["time"] - first[0],
        "seconds_without_a_host": sum(
            min([later["time"] for later in made[index:] if later["kind"] == "host back"] or [lines[-1]["time"]])
            - event["time"]
            for index, event in enumerate(made)
            if event["kind"] == "host gone"
        ),
        "generations": sum("generation" in line for line in lines),
        "steps": steps,
        "sha256": hashlib.sha256((newest / "weights.safetensors").read_bytes()).hexdigest(),
        "disturbances": made,
    }


def inside(options: argparse.Namespace) -> None:
    """Measure in the lab's head."""
    os.environ |= {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": f"{HOME}/enter", "OMP_NUM_THREADS": "1"}
    folder, count = options.out.with_suffix(""), options.hosts
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"processor": processor().name, "hosts": count, "every": options.every}
    rates: list[list[float]] = []
    for when in ("before", "after"):  # a machine's speed changes in half an hour
        if when == "after":
            results["disturbed"] = measure(folder / "disturbed", options, count, options.epochs, disturbed=True)
        homes = {hosts: folder / f"{hosts}-hosts-{when}" for hosts in (count, count - 1)}
        for hosts, home in homes.items():
            measure(home, options, hosts, RATE_EPOCHS, disturbed=False)
        rates.append([*map(rate_of, homes.values())])
    disturbed, results["steps_per_second"] = results["disturbed"], rates
    rate, rate_without = map(statistics.mean, zip(*rates, strict=True))
    results["undisturbed"] = measure(folder / "undisturbed", options, 1, options.epochs, disturbed=False)
    without = disturbed["seconds_without_a_host"]
    possible = rate * (disturbed["seconds"] - without) + rate_without * without
    results["useful"] = disturbed["steps"] / possible
    for name in ("disturbed", "undisturbed"):
        training = recipe_of(folder / name, []).training
        try:
            said = check(keys_of(folder / name), training.seed, options.epochs, training.batch, SHARES)
        except ValueError as error:
            said = f"{error}"
        results[name]["samples"] = said
        print(f"samples, {name}: {said}")
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    same = results["undisturbed"]["sha256"] == disturbed["sha256"]
    print(f"{disturbed['steps']} steps in {disturbed['seconds']:.0f} s; same bits as on one rank, undisturbed: {same}")
    print(f"{results['useful']:.1%} of the {possible:.0f} steps that the hosts that were there could make")
    lost = {**disturbed["lost_seconds"], "all": disturbed["seconds"] - disturbed["seconds"] * results["useful"]}
    print("seconds lost: " + ", ".join(f"{seconds:.1f} {kind.replace('_', ' ')}" for kind, seconds in lost.items()))
    made = disturbed["disturbances"]
    for kind in [*sorted({event["kind"] for event in made}), "all"]:
        seconds = [event["seconds"] for event in made if kind in (event["kind"], "all")]
        median, most = statistics.median(seconds), max(seconds)
        print(f"{kind}: {len(seconds)} times; seconds to the next step: median {median:.2f}, most {most:.2f}")


def main() -> None:
    """Run the lab, whose launcher is this program again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=2500)
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
