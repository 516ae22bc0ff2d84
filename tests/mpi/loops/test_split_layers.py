"""Loops of people's own with layers that are split over pairs of ranks: what they train is what a serial run gives."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.mpi.loops.loops import LOOPS, Run
from tests.mpi.loops.test_loops import REFUSED, RULES, TOLERANCE

from unisono.tensor_parallel import whole_state_dict
from unisono.world import World

SPLIT = {"0": "column 2 gives part", "2": "row 2 takes part"}
"""Plan that splits the first two layers of a network over pairs of ranks."""

WITH_SPLIT_LAYERS = (
    "plain",
    "accumulated",
    "accumulated_under_no_sync",
    "one_graph_twice",
    "some_gradients_removed",
    "dropped_without_step",
    "skipped_by_all",
    "frozen_for_a_while",
)


@pytest.mark.parametrize(
    ("loop", "rule"),
    [
        (loop, name)
        for loop in WITH_SPLIT_LAYERS
        for name, rule in RULES.items()
        if rule.traits.groups and name not in REFUSED.get(loop, {})
    ],
)
def test_loop_with_split_layers(world: World, loop: str, rule: str) -> None:
    """Ranks have samples of their own, and the ranks of a pair exchange activations."""
    if world.size % 2:
        pytest.skip("layers are split over pairs of ranks")
    mine = Run(world.size, [world.rank], "momentum", RULES[rule], world, SPLIT)
    list(LOOPS[loop](mine))
    actual = whole_state_dict(mine.models[0])
    if world.rank:
        assert actual == {}
        return
    serial = Run(world.size, range(world.size), "momentum", RULES[rule])
    list(LOOPS[loop](serial))
    expected = serial.models[0].state_dict()
    assert list(actual) == list(expected)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=TOLERANCE, msg=partial("{}: {}".format, name))
