"""Machines as TOML: a node, its link and its network, as the equations need them.

    machines/NAME.toml ───────┐
    a file of your own ───────┼─▶ MachineFacts: node, efficiency, link, topology, disk, decoding, and what was measured
    unisono probe OUT.toml ───┤
    unisono tune ─────────────┘

Worked example, `taihulight`: an adapter of 12 GB/s, supernodes of 256 whose uplink carries a quarter of that: beta_1 =
83 ps, beta_2 = 333 ps. `network` gives it as a network to price schedules on.

`docs/planning.md` has the tables of such a file. They may lack keys, rows have every key. A spread is 0 for a single
trial.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from unisono.errors import UsageError
from unisono.network import Network
from unisono.network.choice import LIBRARY, ChoiceTables, table_of
from unisono.schedules import check as check_schedule
from unisono.tables import check, choice, known, number, parse, rows
from unisono.wires import WIRES

FOLDER = Path(__file__).parents[1] / "machines"

LINEAR_KIND, CONVOLUTION_KIND = "linear", "convolution"
"""Kinds of measured products."""

FLOAT32, BFLOAT16 = "float32", "bfloat16"
"""Number formats of measured products."""

FLOAT32_WIRE = "float32"
"""Wire of a row whose payload was sent as it is."""

MAX_RANKS = 40_960
"""Largest number of ranks: TaihuLight's nodes. The price of a ring then examines the 81,918 rounds of a few ranks."""

BYTES_OF_A_SUM = 3
"""Bytes of memory that are read and written for each byte that is summed into place."""


def check_ranks(ranks: int) -> None:
    """Raise UsageError for too many ranks, before anything is made for each of them."""
    if ranks > MAX_RANKS:
        raise UsageError(f"{ranks:,} ranks are too many to price; the limit is {MAX_RANKS:,}")


@dataclass(frozen=True)
class NodeFacts:
    """Computing and memory of a node; 0: not known."""

    cores: int = number(0, above=0)
    accelerators: int = number(0, above=0)
    flops: float = number(0.0, at_least=1)
    """Peak FLOPs per second of the whole node, float32."""
    cache_bytes: int = number(0, above=0)
    """Bytes of cache for a thread's blocks."""
    simd_width: int = number(0, above=0)
    """float32 numbers in a vector register."""
    memory_bytes: float = number(0.0, above=0)
    memory_bandwidth: float = number(0.0, at_least=1)
    """Bytes per second of the whole node."""
    to_host: float = number(0.0, at_least=1)
    """Bytes per second of copies from the node's accelerators to the host, all at once; 0 where ranks compute on it."""
    to_device: float = number(0.0, at_least=1)
    """Bytes per second of copies from the host to the accelerators."""
    device_bandwidth: float = number(0.0, at_least=1)
    """Bytes per second of the memory of all accelerators."""
    device_memory_bytes: float = number(0.0, above=0)
    """Bytes of the memory of an accelerator."""


@dataclass(frozen=True)
class EfficiencyFacts:
    """Share of a node's peak that a kind of product reaches."""

    convolution: float = number(1.0, above=0, at_most=1)
    linear: float = number(1.0, above=0, at_most=1)


@dataclass(frozen=True)
class LinkFacts:
    """Link of a node."""

    bandwidth: float = number(0.0, at_least=1)
    """Bytes per second of an adapter, in each direction."""
    adapters: int = number(1, above=0)
    latency: float = number(0.0, above=0)
    """Seconds before the first byte arrives."""
    overhead: float = number(0.0, above=0)
    """Seconds that a rank is busy with each message."""

    @property
    def total_bandwidth(self) -> float:
        """Bytes per second of all adapters."""
        return self.bandwidth * self.adapters


@dataclass(frozen=True)
class TopologyFacts:
    """Network above the nodes."""

    supernode: int = number(0, above=0)
    """Nodes under a switch; 0: all."""
    oversubscription: float = number(1.0, above=0)
    """Bandwidth of a supernode's nodes over that of its uplink."""

    def __post_init__(self) -> None:
        """Raise UsageError for an uplink that is narrower than its nodes, of supernodes of an unknown size."""
        if self.oversubscription != 1 and not self.supernode:
            held = f"oversubscription = {self.oversubscription:g}"
            raise UsageError(f"{held} has no effect without supernode, the number of nodes under a switch")


@dataclass(frozen=True)
class DiskFacts:
    """Storage that a node reads samples from."""

    bandwidth: float = number(0.0, at_least=1)
    """Bytes per second that a node reads; 0: not known."""


@dataclass(frozen=True)
class DecodingFacts:
    """Decoding of images."""

    pixels: float = number(0.0, at_least=1)
    """JPEG pixels per second of a core; 0: not known."""


