"""Player of a probe's plan: measures each probe as long as its share of the time lasts, all ranks together.

    part      ├─ probe ─┼─── probe ───┼ ─ ─ ─ left out: too long for what is left ─ ─ ┤ ends
    probe     prepare │ first call, which warms up │ trial │ trial │ ...     the first one of a part twice: what starts
                                                                             threads and libraries does not count
    trial     barrier │ call │ the seconds of all ranks, on all ranks

Rank 0's clock counts, and the slowest rank's seconds, so all ranks make the same number of calls. An error on one rank
is every rank's, and leaves out the probe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from unisono.errors import UsageError
from unisono.probe.computing import prepare_decoding, prepare_product, prepare_sum
from unisono.probe.disk import prepare_read
from unisono.probe.network import prepare_collective, prepare_message
from unisono.probe.plan import LONG_CALL_SECONDS, ProbePart, ProbePlan, fits, share_of, trials
from unisono.probe.probes import (
    CollectiveProbe,
    DecodingProbe,
    DiskProbe,
    MemoryProbe,
    MessageProbe,
    PreparedCall,
    Probe,
    ProductProbe,
)
from unisono.probe.readings import ProbeFindings, ProbeReading, Trial, slowest
from unisono.tuning.links import measure_links
from unisono.world import World

Prepare = Callable[[Any], AbstractContextManager[PreparedCall]]
"""Function that makes a kind of probe ready on this rank."""

Log = Callable[[str], None]


def play(world: World, plan: ProbePlan, folder: Path | None, log: Log) -> ProbeFindings:
    """Measure all parts of the plan. Called by all ranks; disks read from `folder`."""
    begin = time.perf_counter()
    links, readings, left_out = None, list[ProbeReading](), list(plan.left_out)
    prepare = preparations(world, folder)
    for part in plan.parts:
        log(f"measuring {part.name}, until second {part.ends:.0f}")
        if part.name == "links":
            links = measure_links(world, world.comm.bcast(begin + part.ends - time.perf_counter(), 0))
            continue
        found, reasons = _play_part(world, part, prepare, begin)
        readings += found
        left_out += [f"{part.name}: {reason}" for reason in reasons]
    for reason in left_out:
        log(f"left out, {reason}")
    seconds = world.comm.bcast(time.perf_counter() - begin, 0)
    return ProbeFindings(links, tuple(readings), tuple(left_out), seconds)


def preparations(world: World, folder: Path | None) -> Mapping[type[Any], Prepare]:
    """Return the function that prepares each kind of probe on this rank."""
    is_leader = world.rank == world.placement.nodes[world.node][0]
    return {
        ProductProbe: prepare_product,
        MemoryProbe: prepare_sum,
        DecodingProbe: prepare_decoding,
        DiskProbe: partial(prepare_read, folder=folder, reads=is_leader),
        MessageProbe: partial(prepare_message, world=world),
        CollectiveProbe: partial(prepare_collective, world=world),
    }


def _play_part(
    world: World, part: ProbePart, prepare: Mapping[type[Any], Prepare], begin: float
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
                measure(world, probe, prepare[type(probe)], 0.0)
            reading = measure(world, probe, prepare[type(probe)], share_of(remaining, works[number:]))
        except UsageError as error:
            reasons.append(f"{probe.words}: {error}")
            continue
        readings.append(reading)
        seconds_of_work = (reading.preparation + min(map(slowest, reading.trials))) / probe.work
    return readings, reasons


def measure(world: World, probe: Probe, prepare: Prepare, share: float) -> ProbeReading:
    """Return the seconds of a probe that has about `share` seconds. Called by all ranks.

    Raises UsageError on all ranks where one of them fails.
    """
    start = time.perf_counter()
    with ExitStack() as stack:
        prepared = world.call_on_all(lambda: stack.enter_context(prepare(probe)))
        preparation = world.comm.bcast(time.perf_counter() - start, 0)
        first = _trial(world, prepared)
        took = slowest(first)
        counted = [first] if took > LONG_CALL_SECONDS else []
        counted += [_trial(world, prepared) for _ in range(trials(took, share - preparation - took))]
    return ProbeReading(probe, tuple(counted), preparation, prepared.schedule)


def _trial(world: World, prepared: PreparedCall) -> Trial:
    world.comm.Barrier()
    took = world.call_on_all(prepared.call)
    return tuple(world.all_gather_object(took))
