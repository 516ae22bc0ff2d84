"""Machines as TOML: a node, its link and its network, as the equations need them.

    machines/NAME.toml ───────┐
    a file of your own ───────┼─▶ MachineFacts: node, efficiency, link, topology, disk, decoding, and what was measured
    unisono probe OUT.toml ───┤
    unisono tune ─────────────┘

    [node]        cores, accelerators, flops, cache_bytes, simd_width, memory_bytes, memory_bandwidth
    [efficiency]  convolution, linear           share of flops that such products reach; 1 is assumed without it
    [link]        bandwidth, adapters, latency, overhead
    [topology]    supernode, oversubscription   nodes under a switch, and times that its uplink is too narrow
    [disk]        bandwidth                     bytes per second of a node
    [decoding]    pixels                        JPEG pixels per second of a core
    [slow_links]  "3" = 4.0                     nodes whose links are slower, and how many times
    [assumed]     "link.latency" = "why"        values that are in no source; tables of predictions name them
    [measured]    "link.latency" = "how"        values that `unisono probe` has measured
    [[network]]                                 samples/s of whole networks, which go before flops (`measured_rows.py`)
    [choices]                                   tables by which `auto` chooses (`network/default.toml`)
    [probe], [[product]], [[message]], [[collective]]     the measurement and its rows (`measured_rows.py`)

Worked example, `taihulight`: an adapter of 12 GB/s, supernodes of 256 whose uplink carries a quarter of that: beta_1 =
83 ps, beta_2 = 333 ps. `network` gives it as a network to price schedules on.

Keys, types and ranges are checked, errors are one line. Tables may lack keys, rows have every key. Numbers are above 0,
or not below a field's `least`; texts are not empty, and one of a field's `one_of`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli_w

from unisono.errors import UsageError
from unisono.network import Network, choice
from unisono.plan.measured_rows import CollectiveRow, MessageRow, NetworkRow, ProbeFacts, ProductRow

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
    overhead: float = 0.0
    """Seconds that a rank is busy with each message."""

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
class DiskFacts:
    """Storage that a node reads samples from."""

    bandwidth: float = 0.0
    """Bytes per second that a node reads; 0: not known."""


@dataclass(frozen=True)
class DecodingFacts:
    """Decoding of images."""

    pixels: float = 0.0
    """JPEG pixels per second of a core; 0: not known."""


@dataclass(frozen=True)
class MachineFacts:
    """Facts of a machine."""

    name: str
    node: NodeFacts = field(default_factory=NodeFacts)
    efficiency: EfficiencyFacts = field(default_factory=EfficiencyFacts)
    link: LinkFacts = field(default_factory=LinkFacts)
    topology: TopologyFacts = field(default_factory=TopologyFacts)
    disk: DiskFacts = field(default_factory=DiskFacts)
    decoding: DecodingFacts = field(default_factory=DecodingFacts)
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Reason for each value that is in no source, by its key: "link.latency"."""
    measured: Mapping[str, str] = field(default_factory=dict)
    """Measurement of each value that was measured, by its key."""
    slow_links: Mapping[int, float] = field(default_factory=dict)
    """Times that the link of a node is slower than `link`, by the node's number."""
    probe: ProbeFacts = field(default_factory=ProbeFacts)
    networks: tuple[NetworkRow, ...] = ()
    products: tuple[ProductRow, ...] = ()
    messages: tuple[MessageRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    """Tables by which `auto` chooses, as `network/choice.py` reads them."""

    @property
    def assumptions(self) -> Mapping[str, str]:
        """Reason for each value that a plan assumes, by its key: those of the file, and computing at the peak."""
        rates = {row.kind for row in self.products}
        unknown = [kind for kind, share in vars(self.efficiency).items() if share == 1 and kind not in rates]
        peak = "computing at 100% of the peak: no efficiency is known"
        return {**self.assumed, **({} if self.networks else {f"efficiency.{kind}": peak for kind in unknown})}

    def network(self, gamma: float = 0.0) -> Network:
        """Return the links between nodes, all adapters together; `gamma` is the seconds to sum a byte.

        Raises NetworkError for a machine without a bandwidth.
        """
        beta = 1 / self.link.total_bandwidth if self.link.total_bandwidth else 0.0
        supernode = self.topology.supernode
        uplink = self.topology.oversubscription * beta / supernode if supernode else None
        return Network(self.link.latency, beta, gamma, uplink, overhead=self.link.overhead)


TABLES: Mapping[str, type[Any]] = {
    "node": NodeFacts,
    "efficiency": EfficiencyFacts,
    "link": LinkFacts,
    "topology": TopologyFacts,
    "disk": DiskFacts,
    "decoding": DecodingFacts,
    "probe": ProbeFacts,
}
"""Tables of a machine file, each an attribute of that name."""

REASONS = ("assumed", "measured")
"""Tables with words for values of the file."""

ROWS: Mapping[str, type[Any]] = {
    "network": NetworkRow,
    "product": ProductRow,
    "message": MessageRow,
    "collective": CollectiveRow,
}
"""Lists of rows, each an attribute of that name and an s."""


def machine_names() -> list[str]:
    """Return the names of the machines that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def machine_file(name: str) -> Path:
    """Return the path of the file of a machine that comes with the package, or of that TOML file."""
    return Path(name) if Path(name).suffix == ".toml" else FOLDER / f"{name}.toml"


def find_machine(name: str) -> MachineFacts:
    """Return the machine of that name, or of that TOML file.

    Raises UsageError for an unknown name and for a file that is no machine.
    """
    path = machine_file(name)
    if not path.is_file():
        known = ", ".join(machine_names())
        raise UsageError(f"no machine {name}: there are {known}, or give a TOML file, such as ./mine.toml")
    return read_machine(path)


def read_machine(path: Path) -> MachineFacts:
    """Return the machine of a file. Raises UsageError for one that is no machine."""
    try:
        return parse_machine(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, UsageError) as error:
        raise UsageError(f"{path} is no machine: {error}") from error


def parse_machine(tables: Mapping[str, Any]) -> MachineFacts:
    """Return the machine that the tables of a file describe.

    Raises UsageError for a key or a value that it cannot have.
    """
    known = {"name", *TABLES, *REASONS, *ROWS, "slow_links", "choices"}
    if unknown := sorted(set(tables) - known):
        raise UsageError(f"{unknown[0]} is not one of {', '.join(sorted(known))}{_nearest(unknown[0], known)}")
    name = tables.get("name", "")
    if not isinstance(name, str) or not name:
        raise UsageError(f"name = {name!r}; it is text, such as a processor and a network")
    parsed: dict[str, Any] = {
        **{table: parse_table(table, kind, tables.get(table, {})) for table, kind in TABLES.items()},
        **{table: _parse_reasons(table, tables) for table in REASONS},
        **{f"{row}s": parse_rows(row, kind, tables.get(row, [])) for row, kind in ROWS.items()},
    }
    choices = tables.get("choices", {})
    choice.parse_table(choices, "choices")
    slow = parse_factors("slow_links", tables.get("slow_links", {}))
    return MachineFacts(name, **parsed, slow_links=slow, choices=choices)


def _parse_reasons(name: str, tables: Mapping[str, Any]) -> Mapping[str, str]:
    reasons = tables.get(name, {})
    if not isinstance(reasons, Mapping):
        raise UsageError(f"{name} = {reasons!r}; it is a table of reasons")
    for key, reason in reasons.items():
        table, _, value = key.partition(".")
        if table not in TABLES or value not in tables.get(table, {}) or not isinstance(reason, str):
            raise UsageError(f'{name}."{key}" = {reason!r}; it gives the reason, as text, for a value of this file')
    return reasons


def parse_table(table: str, kind: type[Any], values: Any) -> Any:
    """Return the dataclass `kind` of a table's values; missing keys have their defaults.

    Raises UsageError for a key or a value that the table cannot have.
    """
    known = {one.name: one for one in fields(kind)}
    if not isinstance(values, Mapping):
        raise UsageError(f"{table} = {values!r}; it is a table of {', '.join(known)}")
    if unknown := [key for key in values if key not in known]:
        raise UsageError(f"{table}.{unknown[0]} is not one of {', '.join(known)}{_nearest(unknown[0], known)}")
    return kind(**{key: _parse_value(f"{table}.{key}", known[key], value) for key, value in values.items()})


def parse_rows(name: str, kind: type[Any], rows: Any) -> tuple[Any, ...]:
    """Return the dataclasses `kind` of a list of tables, none of which lacks a key.

    Raises UsageError for anything else, naming the row by its number.
    """
    if not isinstance(rows, list):
        raise UsageError(f"{name} = {rows!r}; it is a list of rows: begin each with [[{name}]]")
    known = [one.name for one in fields(kind)]
    for number, row in enumerate(rows):
        if isinstance(row, Mapping) and (missing := [key for key in known if key not in row]):
            raise UsageError(f"{name} row {number} has no {missing[0]}; it has {', '.join(known)}")
    return tuple(parse_table(f"{name} row {number}", kind, row) for number, row in enumerate(rows))


def parse_factors(table: str, values: Any) -> dict[int, float]:
    """Return factors of 1 or more by the number of a node. Raises UsageError for anything else."""
    if not isinstance(values, Mapping):
        raise UsageError(f'{table} = {values!r}; it is a table of factors by node: "3" = 4.0')
    for key, value in values.items():
        if not (key.isascii() and key.isdecimal() and key == str(int(key))):
            raise UsageError(f'{table}."{key}": a node is a number from 0, as in "3" = 4.0')
        if not _is_number(value) or not 1 <= value < float("inf"):
            raise UsageError(f'{table}."{key}" = {value!r}; it is a factor of 1 or more')
    return {int(key): float(value) for key, value in values.items()}


def _nearest(key: str, known: Iterable[str]) -> str:
    near = get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _parse_value(name: str, field: Field[Any], value: Any) -> Any:
    if field.type == "str":
        allowed = field.metadata.get("one_of")
        if not isinstance(value, str) or not value or (allowed and value not in allowed):
            raise UsageError(f"{name} = {value!r}; it is {'one of ' + ', '.join(allowed) if allowed else 'text'}")
        return value
    if field.type == "tuple[str, ...]":
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise UsageError(f"{name} = {value!r}; it is a list of texts")
        return tuple(value)
    wanted = {"int": int, "float": float}[str(field.type)]
    least = field.metadata.get("least")
    fits = isinstance(value, int) if wanted is int else True
    if not (_is_number(value) and fits and (value > 0 or value == least) and value < float("inf")):
        limit = "above 0" if least is None else f"of {least:g} or more"
        raise UsageError(f"{name} = {value!r}; it is a {'whole ' if wanted is int else ''}number {limit}")
    return wanted(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def machine_text(machine: MachineFacts) -> str:
    """Return the file of a machine, as `parse_machine` reads it; values that are not known are left out."""
    content: dict[str, Any] = {"name": machine.name}
    content |= {name: _known(getattr(machine, name)) for name in TABLES}
    content["slow_links"] = {str(node): factor for node, factor in machine.slow_links.items()}
    content |= {name: dict(getattr(machine, name)) for name in REASONS}
    content["choices"] = machine.choices
    tables = tomli_w.dumps({key: value for key, value in content.items() if value})
    rows = [f"\n[[{name}]]\n{tomli_w.dumps(asdict(row))}" for name in ROWS for row in getattr(machine, f"{name}s")]
    return "".join((tables, *rows))


def _known(table: Any) -> dict[str, Any]:
    """Return the values of a table that differ from their defaults: 0, or what a machine has without a word of it."""
    return {one.name: value for one in fields(table) if (value := getattr(table, one.name)) != one.default}
