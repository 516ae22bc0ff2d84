"""Passes are cut where they exchange much, and where they exchange nothing they are one slice."""

from __future__ import annotations

import pytest

from unisono.tensor_parallel.overlap.flows import flows_of
from unisono.tensor_parallel.overlap.layer_passes import plan_passes
from unisono.tensor_parallel.overlap.slices import SliceLimits
from unisono.tensor_parallel.plan import split_of

INPUTS, OUTPUTS = 30, 50


@pytest.mark.parametrize(
    ("words", "forward", "backward"),
    [
        ("column", 5, 3),
        ("column gives part", 1, 3),
        ("column takes part", 5, 3),
        ("column takes part gives part", 3, 3),
        ("row", 5, 3),
        ("row takes part", 5, 1),
        ("row gives part", 5, 5),
        ("row takes part gives part", 5, 5),
    ],
)
def test_slices_follow_the_bytes_that_a_pass_exchanges(words: str, forward: int, backward: int) -> None:
    passes = plan_passes(flows_of(split_of(words, "fc")), 100, INPUTS, OUTPUTS, 2, SliceLimits(10, 1, 9))
    assert (passes.forward_slices, passes.backward_slices) == (forward, backward)
    assert passes.sliced
    assert not plan_passes(passes.flows, 100, INPUTS, OUTPUTS, 2, SliceLimits(10, 1, 1)).sliced
