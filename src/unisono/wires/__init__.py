"""Wires: the forms in which a payload travels between nodes. One wire, one file, one row here.

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
"""Each makes a wire for payloads of a dtype, or gives None where that dtype travels as it is."""


ENCODED = ("torch.float32", "torch.float64")
"""Payloads of other dtypes travel as they are: a wire is given flat arrays of these."""


@cache
def wire_of(name: str | None, dtype: torch.dtype) -> Wire | None:
    """Return the wire of that name for payloads of `dtype`; None where they travel as they are.

    Raises TensorError, listing the names, for an unknown name.
    """
    if name is None:
        return None
    made: Wire | None = WIRES.load(name, TensorError)(dtype)
    return made if str(dtype) in ENCODED else None
