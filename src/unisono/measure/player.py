"""Player of a probe's plan: measures each probe as long as its share of the time lasts, all ranks together.

    plan_probe ─▶ parts ── play ──▶ findings ── machine_facts ──▶ MachineFacts ─▶ OUT.toml
    pure                   acts                 pure

    part      ├─ probe ─┼─── probe ───┼ ─ ─ ─ left out: too long for what is left ─ ─ ┤ ends
    probe     prepare │ first call, which warms up │ trial │ trial │ ...     the first one of a part twice: what starts
                                                                             threads and libraries does not count
    trial     barrier │ call │ the seconds of all ranks, on all ranks

Rank 0's clock counts, and the slowest rank's seconds, so all ranks make the same number of calls. An error on one rank
is every rank's, and leaves out the probe.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from unisono.errors import UsageError
from unisono.measure.facts import machine_facts, sites_of
from unisono.measure.links import measure_links
from unisono.measure.probe_plan import (
    ProbeFindings,
    ProbePart,
    ProbePlan,
    ProbeReading,
    Trial,
    fits,
    plan_probe,
    share_of,
    slowest,
    trials,
)
from unisono.measure.probes import MeasuredCall, Probe
from unisono.measure.timing import LONG_CALL_SECONDS
from unisono.plan.machines import MachineFacts
from unisono.world import World

Log = Callable[[str], None]


def probe(world: World, seconds: float, disk: Path | None, name: str, log: Log) -> MachineFacts:
    """Measure the machine in about `seconds`. Called by all ranks, with the same result on each.

    `disk` is a folder of the file system to read from, on every node. An empty `name` becomes the hosts and ranks.
    """
    plan = plan_probe(seconds, world.nodes, world.size, disk is not None)
    return machine_of(world, play(world, plan, disk, log), name)


def machine_of(world: World, findings: ProbeFindings, name: str = "") -> MachineFacts:
    """Return the machine that all ranks have found, the same on each. Called by all ranks."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    facts = machine_facts(findings, sites_of(world), world.placement, today, version("unisono"), name)
    return world.call_on_root(lambda: facts)


def play(world: World, plan: ProbePlan, folder: Path | None, log: Log) -> ProbeFindings:
    """Measure all parts of the plan. Called by all ranks; disks read from `folder`."""
    begin = time.perf_counter()
    links, readings, left_out = None, list[ProbeReading](), list(plan.left_out)
    for part in plan.parts:
        log(f"measuring {part.name}, until second {part.ends:.0f}")
        if part.name == "links":
            links = measure_links(world, world.comm.bcast(begin + part.ends - time.perf_counter(), 0))
            continue
        found, reasons = _play_part(world, part, folder, begin)
        readings += found
        left_out += [f"{part.name}: {reason}" for reason in reasons]
    for reason in left_out:
        log(f"left out, {reason}")
    seconds = world.comm.bcast(time.perf_counter() - begin, 0)
    return ProbeFindings(links, tuple(readings), tuple(left_out), seconds)


def _play_part(
    world: World, part: ProbePart, folder: Path | None, begin: float
) -> tuple[list[ProbeReading], list[str]]:
    """Return what was measured of a part, and the reasons for which the rest was not."""
    readings, reasons = list[ProbeReading](), list[str]()
    works, seconds_of_work = [probe.work for probe in part.probes], 0.0
    for number, probe in enumerate(part.probes):
        remaining = world.comm.bcast(begin + part.ends - time.perf_counter(), 0)
        expected = seconds_of_work * probe.work
        if remaining <= 0:
            reasons.append(f"{probe.words}: its part of the seconds was over; give more with --seconds")
            continue
        if not fits(expected, remaining):
            reasons.append(f"{probe.words}: takes about {expected:.2g} s, {remaining:.2g} s were left")
            continue
        try:
            if not number:
                measure(world, probe, folder, 0.0)
            reading = measure(world, probe, folder, share_of(remaining, works[number:]))
        except UsageError as error:
            reasons.append(f"{probe.words}: {error}")
            continue
        readings.append(reading)
        seconds_of_work = (reading.preparation + min(map(slowest, reading.trials))) / probe.work
    return readings, reasons


def measure(world: World, probe: Probe, folder: Path | None, share: float) -> ProbeReading:
    """Return the seconds of a probe that has about `share` seconds. Called by all ranks.

    Raises UsageError on all ranks where one of them fails.
    """
    start = time.perf_counter()
    with ExitStack() as stack:
        call = world.call_on_all(lambda: stack.enter_context(probe.prepare(world, folder)))
        preparation = world.comm.bcast(time.perf_counter() - start, 0)
        first = _trial(world, call)
        took = slowest(first)
        counted = [first] if took > LONG_CALL_SECONDS else []
        counted += [_trial(world, call) for _ in range(trials(took, share - preparation - took))]
    return ProbeReading(probe, tuple(counted), preparation, probe.schedule(world))


def _trial(world: World, call: MeasuredCall) -> Trial:
    world.comm.Barrier()
    took = world.call_on_all(call)
    return tuple(world.all_gather_object(took))
