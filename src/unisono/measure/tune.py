"""Tuning: times the candidates of each collective and size on the ranks of a world, for the table of choices.

    links ─▶ supernodes ─▶ candidates, at 4 B, 16 B, ... ─▶ rows ── machine_facts ──▶ [choices] of a machine file

A row has the fastest algorithm of adjacent sizes:

    bytes     ring          tree         library                   rows
    1024      2.1 ms        0.9 ms       1.0 ms      tree          tree     up to 8192  (between 4096 and 16384)
    4096      2.2 ms        1.2 ms       1.9 ms      tree
    16384     2.3 ms        2.9 ms       2.8 ms      ring          ring     the rest
"""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from unisono.measure.links import Links, measure_links
from unisono.measure.player import machine_of
from unisono.measure.probe_plan import ProbeFindings
from unisono.measure.timing import MAX_TRIALS, Timing, collective_call, times, timing_of, worth_another
from unisono.network import Network, estimate
from unisono.network.choice import COLLECTIVES, LIBRARY, SHARED_MEMORY_COLLECTIVES, ChoiceRow
from unisono.placement import Placement, place
from unisono.plan.machines import MachineFacts, read_machine
from unisono.schedules import candidates, find
from unisono.world import World

SIZES = tuple(4**power for power in range(1, 15))
"""Payloads in bytes: 4 B to 256 MB."""

MAX_BYTES = {name: 16 << 20 for name in COLLECTIVES if name != "allreduce"}
"""Largest payloads of the collectives other than allreduce: the best choice there serves larger ones too."""

TRIAL_SECONDS_PER_SIZE = 6.0
"""Seconds of trials for each size, beyond the trials that every candidate gets."""

MIN_TRIALS = 3
"""Fewest trials of a candidate that is worth them."""


def tune(world: World, max_bytes: int, log: Callable[[str], None], machine: MachineFacts | None = None) -> MachineFacts:
    """Return the machine with choices up to `max_bytes` bytes. Called by all ranks, with the same result on each.

    A `machine` that was measured before keeps all but its choices.
    """
    found = machine_of(world, time_candidates(world, max_bytes, log))
    return found if machine is None else replace(machine, choices=found.choices)


def machine_at(path: Path) -> MachineFacts | None:
    """Return the machine of a file; None for one that is absent or empty, and for a table of choices of the old form.

    Raises UsageError for a machine that cannot be read.
    """
    try:
        is_machine = "name" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None
    return read_machine(path) if is_machine else None


def time_candidates(world: World, max_bytes: int, log: Callable[[str], None]) -> ProbeFindings:
    """Measure the links, and time the candidates up to `max_bytes` bytes. Called by all ranks, with the same result."""
    begin = time.perf_counter()
    log(f"measuring the links of {world.size} ranks on {world.nodes} nodes")
    links = measure_links(world)
    groups = [links.supernodes[world.placement.node_of(rank)] for rank in range(world.size)]
    placement = place(world.placement.node_of_rank, groups)
    log(describe(links))
    known = World(world.comm.Dup(), placement, world.table)
    where = "one node" if world.nodes == 1 else "across nodes"
    found = {
        collective: rows(_timings(known, collective, links.network, max_bytes, log), where)
        for collective in COLLECTIVES
    }
    known.free()
    seconds = world.comm.bcast(time.perf_counter() - begin, 0)
    return ProbeFindings(links if world.nodes > 1 else None, (), (), seconds, found)


def describe(links: Links) -> str:
    """Return the network in words."""
    network, count = links.network, len(set(links.supernodes))
    words = f"{count} supernode{'s' if count > 1 else ''}, {float(network.alpha) * 1e6:.0f} µs a message, "
    words += f"{8e-6 / float(network.beta):.0f} Mbit/s a node"
    if network.uplink_beta:
        words += f", {8e-6 / float(network.uplink_beta):.0f} Mbit/s an uplink"
    return words


def _timings(
    world: World, collective: str, network: Network, max_bytes: int, log: Callable[[str], None]
) -> dict[int, dict[str, Timing]]:
    """Return, for each size in bytes, the timings of the candidates that were worth timing."""
    found: dict[int, dict[str, Timing]] = {}
    names = _names(collective, world.placement)
    remaining = list(names)
    for nbytes in (size for size in SIZES if size <= min(max_bytes, MAX_BYTES.get(collective, max_bytes))):
        payload = torch.zeros(nbytes // 4)
        calls = {name: collective_call(world, collective, payload, name) for name in remaining}
        seconds = times(world, calls, MIN_TRIALS, MAX_TRIALS, TRIAL_SECONDS_PER_SIZE, factor=1.5)
        found[nbytes] = {name: timing_of(took) for name, took in seconds.items() if len(took) >= MIN_TRIALS}
        best = min(found[nbytes], key=lambda name: found[nbytes][name].median)
        log(f"{collective} {nbytes} B: {best} {found[nbytes][best].median * 1e3:.3f} ms")
        estimated = _estimated_near_best(names, collective, world.placement, network, 4 * nbytes)
        close = worth_another(seconds, factor=2.0)
        remaining = [name for name in names if name in close or name in estimated]
    return found


def _names(collective: str, placement: Placement) -> list[str]:
    """Return the names of the candidates."""
    if placement.one_node and collective in SHARED_MEMORY_COLLECTIVES:
        return [LIBRARY, *(["flat"] if collective == "allreduce" else []), "direct"]
    return [LIBRARY, *candidates(collective, placement)]


def _estimated_near_best(
    names: list[str], collective: str, placement: Placement, network: Network, nbytes: int
) -> set[str]:
    """Return the schedules estimated within 1.3 of the cheapest at `nbytes` bytes."""
    if placement.one_node and collective in SHARED_MEMORY_COLLECTIVES:
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
        found = timings[size]
        best = min(found, key=lambda name: found[name].median)
        if chosen and chosen[-1] in found and found[chosen[-1]].median <= found[best].high:
            held = found[chosen[-1]]
            best = chosen[-1] if held.low <= found[best].median and held.median < 1.03 * found[best].median else best
        chosen.append(best)
    table: list[ChoiceRow] = []
    for index, (size, name) in enumerate(zip(sizes, chosen, strict=True)):
        last = index + 1 == len(sizes)
        if last or chosen[index + 1] != name:
            median, *interval = (round(1e6 * seconds, 1) for seconds in timings[size][name])
            up_to = None if last else math.isqrt(size * sizes[index + 1])
            table.append(ChoiceRow(where, name, up_to, median_us=median, interval_us=(interval[0], interval[1])))
    return tuple(table)
