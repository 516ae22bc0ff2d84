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
    },
)
"""Functions by name that make a wire for payloads of a dtype, or return None if that dtype is sent unencoded."""


ENCODED = ("torch.float32", "torch.float64")
"""Dtypes that are encoded, as flat arrays; payloads of other dtypes are sent unencoded."""


@cache
def wire_of(name: str | None, dtype: torch.dtype) -> Wire | None:
    """Return the wire of that name for payloads of `dtype`; None if they are sent unencoded.

    Raises TensorError, listing the names, for an unknown name.
    """
    if name is None:
        return None
    made: Wire | None = WIRES.load(name, TensorError)(dtype)
    return made if str(dtype) in ENCODED else None
