"""Options of the exchange of gradients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """Options of the exchange of gradients.

    `algorithm` is "auto", "library" (the MPI library's own), or the name of a schedule. `wire` is the number format
    between nodes: "float32", "float16", "bfloat16", "int8" or "int4"; None keeps the gradients' own. `bucket_bytes` is
    the size of the largest bucket; None chooses it from the first steps.
    """

    algorithm: str = "auto"
    """Algorithm: "auto" (the fastest by measurement, else by estimate), "library", or the name of a schedule."""
    wire: str | None = None
    """Number format between nodes: "float32", "float16", "bfloat16", "int8" or "int4"; None for the gradients' own."""
    bucket_bytes: int | None = None
    """Largest bucket in bytes; None chooses it from the first steps."""
