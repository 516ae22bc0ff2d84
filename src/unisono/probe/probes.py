"""Probes: what is measured, as data. The work of each says what its seconds stand for, and which one is longer.

MessageProbe      bytes from one node to another
ProductProbe      FLOPs of a linear layer or a convolution, forward; the backward pass has twice as many
MemoryProbe       bytes that a sum reads and writes
DecodingProbe     pixels of a JPEG
DiskProbe         bytes of a file, read from one end to the other
CollectiveProbe   bytes of a payload
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from unisono.plan.exchange_cost import BYTES_OF_A_SUM

LATENCY_BYTES = 1 << 10
"""Bytes that each message counts besides its own: short ones take as long as each other."""


class Probe(Protocol):
    """Measurement that all ranks make together."""

    @property
    def work(self) -> float:
        """FLOPs, bytes or pixels of a rank's call."""
        ...

    @property
    def words(self) -> str:
        """Name in messages and in the file."""
        ...


@dataclass(frozen=True)
class MessageProbe:
    """Message from one node to another and back."""

    bytes: int

    @property
    def work(self) -> float:
        """Bytes of a message, and those that its latency has time for on a link of 100 Mbit/s."""
        return LATENCY_BYTES + self.bytes

    @property
    def words(self) -> str:
        """Name with the bytes."""
        return f"message of {self.bytes} bytes"


@dataclass(frozen=True)
class ProductProbe:
    """Linear layer, or convolution of square images with a square kernel, stride 1, for the samples of a rank."""

    kind: str
    samples: int
    inputs: int
    outputs: int
    side: int = 1
    """Side of the output in pixels."""
    kernel: int = 1
    """Side of the kernel."""

    @property
    def rows(self) -> int:
        """Rows of the product."""
        return self.samples * self.side**2

    @property
    def inner(self) -> int:
        """Multiply-adds of an output."""
        return self.inputs * self.kernel**2

    @property
    def work(self) -> float:
        """FLOPs of the forward pass."""
        return 2.0 * self.rows * self.inner * self.outputs

    @property
    def words(self) -> str:
        """Name with the sizes."""
        area = f" on {self.side}x{self.side}, kernel {self.kernel}x{self.kernel}" if self.kind != "linear" else ""
        return f"{self.kind} {self.inputs} to {self.outputs}{area}, {self.samples} samples"


@dataclass(frozen=True)
class MemoryProbe:
    """Sum of two tensors into one of them."""

    bytes: int
    """Bytes of a tensor, on each rank."""

    @property
    def work(self) -> float:
        """Bytes that are read and written."""
        return BYTES_OF_A_SUM * self.bytes

    @property
    def words(self) -> str:
        """Name with the bytes."""
        return f"sum of {self.bytes >> 20} MiB on each rank"


@dataclass(frozen=True)
class DecodingProbe:
    """JPEG that is decoded as a whole."""

    width: int
    height: int

    @property
    def work(self) -> float:
        """Pixels of the image."""
        return self.width * self.height

    @property
    def words(self) -> str:
        """Name with the size."""
        return f"JPEG of {self.width}x{self.height} pixels"


@dataclass(frozen=True)
class DiskProbe:
    """File that is read from one end to the other, past the system's memory of files."""

    bytes: int

    @property
    def work(self) -> float:
        """Bytes of the file."""
        return self.bytes

    @property
    def words(self) -> str:
        """Name with the bytes."""
        return f"file of {self.bytes >> 20} MiB"


@dataclass(frozen=True)
class CollectiveProbe:
    """Collective with the schedule that `auto` takes."""

    collective: str
    wire: str
    bytes: int
    """Bytes of the payload in float32."""

    @property
    def work(self) -> float:
        """Bytes of the payload."""
        return self.bytes

    @property
    def words(self) -> str:
        """Name with the wire and the bytes."""
        return f"{self.collective} of {self.bytes >> 10} KiB, {self.wire}"


class PreparedCall(NamedTuple):
    """Probe that is ready to be measured on this rank."""

    call: Callable[[], tuple[float, ...]]
    """Function that returns the seconds of a call, or of its passes; none where this rank takes no part."""
    schedule: str = ""
    """Schedule of a collective."""


def take_no_part() -> tuple[float, ...]:
    """Return no seconds: others measure."""
    return ()
