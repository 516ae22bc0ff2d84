"""Convolution algorithms by name."""

import torch

from unisono.compute.algorithms import ALGORITHMS, DEFAULT
from unisono.compute.geometry import Geometry


def test_the_first_can_compute_any_layer() -> None:
    odd = Geometry(1, 4, 4, (9, 9), (2, 3), (3, 1), (5, 0), (1, 2), 4, torch.bfloat16)
    assert next(iter(ALGORITHMS)) == DEFAULT
    assert ALGORITHMS[DEFAULT].fits(odd)
    assert not any(algorithm.fits(odd) for name, algorithm in ALGORITHMS.items() if not name.startswith("library"))
