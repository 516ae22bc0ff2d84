"""Choice of a schedule by payload size: from a readable and editable table in a file, or by predicted time.

    machine file   name = "ours" ... [choices.network] [[choices.allreduce]] ...
    table alone    [network] [[allreduce]] ...

The head of `default.toml` describes the format. On an unmeasured network the choice is a safe one; within a node
(`collectives/trials.py`) and through sockets (`collectives/socket_calls.py`) it is measured in the first calls.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from unisono.errors import TableError
from unisono.network import DEFAULT as DEFAULT_NETWORK
from unisono.network import Amount, Network, estimate
from unisono.network.estimate import least_cost
from unisono.placement import Placement, one_rank_per_node
from unisono.schedules import candidates, find, names
from unisono.schedules.numbering import suits_round_robin
from unisono.tables import number, parse

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
message, and the rounds of a ring cost less than another schedule loses on over-subscribed uplinks."""

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
    numbered = algorithm.endswith(ROUND_ROBIN) and bool(placement.supernodes)
    return numbered and not suits_round_robin(placement, single=algorithm != ROUND_ROBIN)


@lru_cache(maxsize=4096)
def _find_cheapest(collective: str, placement: Placement, network: Network, nbytes: int) -> str:
    """Return the name of the cheapest; of equals, the first. None is estimated whose least cost is above another
    schedule's estimate: that of a ring on thousands of ranks takes seconds."""
    columns = min(map(len, placement.nodes))
    excluded = "leader" if nbytes > MAX_LEADER_BYTES * columns else "hierarchical"
    costs = _least_costs(collective, placement, network)
    bounds = {name: cost(nbytes) for name, cost in costs.items() if name.partition("/")[0] != excluded}
    rank_of = {name: rank for rank, name in enumerate(bounds)}
    best = float("inf"), 0, ""
    for name in sorted(bounds, key=bounds.__getitem__):
        if bounds[name] <= best[0] * (1 + ROUNDING):
            seconds = estimate(getattr(find(name, placement), collective), placement, network, nbytes)
            best = min(best, (float(seconds), rank_of[name], name))
    return best[2]


@lru_cache(maxsize=64)
def _least_costs(collective: str, placement: Placement, network: Network) -> Mapping[str, Callable[[Amount], Amount]]:
    names = candidates(collective, placement)
    return {name: least_cost(getattr(find(name, placement), collective), placement, network) for name in names}


