"""Table of choices: the fastest algorithm for each size, with adjacent sizes of the same algorithm joined; as TOML.

bytes     ring          tree         library                   rows
1024      2.1 ms        0.9 ms       1.0 ms      tree          tree     up to 8192  (between 4096 and 16384)
4096      2.2 ms        1.2 ms       1.9 ms      tree
16384     2.3 ms        2.9 ms       2.8 ms      ring          ring     the rest

In a machine file it is [choices]: [choices.network], [[choices.supernode]] and the rows, [[choices.allreduce]] and so
on. `network/default.toml` describes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unisono.measure.links import Links
from unisono.measure.timing import Timing


class Row(NamedTuple):
    """Choice for payloads of up to `up_to` bytes; None: for the rest."""

    up_to: int | None
    algorithm: str
    timing: Timing
    """Timing at the largest measured size that the row covers."""


def rows(timings: Mapping[int, Mapping[str, Timing]]) -> list[Row]:
    """Return the rows for timings by size in bytes and algorithm.

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
    table: list[Row] = []
    for index, (size, name) in enumerate(zip(sizes, chosen, strict=True)):
        last = index + 1 == len(sizes)
        if last or chosen[index + 1] != name:
            up_to = None if last else math.isqrt(size * sizes[index + 1])
            table.append(Row(up_to, name, timings[size][name]))
    return table


def choice_tables(links: Links | None, hosts: Sequence[str], found: Mapping[str, Sequence[Row]]) -> dict[str, object]:
    """Return the tables of [choices]: the network and the hosts of each supernode, both without `links` of several
    nodes left out, and the rows by collective. `hosts` has the host name of each node.
    """
    tables: dict[str, object] = {}
    if links is not None:
        tables["network"] = {name: float(value) for name, value in vars(links.network).items() if value is not None}
        if len(set(links.supernodes)) > 1 and not share_names(hosts):
            tables["supernode"] = [{"hosts": names} for names in _hosts_of_supernodes(links.supernodes, hosts)]
    where = "one node" if len(hosts) == 1 else "across nodes"
    return tables | {collective: [_entry(row, where) for row in of_one] for collective, of_one in found.items()}


def share_names(hosts: Sequence[str]) -> bool:
    """Return True if two nodes have one name: a table cannot tell them apart."""
    return len(set(hosts)) < len(hosts)


def _hosts_of_supernodes(supernodes: Sequence[int], hosts: Sequence[str]) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for number, host in zip(supernodes, hosts, strict=True):
        names.setdefault(number, []).append(host)
    return [names[number] for number in sorted(names)]


def _entry(row: Row, where: str) -> dict[str, object]:
    entry: dict[str, object] = {"where": where}
    if row.up_to is not None:
        entry["up_to"] = row.up_to
    entry["algorithm"] = row.algorithm
    entry["median_us"] = round(row.timing.median * 1e6, 1)
    entry["interval_us"] = [round(row.timing.low * 1e6, 1), round(row.timing.high * 1e6, 1)]
    return entry