@dataclass(frozen=True)
class ProbeFacts:
    """Measurement that a machine file comes from; empty for one that was written by hand."""

    date: str = ""
    version: str = ""
    hosts: tuple[str, ...] = ()
    ranks: int = number(0, above=0)
    nodes: int = number(0, above=0)
    seconds: float = number(0.0, above=0)
    """Seconds that all measurements took."""
    left_out: tuple[str, ...] = ()
    """Reason for each part that was not measured."""


@dataclass(frozen=True)
class NetworkRow:
    """Speed of a node at training steps of a network of the catalogue, on inputs of the network's own shape.

    It goes before node.flops.
    """

    name: str
    batch: int = number(above=0)
    """Samples of an accelerator in a step; of the node, if it has none."""
    samples_per_second: float = number(above=0)


@dataclass(frozen=True)
class ProductRow:
    """Speed of a node at (rows, inner) @ (inner, columns), made by all its ranks at once, one for each."""

    kind: str = field(metadata={"one_of": (LINEAR_KIND, CONVOLUTION_KIND)})
    rows: int = number(above=0)
    """Samples of a rank, times the output's area in a convolution."""
    inner: int = number(above=0)
    """Inputs, times the kernel's area."""
    columns: int = number(above=0)
    """Outputs."""
    kernel: int = number(above=0)
    """Area of the kernel: 9 for 3x3; 1 for a linear layer."""
    forward: float = number(at_least=1)
    """FLOP/s of the node in the forward pass."""
    backward: float = number(at_least=1)
    """FLOP/s of the node in the backward pass, both gradients, which have twice the FLOPs."""
    spread: float = number(at_least=0)
    dtype: str = choice(FLOAT32, FLOAT32, BFLOAT16)
    """Number format of the products, as a run's precision."""

    @property
    def step(self) -> float:
        """FLOP/s of the node in both passes together."""
        return 3 / (1 / self.forward + 2 / self.backward)


