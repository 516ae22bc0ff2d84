"""How gradients meet, as the user says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """How gradients meet."""

    algorithm: str = "auto"
    """"auto" (what was measured, or else priced, chooses), "library", or the name of a schedule."""
    wire: str | None = None
    """The number format between nodes: "float32", "float16" or "bfloat16"; None for the gradients' own."""
    bucket_bytes: int | None = None
    """What a bucket holds at most; None: what is predicted to be best once the first steps were measured."""
