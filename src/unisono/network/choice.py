"""Choice of a schedule by payload size: from a readable and editable table in a file, or by predicted time.

    machine file   name = "ours" ... [choices.network] [[choices.allreduce]] ...
    table alone    [network] [[allreduce]] ...

The head of `default.toml` describes the format. On an unmeasured network the choice is a safe one.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from unisono.errors import TableError
from unisono.network import DEFAULT as DEFAULT_NETWORK
from unisono.network import Network, NetworkError, estimate
from unisono.network.estimate import LeastCost, least_cost
from unisono.placement import Placement, one_rank_per_node
from unisono.schedules import candidates, find, names
from unisono.schedules.numbering import suits_round_robin

LIBRARY = "library"
ROUND_ROBIN = "halving/round-robin"

STEADY = {
    "allreduce": "ring",
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "broadcast": "pipeline",
    "reduce": "pipeline",
}
"""Schedule of long payloads on an unmeasured network: each rank sends to one other, which is good on any network."""

LONG_BYTES_PER_RANK = 32 << 10
"""Bytes per rank from which a payload is long. A link of 10 Gbit/s then takes longer for a chunk than the latency of a
message, and the rounds of a ring cost less than another schedule loses on over-subscribed uplinks.
"""


MAX_LEADER_BYTES = 64 << 10
"""Largest column in bytes for which one rank of a node communicates for all, if no table decides. Prices count the work
of one rank; they do not count that the ranks of a node may share its processor."""


ROUNDING = 1e-9
"""Relative difference below which a least cost and an estimate are equal: sums of the same numbers in another order."""


class Choice(NamedTuple):
    """Choice for a collective: "library", or a schedule and its transport."""

    algorithm: str
    transport: str


def choose_by_price(collective: str, placement: Placement, network: Network, nbytes: int) -> Choice:
    """Return the cheapest candidate for payloads of `nbytes` bytes, rounded up to a power of two.

    On an unmeasured network, long payloads go by the schedule of STEADY.
    """
    if not network.measured and nbytes >= LONG_BYTES_PER_RANK * placement.ranks and collective in STEADY:
        several = collective == "allreduce" and placement.ranks > len(placement.nodes)
        return Choice("hierarchical" if several else STEADY[collective], "messages")
    return Choice(_find_cheapest(collective, placement, network, 1 << max(2, (nbytes - 1).bit_length())), "messages")


def is_unsuitable(algorithm: str, placement: Placement) -> bool:
    """Return True if a schedule is a bad choice for this placement on any network, even if it was good for another."""
    levels, _, _ = algorithm.partition(ROUND_ROBIN)
    return (
        algorithm.endswith(ROUND_ROBIN)
        and bool(placement.supernodes)
        and not suits_round_robin(placement, bool(levels))
    )


@lru_cache(maxsize=4096)
def _find_cheapest(collective: str, placement: Placement, network: Network, nbytes: int) -> str:
    """Return the name of the cheapest; of equals, the first. None is estimated whose least cost is above another
    schedule's estimate: that of a ring on thousands of ranks takes seconds."""
    columns = min(map(len, placement.nodes))
    other = "leader" if nbytes > MAX_LEADER_BYTES * columns else "hierarchical"
    costs = _least_costs(collective, placement, network)
    bounds = {name: cost.seconds(nbytes) for name, cost in costs.items() if name.partition("/")[0] != other}
    rank_of = {name: number for number, name in enumerate(bounds)}
    best = float("inf"), 0, ""
    for name in sorted(bounds, key=bounds.__getitem__):
        if bounds[name] <= best[0] * (1 + ROUNDING):
            seconds = estimate(getattr(find(name, placement), collective), placement, network, nbytes)
            best = min(best, (float(seconds), rank_of[name], name))
    return best[2]


@lru_cache(maxsize=64)
def _least_costs(collective: str, placement: Placement, network: Network) -> Mapping[str, LeastCost]:
    names = candidates(collective, placement)
    return {name: least_cost(getattr(find(name, placement), collective), placement, network) for name in names}


