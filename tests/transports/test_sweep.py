import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import apart
from unisono.schedules import find, names
from unisono.transports import sweep
from unisono.transports.arithmetic import arithmetic_of, perform
from unisono.transports.sweep import can_sweep, plan_sweep


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_only_direct_leaves_each_chunk_to_its_owner(ranks: int) -> None:
    sweeps = {name for name in names() if can_sweep(find(name, apart(ranks)).allreduce(1, ranks), 1, ranks)}
    same = {"direct", "hierarchical/direct"}  # with one rank a node, hierarchical is what goes between the nodes
    if ranks == 2:
        same |= {"halving", "halving/round-robin", "hierarchical/halving", "hierarchical/halving/round-robin"}
        same |= {"ring", "hierarchical"}
    assert sweeps == same


@given(st.integers(1, 6), st.integers(0, 300), st.integers(1, 50))
def test_the_sweeps_of_all_ranks_sum_in_their_order(ranks: int, length: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "BLOCK", 8 * block)
        views = list(np.random.default_rng(length).normal(size=(ranks, length)))
        serial = views[0].copy()
        for view in views[1:]:
            serial += view
        for rank in range(ranks):
            perform(plan_sweep(views, rank, 8, arithmetic_of(torch.float64)))
        assert all(view.tobytes() == serial.tobytes() for view in views)
