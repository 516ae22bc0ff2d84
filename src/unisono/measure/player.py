"""Player of a probe's plan: measures each probe as long as its share of the time lasts, all ranks together.

    plan_probe ─▶ parts ── play ──▶ findings ── machine_facts ──▶ MachineFacts ─▶ OUT.toml
    pure                   acts                 pure

    part      ├─ probe ─┼─── probe ───┼ ─ ─ ─ left out: too long for what is left ─ ─ ┤ ends
    probe     prepare │ first call, which warms up │ trial │ trial │ ...     the first one of a part twice: what starts
                                                                             threads and libraries does not count
    trial     barrier │ call │ the seconds of all ranks, on all ranks

Rank 0's clock counts, and the slowest rank's seconds, so all ranks make the same number of calls. An error on one rank
is every rank's, and leaves out the probe.

**Tuning** times the candidates of each collective and size on the ranks of a world, for the table of choices:

    links ─▶ supernodes ─▶ candidates, at 4 B, 16 B, ... ─▶ rows ── machine_facts ──▶ [choices] of a machine file

    bytes     ring          tree         library                   rows: the fastest of adjacent sizes
    1024      2.1 ms        0.9 ms       1.0 ms      tree          tree     up to 8192  (between 4096 and 16384)
    4096      2.2 ms        1.2 ms       1.9 ms      tree
    16384     2.3 ms        2.9 ms       2.8 ms      ring          ring     the rest
"""

from __future__ import annotations

import datetime
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from math import isqrt
from pathlib import Path

import torch

from unisono.compute.prepare import has_bfloat16
from unisono.data.loading import PROCESSOR
from unisono.errors import UsageError
from unisono.formats import counted
from unisono.measure.facts import machine_facts, sites_of
from unisono.measure.links import Links, measure_links
from unisono.measure.probes import (
    MeasuredCall,
    Probe,
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
from unisono.measure.timing import (
    LONG_CALL_SECONDS,
    MAX_TRIALS,
    MIN_TRIALS,
    Timing,
    collective_call,
    times,
    timing_of,
    worth_another,
)
from unisono.network import Network, estimate
from unisono.network.choice import COLLECTIVES, LIBRARY, ChoiceRow, parse_table
from unisono.placement import Placement, place
from unisono.plan.machines import MachineFacts, parse_machine
from unisono.schedules import candidates, find
from unisono.world import World

Log = Callable[[str], None]


def probe(
    world: World, seconds: float, disk: Path | None, name: str, log: Log, device: torch.device = PROCESSOR
) -> MachineFacts:
    """Measure the machine in about `seconds`. Called by all ranks, with the same result on each.

    `disk` is a folder of the file system to read from, on every node. An empty `name` becomes the hosts and ranks.
    `device` is this rank's, of the same kind on all.
    """
    bfloat16 = all(world.all_gather_object(has_bfloat16(device)))
    plan = plan_probe(seconds, world.placement, disk is not None, device, bfloat16)
    return machine_of(world, play(world, plan, disk, log), name, device)


def machine_of(world: World, findings: ProbeFindings, name: str = "", device: torch.device = PROCESSOR) -> MachineFacts:
    """Return the machine that all ranks have found, the same on each. Called by all ranks."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    facts = machine_facts(findings, sites_of(world, device), world.placement, today, version("unisono"), name)
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
        part_readings, reasons = _play_part(world, part, folder, begin)
        readings += part_readings
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
    for index, probe in enumerate(part.probes):
        remaining = world.comm.bcast(begin + part.ends - time.perf_counter(), 0)
        expected = seconds_of_work * probe.work
        if remaining <= 0:
            reasons.append(f"{probe.label}: its part of the seconds was over; give more with --seconds")
            continue
        if not fits(expected, remaining):
            reasons.append(f"{probe.label}: takes about {expected:.2g} s, {remaining:.2g} s were left")
            continue
        try:
            if not index:
                measure(world, probe, folder, 0.0)
            reading = measure(world, probe, folder, share_of(remaining, works[index:]))
        except UsageError as error:
            reasons.append(f"{probe.label}: {error}")
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


SIZES = tuple(4**power for power in range(1, 15))
"""Payloads in bytes: 4 B to 256 MB."""

MAX_BYTES = {name: 16 << 20 for name in COLLECTIVES if name != "allreduce"}
"""Largest payloads of the collectives other than allreduce: the best choice there serves larger ones too."""

TRIAL_SECONDS_PER_SIZE = 6.0
"""Seconds of trials for each size, beyond the trials that every candidate gets."""


def tune(world: World, max_bytes: int, log: Log, machine: MachineFacts | None = None) -> MachineFacts:
    """Return the machine with its links, and with choices up to `max_bytes` bytes.

    Called by all ranks, with the same result on each. A `machine` that was measured before keeps all but its choices at
    this location: on one node, or across nodes.
    """
    begin, where = time.perf_counter(), "one node" if world.nodes == 1 else "across nodes"
    log(f"measuring the links of {counted(world.size, 'rank')} on {counted(world.nodes, 'node')}")
    links = measure_links(world)
    placement = place(world.placement.node_of_rank, [links.supernodes[node] for node in world.placement.node_of_rank])
    log(describe(links))
    known = World(world.comm.Dup(), placement, world.table)
    choices = {
        collective: rows(_timings(known, collective, links.network, max_bytes, log), where)
        for collective in COLLECTIVES
    }
    known.free()
    seconds = world.comm.bcast(time.perf_counter() - begin, 0)
    tuned = machine_of(world, ProbeFindings(links if world.nodes > 1 else None, (), (), seconds, choices))
    return tuned if machine is None else replace(machine, choices=machine.choices.updated(tuned.choices, where))


def machine_at(path: Path) -> MachineFacts | None:
    """Return the machine of a file; None for one that is absent or empty, and for a table of choices of the old form.

    Raises UsageError for any other file: a measurement must not replace what it cannot keep.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        if "name" in content:
            return parse_machine(content, f"{path} is no machine")
        if content:
            parse_table(content, "it has no name, as machines have, and is no table of choices either")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, UsageError) as error:
        why = str(error).removeprefix(f"{path} is no machine: ")
        raise UsageError(f"{path} is no machine ({why}); mend it, or name another file") from error
    return None


