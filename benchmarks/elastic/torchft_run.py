"""Disturb a run of torchft on hosts of the lab as run.py disturbs an elastic run.

PYTHONPATH=FOLDER python benchmarks/elastic/torchft_run.py OUT.json [--minutes 6] [--every 29] [--hosts 4] [--seed 0]

FOLDER has torchft 0.2.0 and what it needs. Each host has a replica group of one process, which is started again at once
when it has died; the lighthouse is on the head. Gloo on CPUs; digits with the recipe's network, optimizer and 16
samples a group and step. Every 29 s in the mean, one of: kill -9 of a group, SIGSTOP of a group (killed after 1 s), a
host's link down for 15 s. Afterwards an undisturbed run, whose weights are compared. Needs root (`unisono lab`).

Gradients are summed by Manager.allreduce: torchft's DistributedDataParallel ends with an AssertionError if Gloo fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchft
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchft import Manager, Optimizer, ProcessGroupGloo

from run import AWAY_SECONDS, SETTLED_SECONDS, link
from unisono.data.builtin import load_digits
from unisono.lab.plan import HEAD_ADDRESS, HOME
from unisono.models.convnet import small_convnet
from unisono.processor import processor

SAMPLES, HASH_EVERY, STOPPED_SECONDS = 16, 20, 1.0
LIGHTHOUSE = "--min_replicas 1 --join_timeout_ms 2000 --quorum_tick_ms 100 --heartbeat_timeout_ms 1000"
GLOO_SECONDS, MANAGER_SECONDS = 2.0, 5.0
"""Shorter than torchft's example has: 10,000 ms and 5,000 ms for the lighthouse, 5 s for Gloo, 30 s for the manager."""


class Commit(NamedTuple):
    """Step that a group has committed. `groups` took part; the hash is that of the weights after some steps, or "-"."""

    time: float
    step: int
    groups: int
    quorum: int
    sha256: str
    group: int


