"""Wires: encodings of a payload between nodes. One wire per file, one row per wire here.

payload    1.2345678  ──encode──▶  1.234 (16 bits)  ═══ network ═══▶  1.234  ──decode──▶  payload's dtype, summed
           1.234      ◀─ the sender keeps what it sent
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from unisono.errors import TensorError
from unisono.registry import Registry

if TYPE_CHECKING:
    import torch

    from unisono.wires.wire import Wire

WIRES = Registry(
    "wire",
    {
        "float32": "unisono.wires.rounded:float32",
        "float16": "unisono.wires.rounded:float16",
        "bfloat16": "unisono.wires.rounded:bfloat16",
        "int8": "unisono.wires.block_scaled:int8",
        "int4": "unisono.wires.block_scaled:int4",
        "exact": "unisono.wires.rounded:exact",
    },
)
"""Functions by name that make a wire for payloads of a dtype of ENCODED, or return None if it is sent unencoded."""

ENCODED = ("torch.float32", "torch.float64")
"""Dtypes that are encoded, as flat arrays; payloads of other dtypes are sent unencoded."""

EXACT = "exact"
"""Wire whose payloads are sums of integers, on all links and in memory (`transports/exact.py`)."""

SHARE_LENGTH = 1 << 16
"""Elements of the stretch whose encoded size is taken for that of any."""


@cache
def encoded_share(name: str | None) -> float:
    """Return the encoded size of float32 numbers, relative to their own; 1 without a wire. Raises TensorError for an
    unknown name."""
    if name is None:
        return 1.0
    import torch  # noqa: PLC0415  recipes are checked without PyTorch

    wire = wire_of(name, torch.float32)
    return 1.0 if wire is None else wire.nbytes(SHARE_LENGTH) / (4 * SHARE_LENGTH)


@cache
def wire_of(name: str | None, dtype: torch.dtype) -> Wire | None:
    """Return the wire of that name for payloads of `dtype`; None if they are sent unencoded.

    Raises TensorError, listing the names, for an unknown name.
    """
    if name is None:
        return None
    make = WIRES.load(name, TensorError)
    wire: Wire | None = make(dtype) if str(dtype) in ENCODED else None
    return wire
