"""Rows of a machine file: products, messages and collectives that `unisono probe` has measured, and the probe itself;
whole networks that somebody else has, as a paper.

    [[network]]      name, batch                           ─▶ samples/s of a node, steps without exchange between nodes
    [[product]]      kind, rows, inner, columns, kernel    ─▶ FLOP/s of a node, forward and backward
    [[message]]      bytes                                 ─▶ seconds from one node to another
    [[collective]]   collective, schedule, wire, nodes, ranks, bytes ─▶ seconds
    [probe]          date, version, hosts, ranks, nodes, seconds, left_out

A spread is that of the middle half of the trials: the third quartile less the first, over the median.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LINEAR_KIND, CONVOLUTION_KIND = "linear", "convolution"
"""Kinds of measured products."""

FLOAT32_WIRE = "float32"
"""Wire of a row whose payload was sent as it is."""

SPREAD = {"least": 0.0}
"""Limit of a spread: 0 for a single trial. All other numbers are above 0."""


@dataclass(frozen=True)
class NetworkRow:
    """Speed of a node at training steps of a network of the catalogue, on inputs of the network's own shape."""

    name: str
    batch: int
    """Samples of an accelerator in a step; of the node, if it has none."""
    samples_per_second: float


@dataclass(frozen=True)
class ProductRow:
    """Speed of a node at (rows, inner) @ (inner, columns) of float32, made by all its ranks at once, one for each."""

    kind: str = field(metadata={"one_of": (LINEAR_KIND, CONVOLUTION_KIND)})
    rows: int
    """Samples of a rank, times the output's area in a convolution."""
    inner: int
    """Inputs, times the kernel's area."""
    columns: int
    """Outputs."""
    kernel: int
    """Area of the kernel: 9 for 3x3; 1 for a linear layer."""
    forward: float
    """FLOP/s of the node in the forward pass."""
    backward: float
    """FLOP/s of the node in the backward pass, both gradients, which have twice the FLOPs."""
    spread: float = field(metadata=SPREAD)

    @property
    def step(self) -> float:
        """FLOP/s of the node in both passes together."""
        return 3 / (1 / self.forward + 2 / self.backward)


@dataclass(frozen=True)
class MessageRow:
    """Time of a message between two nodes while all others do the same in pairs."""

    bytes: int
    seconds: float
    """Half the time there and back, median."""
    spread: float = field(metadata=SPREAD)


@dataclass(frozen=True)
class CollectiveRow:
    """Time of a collective with the schedule that `auto` took."""

    collective: str = field(metadata={"one_of": ("allreduce", "reduce_scatter", "all_gather")})
    schedule: str
    wire: str
    nodes: int
    ranks: int
    """Number of ranks on all nodes."""
    bytes: int
    """Bytes of the whole payload in float32, before it is encoded."""
    seconds: float
    """Median over the trials of the slowest rank's seconds."""
    spread: float = field(metadata=SPREAD)


@dataclass(frozen=True)
class ProbeFacts:
    """Measurement that a machine file comes from; empty for one that was written by hand."""

    date: str = ""
    version: str = ""
    """Version of Unisono."""
    hosts: tuple[str, ...] = ()
    """Host name of each node."""
    ranks: int = 0
    nodes: int = 0
    seconds: float = 0.0
    """Seconds that all measurements took."""
    left_out: tuple[str, ...] = ()
    """Reason for each part that was not measured."""