COLLECTIVES = ("allreduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
RENAMED = {"part_reduce": "reduce_scatter", "part_broadcast": "all_gather"}
"""Names of collectives in older tables, and their present names."""

SHARED_MEMORY_COLLECTIVES = ("allreduce", "reduce_scatter", "all_gather", "all_to_all")
"""Collectives that go through shared memory if all ranks are on one node."""

LOCATIONS = ("one node", "across nodes")
TRANSPORTS = ("windows", "cma", "messages")
"""Transports of schedules: shared memory, the memory of other processes of the node, and messages."""
KEYS = ("where", "up_to", "algorithm", "transport", "median_us", "interval_us")
NETWORK_KEYS = tuple(field.name for field in fields(Network))

DEFAULT = Path(__file__).with_name("default.toml")


class Rows(NamedTuple):
    """Choices of one collective in one location: choice i is for up to limits[i] bytes, the last one for the rest."""

    limits: tuple[int, ...]
    choices: tuple[Choice, ...]


MAX_LIBRARY_BYTES = 64 << 10
"""Largest payload in bytes that goes by the library on an unmeasured network."""


@dataclass(frozen=True)
class ScheduleTable:
    """Rows for each (collective, location), the measured network, and the hosts that share a switch."""

    rows: Mapping[tuple[str, str], Rows]
    network: Network = DEFAULT_NETWORK
    supernodes: Mapping[str, int] = field(default_factory=dict)
    """Number of the supernode of each host; empty if unknown, or if all hosts are on one switch."""
    measured: frozenset[tuple[str, str]] = frozenset()
    """Collectives and locations whose rows are of the user's table; the others are a first guess."""

    def choose(self, collective: str, placement: Placement, nbytes: int, encoded: bool = False) -> Choice:
        """Return the choice for a payload of `nbytes` bytes: from the rows, or without rows by predicted time.

        Rows tuned for other numbers of nodes may name an unsuitable one (`is_unsuitable`); then also by predicted time.
        Short payloads on an unmeasured network go by the library, whose messages cost a fifth of the processor time,
        unless they are `encoded`, which the library cannot do.
        """
        rows = self.rows.get((collective, "one node" if placement.one_node else "across nodes"))
        choice = None if rows is None else rows.choices[bisect_left(rows.limits, nbytes)]
        if choice is None or is_unsuitable(choice.algorithm, placement):
            short = nbytes <= MAX_LIBRARY_BYTES and not encoded
            if short and not placement.one_node and not self.network.measured:
                return Choice(LIBRARY, LIBRARY)
            return choose_by_price(collective, placement, self.network, nbytes)
        return choice


def read_table(path: Path | None = None) -> ScheduleTable:
    """Return the default table, with its rows replaced by those that the file at `path` has, a machine or a table.

    Raises TableError naming the file, the row and the error in it.
    """
    default = replace(_read(DEFAULT), measured=frozenset())
    if path is None:
        return default
    table = _read(path)
    return ScheduleTable({**default.rows, **table.rows}, table.network, table.supernodes, table.measured)


def _read(path: Path) -> ScheduleTable:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TableError(f"{path}: {error}") from error
    if "name" not in content:
        return parse_table(content, str(path))
    if "choices" not in content:
        raise TableError(f"{path}: this machine has no [choices]: unisono tune --output {path} adds them")
    return parse_table(content["choices"], f"{path}: choices")


def parse_table(content: Any, source: str) -> ScheduleTable:
    """Return the table of a parsed TOML file; `source` names the file in errors."""
    if not isinstance(content, dict):
        raise TableError(f"{source}: it must be tables: {', '.join(COLLECTIVES)}, network or supernode")
    content = {RENAMED.get(name, name): value for name, value in content.items()}
    for name in content:
        if name not in (*COLLECTIVES, "network", "supernode"):
            raise TableError(f"{source}: unknown collective {name!r}; there are {', '.join(COLLECTIVES)}")
    rows = {}
    for collective in COLLECTIVES:
        entries = content.get(collective, [])
        if not isinstance(entries, list):
            raise TableError(f"{source}: {collective} must be a list of rows; begin each with [[{collective}]]")
        for location in LOCATIONS:
            where = f"{source}: {collective}, {location!r}"
            if (found := _parse_rows(entries, collective, location, where)) is not None:
                rows[collective, location] = found
    supernodes = _parse_supernodes(content, source)
    return ScheduleTable(rows, _parse_network(content.get("network"), source), supernodes, frozenset(rows))


def _parse_rows(entries: list[dict[str, Any]], collective: str, location: str, where: str) -> Rows | None:
    limits: list[int] = []
    choices: list[Choice] = []
    for number, entry in enumerate(entries):
        row = f"{where}: row {number}"
        if entry.get("where") not in LOCATIONS:
            raise TableError(f"{row}: where = {entry.get('where')!r}; it must be one of {', '.join(LOCATIONS)}")
        if entry["where"] != location:
            continue
        if len(choices) > len(limits):
            raise TableError(f"{row} follows the row without up_to, which must be the last")
        choices.append(_parse_choice(entry, collective, location, row))
        if "up_to" in entry:
            up_to = entry["up_to"]
            if not isinstance(up_to, int) or isinstance(up_to, bool) or up_to < 0 or (limits and up_to <= limits[-1]):
                raise TableError(f"{row}: up_to = {up_to!r}; it must be an integer that increases from row to row")
            limits.append(up_to)
    if choices and len(choices) == len(limits):
        raise TableError(f"{where}: a last row without up_to is missing, so the largest sizes have no choice")
    return Rows(tuple(limits), tuple(choices)) if choices else None


def _parse_choice(entry: dict[str, Any], collective: str, location: str, where: str) -> Choice:
    unknown = set(entry) - set(KEYS)
    if unknown:
        raise TableError(f"{where}: unknown key {min(unknown)!r}; there are {', '.join(KEYS)}")
    algorithm = str(entry.get("algorithm"))
    if algorithm == LIBRARY and "transport" not in entry:
        return Choice(algorithm, "library")
    offered = [name for name in names() if getattr(find(name, one_rank_per_node(2)), collective) is not None]
    if algorithm not in offered:
        known = ", ".join((LIBRARY, *offered))
        raise TableError(f"{where}: unknown algorithm {algorithm!r}; there are {known}")
    shared = location == "one node" and collective in SHARED_MEMORY_COLLECTIVES
    transport = entry.get("transport", "windows" if shared else "messages")
    if transport not in TRANSPORTS:
        raise TableError(f"{where}: unknown transport {transport!r}; there are {', '.join(TRANSPORTS)}")
    if transport == "windows" and not shared:
        raise TableError(f"{where}: {collective} cannot use windows across nodes; use messages")
    if transport == "cma" and (location != "one node" or algorithm not in ("direct", "tree")):
        raise TableError(f"{where}: cma carries direct, and the tree of a broadcast, on one node")
    return Choice(algorithm, transport)


def _parse_network(entry: Any, source: str) -> Network:
    if entry is None:
        return DEFAULT_NETWORK
    where = f"{source}: network"
    if not isinstance(entry, dict) or not {"alpha", "beta"} <= set(entry) <= set(NETWORK_KEYS):
        raise TableError(f"{where}: needs alpha and beta, and may have {', '.join(NETWORK_KEYS[2:])}")
    for name, value in entry.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise TableError(f"{where}: {name} = {value!r}; it must be a number of seconds, 0 or more")
    try:
        return Network(**entry)
    except NetworkError as error:
        raise TableError(f"{where}: {error}") from error


def _parse_supernodes(content: dict[str, Any], source: str) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for number, entry in enumerate(content.get("supernode", [])):
        hosts = entry.get("hosts") if isinstance(entry, dict) else None
        if not isinstance(hosts, list) or set(entry) != {"hosts"} or not all(isinstance(host, str) for host in hosts):
            raise TableError(f'{source}: supernode {number}: needs hosts = ["name", ...] and nothing else')
        for host in hosts:
            if host in numbers:
                raise TableError(f"{source}: supernode {number}: host {host!r} is in supernode {numbers[host]} too")
            numbers[host] = number
    return numbers