@dataclass(frozen=True)
class CollectiveRow:
    """Time of a collective with the schedule that `auto` took."""

    collective: str = field(metadata={"one_of": ("allreduce", "reduce_scatter", "all_gather")})
    schedule: str
    wire: str = field(metadata={"one_of": tuple(WIRES)})
    nodes: int = number(above=0, at_most=MAX_RANKS)
    ranks: int = number(above=0, at_most=MAX_RANKS)
    """Number of ranks on all nodes."""
    bytes: int = number(above=0)
    """Bytes of the whole payload in float32, before it is encoded."""
    seconds: float = number(above=0)
    """Median over the trials of the slowest rank's seconds."""
    spread: float = number(at_least=0)

    def __post_init__(self) -> None:
        """Raise UsageError for nodes without a rank, and for an unknown schedule."""
        if self.schedule != LIBRARY:
            check_schedule(self.schedule)
        if self.ranks < self.nodes:
            raise UsageError(f"{self.ranks} ranks are too few for {self.nodes} nodes; each node has one at least")


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
    probe: ProbeFacts = field(default_factory=ProbeFacts)
    slow_links: Mapping[int, float] = field(default_factory=dict, metadata={"at_least": 1})
    """Times that the link of a node is slower than `link`, by the node's number."""
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Reason for each value that is in no source, by its key: "link.latency"."""
    measured: Mapping[str, str] = field(default_factory=dict)
    """Measurement of each value that was measured, by its key."""
    choices: ChoiceTables = field(default_factory=ChoiceTables)
    """Tables by which `auto` chooses."""
    networks: tuple[NetworkRow, ...] = rows("network")
    products: tuple[ProductRow, ...] = rows("product")
    collectives: tuple[CollectiveRow, ...] = rows("collective")

    def in_precision(self, precision: str) -> MachineFacts:
        """Return the machine whose products are those of a run's precision: "auto" is bfloat16 where that was measured.

        What was measured in float32 alone counts for bfloat16, too.
        """
        of = {dtype: tuple(row for row in self.products if row.dtype == dtype) for dtype in (FLOAT32, BFLOAT16)}
        return replace(self, products=(precision != FLOAT32 and of[BFLOAT16]) or of[FLOAT32])

    def at_speed(self, times: float) -> MachineFacts:
        """Return the machine whose nodes compute so many times as fast, in rows of products and networks as well."""
        products = (replace(row, forward=row.forward * times, backward=row.backward * times) for row in self.products)
        networks = (replace(row, samples_per_second=row.samples_per_second * times) for row in self.networks)
        node = replace(self.node, flops=self.node.flops * times)
        return replace(self, node=node, products=tuple(products), networks=tuple(networks))

    @property
    def assumptions(self) -> Mapping[str, str]:
        """Reason for each value that a plan assumes, by its key: those of the file, and computing at the peak."""
        rates = {row.kind for row in self.products}
        unknown = [kind for kind, share in vars(self.efficiency).items() if share == 1 and kind not in rates]
        peak = "computing at 100% of the peak: no efficiency is known"
        return {**self.assumed, **({} if self.networks else {f"efficiency.{kind}": peak for kind in unknown})}

    def network(self, ranks_per_node: int = 0) -> Network:
        """Return the links between nodes, all adapters together, and the seconds to sum a byte by the memory that the
        ranks of a node share; 0 ranks: sums are free. Raises NetworkError for a machine without a bandwidth."""
        memory = self.node.memory_bandwidth
        gamma = BYTES_OF_A_SUM * ranks_per_node / memory if memory else 0.0
        beta = 1 / self.link.total_bandwidth if self.link.total_bandwidth else 0.0
        supernode = self.topology.supernode
        uplink = self.topology.oversubscription * beta / supernode if supernode else None
        return Network(self.link.latency, beta, gamma, uplink, overhead=self.link.overhead)


TABLES: Mapping[str, Any] = {
    name: kind for name, kind in get_type_hints(MachineFacts).items() if is_dataclass(kind) and name != "choices"
}


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
        known_names = ", ".join(machine_names())
        missing = f"no file {name}, and no machine of that name" if path == Path(name) else f"no machine {name}"
        raise UsageError(f"{missing}: there are {known_names}, or give a TOML file, such as ./mine.toml")
    source = f"{path} is no machine"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{source}: {error}") from error
    return parse_machine(tables, source)


def parse_machine(tables: Mapping[str, Any], source: str) -> MachineFacts:
    """Return the machine that the tables of a file describe.

    Raises UsageError, beginning with `source`, for a key or a value that it cannot have.
    """
    machine = parse(MachineFacts, tables, source, UsageError)
    if not machine.name:
        raise UsageError(f"{source}: name is empty; give one, such as a processor and a network")
    for table, reasons in (("assumed", machine.assumed), ("measured", machine.measured)):
        for key in reasons:
            of, _, value = key.partition(".")
            if of not in TABLES or value not in tables.get(of, {}):
                raise UsageError(f'{source}: {table}."{key}" is a reason for a value that this file does not have')
    table_of(machine.choices, f"{source}: choices")
    return machine


def machine_text(machine: MachineFacts) -> str:
    """Return the file of a machine, as `find_machine` reads it; values that are not known are left out."""
    content = known(machine)
    lists = {key: content.pop(key) for key in ("network", "product", "collective") if key in content}
    lines = (f"\n[[{key}]]\n{tomli_w.dumps(row)}" for key, some in lists.items() for row in some)
    return "".join((tomli_w.dumps(content), *lines))


CHANGES: Mapping[str, tuple[str, str]] = {
    "bandwidth": ("link", "bandwidth"),
    "latency": ("link", "latency"),
    "flops": ("node", "flops"),
    "memory_bandwidth": ("node", "memory_bandwidth"),
    "oversubscription": ("topology", "oversubscription"),
    "disk": ("disk", "bandwidth"),
    "decoding": ("decoding", "pixels"),
}
"""Table and key of a machine file by the word that changes it."""

CHANGES_OF_EXCHANGES = ("bandwidth", "latency", "memory_bandwidth", "oversubscription")
"""Changes with which measured exchanges are those of another machine."""


def changed_machine(machine: MachineFacts, change: str) -> MachineFacts:
    """Return the machine with a value multiplied, as in "bandwidth=2x".

    Rows that were measured change with it: those of products and networks are multiplied with flops, and those of
    collectives are left out where their links or memory change, so that exchanges are estimated from the link alone.

    Raises UsageError for other words, for a value that the machine file does not have, and for one beyond its limits.
    """
    name, _, factor = change.partition("=")
    try:
        times = float(factor.removesuffix("x"))
    except ValueError:
        times = 0.0
    if name not in CHANGES or not factor.endswith("x") or not 0 < times < float("inf"):
        raise UsageError(
            f"--what-if {change}: give a factor above 0 for {', '.join(CHANGES)}, as in bandwidth=2x, or a key of the "
            "recipe, as in exchange.wire=bfloat16"
        )
    table, key = CHANGES[name]
    facts: Any = getattr(machine, table)
    if not getattr(facts, key) and not (name == "flops" and machine.networks):
        raise UsageError(f"--what-if {change}: {machine.name} has no {table}.{key}, so it cannot be multiplied")
    if name == "flops":
        machine = machine.at_speed(times)
    elif name in CHANGES_OF_EXCHANGES:
        kept = [row for row in machine.collectives if row.nodes == 1 and table != "node"]
        machine = replace(machine, collectives=tuple(kept))
    try:
        changed = replace(facts, **{key: getattr(facts, key) * times})
        check(changed)
    except UsageError as error:
        raise UsageError(f"--what-if {change}: {error}") from None
    return replace(machine, name=f"{machine.name}, {change}", **{table: changed})