COLLECTIVES = ("allreduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
RENAMED = {"part_reduce": "reduce_scatter", "part_broadcast": "all_gather"}
"""Names of collectives in older tables, and their present names."""

LOCATIONS = ("one node", "across nodes")
TRANSPORTS = ("windows", "cma", "messages")
"""Transports of schedules: shared memory, the memory of other processes of the node, and messages."""

DEFAULT = Path(__file__).with_name("default.toml")


@dataclass(frozen=True)
class ChoiceRow:
    """Row of a table of choices, as a file has it."""

    where: str = field(metadata={"one_of": LOCATIONS})
    algorithm: str
    up_to: int | None = number(None, at_least=0)
    """Bytes of the largest payload that it serves; None: the rest."""
    transport: str = field(default="", metadata={"one_of": TRANSPORTS})
    """Empty: windows on one node, else messages; the library has its own."""
    median_us: float = number(0.0, at_least=0)
    """Microseconds of the algorithm at the largest measured size that the row serves; the file's reader gets them."""
    interval_us: tuple[float, float] = number((0.0, 0.0), at_least=0)


@dataclass(frozen=True)
class SupernodeRow:
    """Hosts that share a switch."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class ChoiceTables:
    """Tables of choices, as a file has them: rows of each collective, the network, the supernodes."""

    allreduce: tuple[ChoiceRow, ...] = ()
    reduce_scatter: tuple[ChoiceRow, ...] = ()
    all_gather: tuple[ChoiceRow, ...] = ()
    broadcast: tuple[ChoiceRow, ...] = ()
    all_to_all: tuple[ChoiceRow, ...] = ()
    network: Network = DEFAULT_NETWORK
    supernode: tuple[SupernodeRow, ...] = ()

    def updated(self, measured: ChoiceTables, where: str) -> ChoiceTables:
        """Return these tables with what was measured at a location: rows of the other one stay, and with one node the
        network and its supernodes."""
        tables = self if where == "one node" else measured
        rows: dict[str, Any] = {
            name: (*(row for row in getattr(self, name) if row.where != where), *getattr(measured, name))
            for name in COLLECTIVES
        }
        return replace(tables, **rows)


MAX_LIBRARY_BYTES = 64 << 10
"""Largest payload in bytes that goes by the library on an unmeasured network."""


@dataclass(frozen=True)
class ScheduleTable:
    """Rows for each (collective, location), the measured network, and the hosts that share a switch."""

    rows: Mapping[tuple[str, str], Sequence[ChoiceRow]]
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
        rows = self.rows.get((collective, "one node" if placement.one_node else "across nodes"), ())
        row = rows[bisect_left([row.up_to or 0 for row in rows[:-1]], nbytes)] if rows else None
        if row is None or is_unsuitable(row.algorithm, placement):
            short = nbytes <= MAX_LIBRARY_BYTES and not encoded
            if short and not placement.one_node and not self.network.measured:
                return Choice(LIBRARY, LIBRARY)
            return choose_by_price(collective, placement, self.network, nbytes)
        return Choice(row.algorithm, row.transport)


def read_table(path: Path | None = None) -> ScheduleTable:
    """Return the default table, with its rows replaced by those that the file at `path` has, a machine or a table.

    Raises TableError naming the file, the row and the error in it.
    """
    default = _default()
    if path is None:
        return default
    table = _read(path)
    return ScheduleTable({**default.rows, **table.rows}, table.network, table.supernodes, table.measured)


@cache
def _default() -> ScheduleTable:
    return replace(_read(DEFAULT), measured=frozenset())


def _read(path: Path) -> ScheduleTable:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise TableError(f"{path}: {why}; name a file of unisono tune, in UNISONO_TABLE too") from error
    if not content:
        raise TableError(f"{path}: this file is empty: unisono tune --output {path} writes a table")
    if "name" not in content:
        return parse_table(content, str(path))
    if "choices" not in content:
        raise TableError(f"{path}: this machine has no [choices]: unisono tune --output {path} adds them")
    return parse_table(content["choices"], f"{path}: choices")


def parse_table(content: Any, source: str) -> ScheduleTable:
    """Return the table of a parsed TOML file; `source` names the file in errors."""
    if isinstance(content, dict):
        content = {RENAMED.get(name, name): value for name, value in content.items()}
    return table_of(parse(ChoiceTables, content, source, TableError), source)


def table_of(tables: ChoiceTables, source: str) -> ScheduleTable:
    """Return the table by which calls choose. Raises TableError, beginning with `source`, where it has a gap, or names
    what cannot do it."""
    rows = {
        (collective, location): _rows(collective, location, matching, f"{source}: {collective}, {location!r}")
        for collective in COLLECTIVES
        for location in LOCATIONS
        if (matching := [row for row in getattr(tables, collective) if row.where == location])
    }
    supernodes: dict[str, int] = {}
    for place, supernode in enumerate(tables.supernode):
        for host in supernode.hosts:
            if supernodes.setdefault(host, place) != place:
                raise TableError(f"{source}: supernode {place}: host {host!r} is in supernode {supernodes[host]} too")
    return ScheduleTable(rows, tables.network, supernodes, frozenset(rows))


def _rows(collective: str, location: str, rows: Sequence[ChoiceRow], where: str) -> tuple[ChoiceRow, ...]:
    """Return the rows with the transport of each."""
    filled = tuple(_with_transport(collective, location, row, f"{where}: row {at}") for at, row in enumerate(rows))
    limits = [row.up_to for row in rows if row.up_to is not None]
    if rows[-1].up_to is not None or len(limits) < len(rows) - 1 or sorted(set(limits)) != limits:
        given = ", ".join("none" if row.up_to is None else str(row.up_to) for row in rows)
        raise TableError(f"{where}: up_to is {given}; it must rise from row to row, and the last row has none")
    return filled


def _with_transport(collective: str, location: str, row: ChoiceRow, where: str) -> ChoiceRow:
    if row.algorithm == LIBRARY and row.transport in ("", LIBRARY):
        return replace(row, transport=LIBRARY)
    if row.algorithm == LIBRARY:
        raise TableError(f"{where}: the library has a transport of its own, not {row.transport!r}; leave it out")
    offered = [name for name in names() if getattr(find(name, one_rank_per_node(2)), collective) is not None]
    if row.algorithm not in offered:
        known = ", ".join((LIBRARY, *offered))
        raise TableError(f"{where}: unknown algorithm {row.algorithm!r}; there are {known}")
    one_node = location == "one node"
    if row.transport == "windows" and not one_node:
        raise TableError(f"{where}: {collective} cannot use windows across nodes; use messages")
    if row.transport == "cma" and (
        not one_node or row.algorithm != ("tree" if collective == "broadcast" else "direct")
    ):
        raise TableError(f"{where}: cma carries direct, and the tree of a broadcast, on one node")
    return row if row.transport else replace(row, transport="windows" if one_node else "messages")
