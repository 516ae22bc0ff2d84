"""Machines as TOML: a node, its link and its network, as the equations need them.

    machines/NAME.toml ─┐
    a file of your own ─┴─▶ MachineFacts: node, efficiency, link, topology, assumed

    [node]        cores, accelerators, flops, cache_bytes, simd_width, memory_bytes, memory_bandwidth
    [efficiency]  convolution, linear           share of flops that such products reach; 1 where it is not known
    [link]        bandwidth, adapters, latency
    [topology]    supernode, oversubscription   nodes under a switch, and times that its uplink is too narrow
    [slow_links]  "3" = 4.0                     times that a byte takes on the link of a node, by its number
    [assumed]     "link.latency" = "why"        values that are in no source; tables of predictions name them

Worked example, `taihulight`: an adapter of 12 GB/s, supernodes of 256 whose uplink carries a quarter of that: beta_1 =
83 ps, beta_2 = 333 ps. `network` gives it as a network to price schedules on.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from unisono.errors import UsageError
from unisono.network import Network

FOLDER = Path(__file__).parents[1] / "machines"


@dataclass(frozen=True)
class NodeFacts:
    """Computing and memory of a node; 0: not known."""

    cores: int = 0
    accelerators: int = 0
    flops: float = 0.0
    """Peak FLOPs per second of the whole node, float32."""
    cache_bytes: int = 0
    """Bytes of cache for a thread's blocks."""
    simd_width: int = 0
    """float32 numbers in a vector register."""
    memory_bytes: float = 0.0
    memory_bandwidth: float = 0.0
    """Bytes per second of the whole node."""


@dataclass(frozen=True)
class EfficiencyFacts:
    """Share of a node's peak that a kind of product reaches."""

    convolution: float = 1.0
    linear: float = 1.0


@dataclass(frozen=True)
class LinkFacts:
    """Link of a node."""

    bandwidth: float = 0.0
    """Bytes per second of an adapter, in each direction."""
    adapters: int = 1
    latency: float = 0.0
    """Seconds before the first byte arrives."""

    @property
    def total_bandwidth(self) -> float:
        """Bytes per second of all adapters."""
        return self.bandwidth * self.adapters


@dataclass(frozen=True)
class TopologyFacts:
    """Network above the nodes."""

    supernode: int = 0
    """Nodes under a switch; 0: all."""
    oversubscription: float = 1.0
    """Bandwidth of a supernode's nodes over that of its uplink."""


@dataclass(frozen=True)
class MachineFacts:
    """Facts of a machine."""

    name: str
    node: NodeFacts = field(default_factory=NodeFacts)
    efficiency: EfficiencyFacts = field(default_factory=EfficiencyFacts)
    link: LinkFacts = field(default_factory=LinkFacts)
    topology: TopologyFacts = field(default_factory=TopologyFacts)
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Reason for each value that is in no source, by its key: "link.latency"."""
    slow_links: Mapping[int, float] = field(default_factory=dict)
    """Factor of each node whose link is slower, by its number: a byte takes this many times as long, each way."""

    def network(self, gamma: float = 0.0) -> Network:
        """Return the links between nodes, all adapters together; `gamma` is the seconds to sum a byte.

        Raises NetworkError for a machine without a bandwidth.
        """
        beta = 1 / self.link.total_bandwidth if self.link.total_bandwidth else 0.0
        supernode = self.topology.supernode
        uplink = self.topology.oversubscription * beta / supernode if supernode else None
        return Network(self.link.latency, beta, gamma, uplink)


TABLES = {"node": NodeFacts, "efficiency": EfficiencyFacts, "link": LinkFacts, "topology": TopologyFacts}


def machine_names() -> list[str]:
    """Return the names of the machines that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_machine(name: str) -> MachineFacts:
    """Return the machine of that name, or of that TOML file.

    Raises UsageError for an unknown name and for a file that is no machine.
    """
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(machine_names())
        raise UsageError(f"no machine {name}: there are {known}, or give a TOML file, such as ./mine.toml")
    try:
        return parse_machine(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, UsageError) as error:
        raise UsageError(f"{path} is no machine: {error}") from error


def parse_machine(tables: Mapping[str, Any]) -> MachineFacts:
    """Return the machine that the tables of a file describe.

    Raises UsageError for a key or a value that it cannot have.
    """
    known = {"name", *TABLES, "slow_links", "assumed"}
    if unknown := sorted(set(tables) - known):
        raise UsageError(f"{unknown[0]} is not one of {', '.join(sorted(known))}")
    name, assumed = tables.get("name", ""), tables.get("assumed", {})
    if not isinstance(name, str) or not name:
        raise UsageError(f"name = {name!r}; it is text, such as a processor and a network")
    parsed = {table: _parse_table(table, kind, tables.get(table, {})) for table, kind in TABLES.items()}
    if not isinstance(assumed, Mapping):
        raise UsageError(f"assumed = {assumed!r}; it is a table of reasons")
    for key, reason in assumed.items():
        table, _, value = key.partition(".")
        if table not in TABLES or value not in tables.get(table, {}) or not isinstance(reason, str):
            raise UsageError(f'assumed."{key}" = {reason!r}; it gives the reason, as text, for a value of this file')
    return MachineFacts(name, **parsed, assumed=assumed, slow_links=_parse_slow_links(tables.get("slow_links", {})))


def _parse_table(table: str, kind: type[Any], values: Any) -> Any:
    types = {one.name: {"int": int, "float": float}[str(one.type)] for one in fields(kind)}
    if not isinstance(values, Mapping):
        raise UsageError(f"{table} = {values!r}; it is a table of {', '.join(types)}")
    parsed = {}
    for key, value in values.items():
        if key not in types:
            raise UsageError(f"{table}.{key} is not one of {', '.join(types)}")
        wanted = types[key]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (wanted is float and isinstance(value, float))) or not 0 < value < float("inf"):
            raise UsageError(f"{table}.{key} = {value!r}; it is a {'whole ' if wanted is int else ''}number above 0")
        parsed[key] = wanted(value)
    return kind(**parsed)


def _parse_slow_links(values: Any) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise UsageError(f'slow_links = {values!r}; it is a table of nodes, as in "3" = 4.0')
    for node, factor in values.items():
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not node.isdecimal() or not number or not 1 <= factor < float("inf"):
            raise UsageError(f'slow_links."{node}" = {factor!r}; give a node and a factor of 1 or more: "3" = 4.0')
    return {int(node): float(factor) for node, factor in values.items()}