def train(group: int, options: argparse.Namespace) -> None:
    """Train a replica group: one process, which ends by a signal."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    data, host = load_digits().train, f"h{group}"
    store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    model = small_convnet(10)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)

    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=GLOO_SECONDS)),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), sgd.load_state_dict(state["sgd"])),
        state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=1,
        **{"replica_id": host, "rank": 0, "world_size": 1, "store_addr": host, "store_port": store.port},
        **{"hostname": host, "lighthouse_addr": options.lighthouse},
        **dict.fromkeys(["timeout", "quorum_timeout", "connect_timeout"], timedelta(seconds=MANAGER_SECONDS)),
    )
    optimizer = Optimizer(manager, sgd)
    (options.out / f"ready-{group}").touch()
    while len(list(options.out.glob("ready-*"))) < options.hosts:  # they begin together
        time.sleep(0.01)
    per_epoch = len(data) // (SAMPLES * options.hosts)
    with (options.out / f"commits-{group}").open("a", buffering=1) as log:
        while True:
            step = manager.current_step()
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(step // per_epoch))
            rows = order.split(SAMPLES)[step % per_epoch * options.hosts + group]
            optimizer.zero_grad()
            cross_entropy(model(data.inputs[rows]), data.labels[rows]).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            manager.allreduce(together := parameters_to_vector(gradients)).wait()
            vector_to_parameters(together, gradients)
            optimizer.step()
            if (made := manager.current_step()) > step:
                weights = (tensor.numpy().tobytes() for tensor in model.state_dict().values())
                sha256 = "-" if made % HASH_EVERY else hashlib.sha256(b"".join(weights)).hexdigest()
                log.write(f"{time.time()} {made} {manager.num_participants()} {manager._quorum_id} {sha256}\n")


class Groups:
    """Replica groups of a run, which are started, started again and disturbed."""

    def __init__(self, folder: Path, options: argparse.Namespace, hosts: int) -> None:
        folder.mkdir(parents=True)
        lighthouse = f"{sys.executable} {Path(torchft.__file__).parents[1]}/bin/torchft_lighthouse {LIGHTHOUSE}".split()
        self._lighthouse = subprocess.Popen(lighthouse, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        again = [sys.executable, str(Path(__file__).absolute()), str(folder), "--seed", str(options.seed)]
        self._command = [*again, "--hosts", str(hosts), "--lighthouse", f"http://{HEAD_ADDRESS}:29510", "--group"]
        self._folder, self._hosts, self._every = folder, hosts, options.every
        self._chance, self.away = random.Random(options.seed), -1
        self._logs = [(folder / f"commits-{group}").open("a+") for group in range(hosts)]
        self._begun = [""] * hosts  # lines
        self.commits: list[Commit] = []
        self.made: list[dict[str, Any]] = []
        self._later: list[tuple[float, Any]] = []
        self.processes = [self._start(group) for group in range(hosts)]

    def _start(self, group: int) -> subprocess.Popen[bytes]:
        with (self._folder / f"output-{group}").open("ab") as output:
            command = [f"{HOME}/enter", f"h{group}", "exec", *self._command, str(group)]
            return subprocess.Popen(command, stdout=output, stderr=output)

    def play(self, seconds: float, disturbed: bool = False) -> None:
        """Let the groups train for so long after the first step, and until all are there."""
        end = due = whole_since = float("inf")
        while time.time() < end or time.time() < whole_since + SETTLED_SECONDS or self._later:
            time.sleep(0.05)
            for group, process in enumerate(self.processes):
                if process.poll() is not None and group != self.away:
                    self.processes[group] = self._start(group)
            while self._later and self._later[0][0] < time.time():
                self._later.pop(0)[1]()
            new = [commit for group in range(self._hosts) for commit in self._read(group)]
            self.commits += new
            now = time.time()
            if new and end == float("inf"):
                end, due = now + seconds, now + self._chance.expovariate(1 / self._every)
            last = self.commits[-1] if self.commits else Commit(now, 0, 0, 0, "-", 0)
            if self._later or last.groups < self._hosts or now > last.time + 1:
                whole_since = now
            elif disturbed and due < now < end and now > whole_since + SETTLED_SECONDS:
                self._disturb()
                whole_since, due = now, now + self._chance.expovariate(1 / self._every)

    def _read(self, group: int) -> list[Commit]:
        """Return what a group has committed since the last call. A line may be half written, or cut by a death."""
        *lines, self._begun[group] = (self._begun[group] + self._logs[group].read()).split("\n")
        rows = [row for row in map(str.split, lines) if len(row) == len(Commit._fields) - 1]
        return [Commit(float(t), int(step), int(n), int(q), sha, group) for t, step, n, q, sha in rows]

    def _disturb(self) -> None:
        kind = self._chance.choice(["kill", "kill", "stop", "stop", "host"])
        group = self._chance.randrange(self._hosts)
        process = self.processes[group]

        def back() -> None:
            self._note("host back", group)
            link(f"h{group}", "up")
            self.away = -1

        self._note("host gone" if kind == "host" else kind, group)
        if kind == "host":
            link(f"h{group}", "down")
            self.away = group  # nobody starts a process there until it is back
            self._later.append((time.time() + AWAY_SECONDS, back))
        else:
            process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            self._later.append((time.time() + STOPPED_SECONDS, process.kill))

    def _note(self, kind: str, group: int) -> None:
        self.made.append({"kind": kind, "group": group, "time": time.time()})
        print(kind, group, self.made[-1]["time"], flush=True)

    def end(self) -> dict[str, Any]:
        """End the groups; return steps, times and hashes."""
        for process in (*self.processes, self._lighthouse):
            process.kill()
            process.wait()
        for event in self.made:
            moment, kind = event["time"], event["kind"]
            old = max(commit.quorum for commit in self.commits if commit.time < moment)
            new = [commit for commit in self.commits if commit.time > moment and commit.quorum > old]
            if kind != "host back":
                event["others"] = min(commit.time for commit in new if commit.group != event["group"]) - moment
            if kind != "host gone":
                event["all"] = min(commit.time for commit in new if commit.groups == self._hosts) - moment
        by_step = {commit.step: commit for commit in self.commits}
        times = [commit.time for commit in self.commits]
        return {
            "seconds": max(times) - min(times),
            "seconds_without_a_host": AWAY_SECONDS * sum(event["kind"] == "host gone" for event in self.made),
            "steps": len(by_step),
            "shares": sum(commit.groups for commit in by_step.values()),
            "sha256": {commit.step: commit.sha256 for commit in by_step.values() if commit.sha256 != "-"},
            "disturbances": self.made,
        }


def inside(options: argparse.Namespace) -> None:
    """Measure in the lab's head."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    folder, results = options.out.with_suffix(""), dict[str, Any]()
    times = {"without": 20.0, "disturbed": options.minutes * 60, "undisturbed": options.check}
    for name, seconds in times.items():
        groups = Groups(folder / name, options, options.hosts - (name == "without"))
        groups.play(seconds, name == "disturbed")
        results[name] = groups.end()
    disturbed, undisturbed = results["disturbed"], results["undisturbed"]
    rate, rate_without = (run["shares"] / run["seconds"] for run in (undisturbed, results["without"]))
    without = disturbed["seconds_without_a_host"]
    common = max(disturbed["sha256"].keys() & undisturbed["sha256"].keys())
    results["useful"] = disturbed["shares"] / (rate * (disturbed["seconds"] - without) + rate_without * without)
    results |= {"compared_step": common, "same": disturbed["sha256"][common] == undisturbed["sha256"][common]}
    for name in times:
        results[name]["sha256"] = results[name]["sha256"].get(common)
    for kind in ("kill", "stop", "host gone", "host back", "all"):
        for until in ("others", "all"):
            chosen = [event for event in disturbed["disturbances"] if kind in (event["kind"], "all") and until in event]
            if values := [event[until] for event in chosen]:
                median, most = statistics.median(values), max(values)
                print(f"{kind}: {len(values)}; seconds to a step of {until}: {median:.2f}, at most {most:.2f}")
    results["environment"] = {"processor": processor().name, "cores": os.cpu_count(), "load": os.getloadavg()}
    results["environment"] |= {"torch": torch.__version__, "torchft": version("torchft"), "rate": options.rate}
    options.out.write_text(json.dumps(results) + "\n")
    print(f"{results['useful']:.1%} useful; same bits at step {common}: {results['same']}")


def main() -> None:
    """Run the lab, whose launcher is this program again; a replica group is this program as well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=lambda name: Path(name).absolute())
    defaults = {"minutes": 6.0, "check": 60.0, "every": 29.0, "hosts": 4, "seed": 0, "rate": "200mbit"}
    for name, value in (defaults | {"lighthouse": "", "group": -1}).items():  # the last two are a group's
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args()
    if options.group >= 0:
        try:
            train(options.group, options)
        except Exception:  # noqa: BLE001
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # threads of torchft may live on
    if "UNISONO_LAB_HEAD" in os.environ:
        raise SystemExit(inside(options))
    with tempfile.TemporaryDirectory() as folder:
        launcher = Path(folder, "launcher")  # the lab asks it for its version first
        again = " ".join([sys.executable, str(Path(__file__).absolute()), *sys.argv[1:]])
        launcher.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nUNISONO_LAB_HEAD=1 exec {again}\n')
        launcher.chmod(0o755)
        lab = [sys.executable, "-m", "unisono", "lab", "--hosts", str(options.hosts), "--rate", options.rate]
        raise SystemExit(subprocess.run([*lab, "--mpiexec", str(launcher), "--", "true"], check=False).returncode)


if __name__ == "__main__":
    main()
