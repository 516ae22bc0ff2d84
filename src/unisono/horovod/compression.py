"""Number formats of gradients on the network, under Horovod's names."""

from __future__ import annotations

from typing import NamedTuple


class Compressor(NamedTuple):
    """Wire between nodes; None sends the tensor's own dtype. Integers and 16-bit floats are sent as they are."""

    wire: str | None


class Compression:
    """Compressors. Sums are made in the tensor's own dtype; only transfers between nodes are narrow."""

    none = Compressor(None)
    fp16 = Compressor("float16")
    bf16 = Compressor("bfloat16")