def describe(links: Links) -> str:
    """Return the network in words."""
    network, count = links.network, len(set(links.supernodes))
    text = f"{counted(count, 'supernode')}, {float(network.alpha) * 1e6:.0f} µs a message, "
    text += f"{8e-6 / float(network.beta):.0f} Mbit/s a node"
    if network.uplink_beta:
        text += f", {8e-6 / float(network.uplink_beta):.0f} Mbit/s an uplink"
    return text


def _timings(world: World, collective: str, network: Network, max_bytes: int, log: Log) -> dict[int, dict[str, Timing]]:
    """Return, for each size in bytes, the timings of the candidates that were worth timing."""
    timings: dict[int, dict[str, Timing]] = {}
    fused = {"allreduce": ["flat", "direct"], "broadcast": ["tree"]}.get(collective, ["direct"])
    names = [LIBRARY, *(fused if world.placement.one_node else candidates(collective, world.placement))]
    remaining = names
    for nbytes in (size for size in SIZES if size <= min(max_bytes, MAX_BYTES.get(collective, max_bytes))):
        payload = torch.zeros(nbytes // 4)
        calls = {name: collective_call(world, collective, payload, name) for name in remaining}
        seconds = times(world, calls, MAX_TRIALS, TRIAL_SECONDS_PER_SIZE, factor=1.5)
        timings[nbytes] = {name: timing_of(took) for name, took in seconds.items() if len(took) >= MIN_TRIALS}
        best = min(timings[nbytes], key=lambda name: timings[nbytes][name].median)
        log(f"{collective} {nbytes} B: {best} {timings[nbytes][best].median * 1e3:.3f} ms")
        estimated = _estimated_near_best(names, collective, world.placement, network, 4 * nbytes)
        close = worth_another(seconds, factor=2.0)
        remaining = [name for name in names if name in close or name in estimated]
    return timings


def _estimated_near_best(
    names: list[str], collective: str, placement: Placement, network: Network, nbytes: int
) -> set[str]:
    """Return the schedules estimated within 1.3 of the cheapest at `nbytes` bytes."""
    if placement.one_node:
        return set(names)
    prices = {
        name: float(estimate(getattr(find(name, placement), collective), placement, network, nbytes))
        for name in names
        if name != LIBRARY
    }
    return {name for name, price in prices.items() if price <= 1.3 * min(prices.values())}


def rows(timings: Mapping[int, Mapping[str, Timing]], where: str) -> tuple[ChoiceRow, ...]:
    """Return the rows of a collective for timings by size in bytes and algorithm; `where` its ranks are.

    The algorithm with the least median is chosen for a size, unless the one for the size below is as fast within both
    intervals and less than 3% slower. A border lies at the geometric mean of the two sizes around it.
    """
    sizes = sorted(timings)
    chosen: list[str] = []
    for size in sizes:
        timed = timings[size]
        best = min(timed, key=lambda name: timed[name].median)
        if chosen and chosen[-1] in timed and timed[chosen[-1]].median <= timed[best].high:
            held = timed[chosen[-1]]
            best = chosen[-1] if held.low <= timed[best].median and held.median < 1.03 * timed[best].median else best
        chosen.append(best)
    table: list[ChoiceRow] = []
    for index, (size, name) in enumerate(zip(sizes, chosen, strict=True)):
        last = index + 1 == len(sizes)
        if last or chosen[index + 1] != name:
            median, *interval = (round(1e6 * seconds, 1) for seconds in timings[size][name])
            up_to = None if last else isqrt(size * sizes[index + 1])
            table.append(ChoiceRow(where, name, up_to, median_us=median, interval_us=(interval[0], interval[1])))
    return tuple(table)
