"""The ways by name."""

import torch

from unisono.compute.geometry import Geometry
from unisono.compute.ways.table import OWN, WAYS


def test_the_first_can_compute_any_layer() -> None:
    odd = Geometry(1, 4, 4, (9, 9), (2, 3), (3, 1), (5, 0), (1, 2), 4, torch.bfloat16)
    assert next(iter(WAYS)) == OWN
    assert WAYS[OWN].fits(odd)
    assert not any(way.fits(odd) for name, way in WAYS.items() if not name.startswith("library"))
