"""Settings of the sealed predictions, drawn by a seed: clusters of the lab, and on each of them runs.

    seed ─▶ 10 clusters: hosts x rate <= 800 Mbit/s, topology     the first one drawn has a host with a slow link
              each 4 runs: network, batch, wire, rule             6 of the other 36 have a late host

>>> len(draw(1)), sum(len(cluster.runs) for cluster in draw(1))
(10, 40)
>>> sum(bool(cluster.slow_host or run.late) for cluster in draw(1) for run in cluster.runs)
10
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

CLUSTERS, RUNS = 10, 4
"""Clusters that are drawn, each with its own probe, and runs on each."""

MORE_RUNS = 5
"""Runs on each number of hosts that are predicted from a probe of two."""

MORE_LINK_SECONDS = 0.64
"""Seconds of a host's link for all gradients of these runs. The Python of a step is then a small part of it: 8 hosts of
the lab share two cores, which those of a probe of 2 do not show."""

LATE_RUNS = 6
"""Runs with a late host."""

CHOICES_ON = 3
"""Clusters on whose runs all choices are measured: 12 runs."""

MAX_MEGABITS = 800
"""Largest product of hosts and rate in Mbit/s that two cores carry."""

NETWORKS = ("alexnet", "googlenet", "resnet50", "vgg_a")
BATCHES = (8, 16, 32, 64)
"""Samples a rank. Of 24 the computing takes as long as the link needs for all gradients."""

RULES = ("bsp", "sharded", "local_sgd:4")
WIRES = ("", "bfloat16")

CHOICES = (
    ("bsp", ""),
    ("bsp", "bfloat16"),
    ("sharded", ""),
    ("sharded", "bfloat16"),
    ("bsp without overlap", ""),
    ("bsp without overlap", "bfloat16"),
)
"""Six rules and wires, of which the fastest is to be named."""


@dataclass(frozen=True)
class Run:
    """Run on a cluster."""

    network: str
    batch: int
    """Samples a rank."""
    rule: str
    wire: str
    late: float = 0.0
    """Factor of the last host's computing; 0: all are alike."""


@dataclass(frozen=True)
class Cluster:
    """Cluster of the lab."""

    supernodes: int
    hosts: int
    """Hosts per supernode."""
    megabits: int
    """Rate of a host's link."""
    oversubscribe: int
    slow_host: float
    """Factor of the last host's link; 0: all are alike."""
    runs: tuple[Run, ...] = ()
    probed_hosts: int = 0
    """Hosts of the probe; 0: all of the cluster."""
    link_seconds: float = 0.16
    """Seconds of a host's link for all gradients once: networks are made smaller to this, in proportion."""

    @property
    def ranks(self) -> int:
        """Number of hosts, each with a rank."""
        return self.supernodes * self.hosts

    @property
    def options(self) -> list[str]:
        """Options of `unisono lab`."""
        options = [f"--supernodes={self.supernodes}", f"--hosts={self.hosts}", f"--rate={self.megabits}mbit"]
        options += [f"--oversubscribe={self.oversubscribe}"] if self.supernodes > 1 else []
        return options + ([f"--slow-host={self.ranks - 1}:{self.slow_host:g}"] if self.slow_host else [])

    @property
    def probed(self) -> Cluster:
        """Cluster that is probed."""
        return replace(self, hosts=self.probed_hosts) if self.probed_hosts else self


TOPOLOGIES = ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4))
"""Supernodes, and hosts of each."""

RATES = (50, 100, 200, 400)


def draw(seed: int) -> list[Cluster]:
    """Return the clusters and their runs."""
    chance = random.Random(seed)
    slow, late = chance.randrange(CLUSTERS), set[tuple[int, int]]()
    while len(late) < LATE_RUNS:
        place = chance.randrange(CLUSTERS), chance.randrange(RUNS)
        late |= {place} if place[0] != slow else set()
    return [
        _cluster(chance, index == slow, {run for cluster, run in late if cluster == index}) for index in range(CLUSTERS)
    ]


def draw_more(seed: int) -> list[Cluster]:
    """Return 4 and 8 hosts with 5 runs each, predicted from a probe of 2 hosts."""
    chance = random.Random(seed)
    return [
        Cluster(1, hosts, 25, 1, 0.0, tuple(_run(chance) for _ in range(MORE_RUNS)), 2, MORE_LINK_SECONDS)
        for hosts in (4, 8)
    ]


JOBS = 20
JOB_MINUTES = (3.5, 5.5)
"""Bounds of the drawn length of a job's steps."""

JOB_MEGABITS = 200
"""Product of hosts and rate in Mbit/s of a job, of which several run at a time."""

JOB_LINK_SECONDS = 1.28
"""Seconds of a host's link for all gradients of a job: the Python of the ranks of all jobs shares two cores."""


@dataclass(frozen=True)
class JobDraw:
    """Job on a cluster, whose machine is probed on two hosts."""

    hosts: int
    run: Run
    minutes: float
    """Length of its steps as predicted."""

    @property
    def cluster(self) -> Cluster:
        """Cluster of the job."""
        return Cluster(1, self.hosts, JOB_MEGABITS // self.hosts, 1, 0.0, (self.run,), 2, JOB_LINK_SECONDS)


def draw_jobs(seed: int) -> list[JobDraw]:
    """Return the jobs whose wall time is compared with the time that was asked for."""
    chance = random.Random(seed)
    return [JobDraw(chance.choice((2, 4, 8)), _run(chance), chance.uniform(*JOB_MINUTES)) for _ in range(JOBS)]


DRAWS = {"drawn": draw, "more": draw_more}
"""Sets of settings by name."""


def _run(chance: random.Random, late: bool = False) -> Run:
    run = Run(chance.choice(NETWORKS), chance.choice(BATCHES), chance.choice(RULES), chance.choice(WIRES))
    return replace(run, late=chance.choice((1.2, 1.5, 2.0))) if late else run


def _cluster(chance: random.Random, slow: bool, late: set[int]) -> Cluster:
    supernodes, hosts = chance.choice(TOPOLOGIES)
    rate = chance.choice([rate for rate in RATES if supernodes * hosts * rate <= MAX_MEGABITS])
    factor = chance.choice((1.5, 2.0, 3.0))
    return Cluster(
        supernodes,
        hosts,
        rate,
        chance.choice((1, 2, 4)),
        factor if slow else 0.0,
        tuple(_run(chance, run in late) for run in range(RUNS)),
    )
