"""Options of the exchange of gradients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """Options of the exchange of gradients."""

    algorithm: str = "auto"
    """Algorithm: "auto" (the fastest as measured, or else as modelled), "library", or the name of a schedule."""
    wire: str | None = None
    """Number format between nodes: "float32", "float16", "bfloat16", "int8" or "int4"; None for the gradients' own."""
    bucket_bytes: int | None = None
    """Largest bucket in bytes; None chooses it from the first steps."""
