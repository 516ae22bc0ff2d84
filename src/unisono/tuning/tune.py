"""Times the candidates on the ranks of a world and makes the table of choices."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import NamedTuple

import tomli_w
import torch

from unisono.choosing.priced import LIBRARY
from unisono.choosing.schedule_table import COLLECTIVES, SHARED_MEMORY_COLLECTIVES
from unisono.network import Network, estimate
from unisono.placement import Placement, place
from unisono.schedules import candidates, find
from unisono.schedules.pieces import bounds
from unisono.tuning.decide import Row, Timing, rows, timing_of, worth_another
from unisono.tuning.links import measure_links
from unisono.tuning.trials import times
from unisono.world import World

SIZES = tuple(4**power for power in range(1, 15))
"""Payloads in bytes: 4 B to 256 MB."""

MAX_BYTES = {name: 16 << 20 for name in COLLECTIVES if name != "allreduce"}
"""Largest payloads of the collectives other than allreduce: the best choice there serves larger ones too."""

TRIAL_SECONDS_PER_SIZE = 6.0
"""Seconds of trials for each size, beyond the trials that every candidate gets."""

MIN_TRIALS, MAX_TRIALS = 3, 41
"""Fewest and most trials of a candidate that is worth them."""


class TuningResult(NamedTuple):
    """Result of tuning: the network, the placement of ranks, and the rows of the table."""

    network: Network
    placement: Placement
    rows: dict[str, list[Row]]
    """Rows of each collective."""


def tune(world: World, max_bytes: int = SIZES[-1], log: Callable[[str], None] = lambda _: None) -> TuningResult:
    """Measure the links, and time the candidates up to `max_bytes` bytes. Called by all ranks, with the same result."""
    log(f"measuring the links of {world.size} ranks on {world.nodes} nodes")
    links = measure_links(world)
    groups = [links.supernodes[world.placement.node_of(rank)] for rank in range(world.size)]
    placement = place(world.placement.node_of_rank, groups)
    log(describe(links.network, placement))
    known = World(world.comm.Dup(), placement, world.table)
    found = {collective: rows(_timings(known, collective, links.network, max_bytes, log)) for collective in COLLECTIVES}
    known.free()
    return TuningResult(links.network, placement, found)


def describe(network: Network, placement: Placement) -> str:
    """Return the network in words."""
    count = len(set(placement.supernodes)) or 1
    words = f"{count} supernode{'s' if count > 1 else ''}, {float(network.alpha) * 1e6:.0f} µs a message, "
    words += f"{8e-6 / float(network.beta):.0f} Mbit/s a node"
    if network.uplink_beta:
        words += f", {8e-6 / float(network.uplink_beta):.0f} Mbit/s an uplink"
    return words


def write(tuned: TuningResult, hosts: list[str]) -> str:
    """Return the table as TOML. `hosts` has the host name of each rank."""
    network = {name: float(value) for name, value in vars(tuned.network).items() if value is not None}
    placement = tuned.placement
    content: dict[str, object] = {} if placement.one_node else {"network": network}
    first_hosts = [hosts[ranks[0]] for ranks in placement.nodes]
    distinct = len(set(first_hosts)) == len(first_hosts)
    if placement.supernodes and distinct:
        names: dict[int, list[str]] = {}
        for node, host in enumerate(first_hosts):
            names.setdefault(placement.supernodes[node], []).append(host)
        content["supernode"] = [{"hosts": names[number]} for number in sorted(names)]
    where = "one node" if placement.one_node else "across nodes"
    for collective, found in tuned.rows.items():
        content[collective] = [_entry(row, where) for row in found]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = f"# Written by `unisono tune` on {placement.ranks} ranks of {len(placement.nodes)} nodes, {today}.\n"
    head += "# The format is described at the head of src/unisono/choosing/default.toml; rows may be edited.\n"
    head += f"# {describe(tuned.network, placement)}\n"
    if placement.supernodes and not distinct:
        head += "# The supernodes are omitted: several nodes have the same host name.\n"
    return f"{head}\n{tomli_w.dumps(content)}"


def _entry(row: Row, where: str) -> dict[str, object]:
    entry: dict[str, object] = {"where": where}
    if row.up_to is not None:
        entry["up_to"] = row.up_to
    entry["algorithm"] = row.algorithm
    entry["median_us"] = round(row.timing.median * 1e6, 1)
    entry["interval_us"] = [round(row.timing.low * 1e6, 1), round(row.timing.high * 1e6, 1)]
    return entry


def hosts_of(world: World) -> list[str]:
    """Return the host name of each rank."""
    return world.all_gather_object(socket.gethostname())


def _timings(
    world: World, collective: str, network: Network, max_bytes: int, log: Callable[[str], None]
) -> dict[int, dict[str, Timing]]:
    """Return, for each size in bytes, the timings of the candidates that were worth timing."""
    found: dict[int, dict[str, Timing]] = {}
    names = _names(collective, world.placement)
    remaining = list(names)
    for nbytes in (size for size in SIZES if size <= min(max_bytes, MAX_BYTES.get(collective, max_bytes))):
        payload = torch.zeros(nbytes // 4)
        calls = {name: _call(world, collective, name, payload) for name in remaining}
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


def _call(world: World, collective: str, name: str, payload: torch.Tensor) -> Callable[[], object]:
    count = payload.numel()
    if collective == "allreduce":
        return lambda: world.allreduce(payload, name)
    if collective == "reduce_scatter":
        return lambda: world.reduce_scatter(payload, name)
    if collective == "broadcast":
        return lambda: world.broadcast(payload, 0, name)
    if collective == "all_to_all":
        parts = torch.zeros(max(1, count // world.size) * world.size)
        return lambda: world.all_to_all(parts, name)
    start, stop = bounds(count, world.size, world.rank)
    shard = torch.zeros(stop - start)
    return lambda: world.all_gather(shard, payload, name)
