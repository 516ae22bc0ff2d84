"""Options with which a data set is packed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackOptions:
    """Options with which a data set is packed."""

    short_side: int = 256
    """Pixels to which longer short sides of images are reduced; 0 reduces none."""
    stripes: int = 32
    """Smallest number of stripe files."""
    stripe_bytes: int = 256_000_000
    """Largest stripe file in bytes."""
    quality: int = 90
    """JPEG quality of images that are encoded again."""
