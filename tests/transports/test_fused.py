import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.transports import fused
from unisono.transports.arithmetic import arithmetic_of, perform
from unisono.transports.fused import plan_reduce_in_place


@given(st.integers(1, 6), st.integers(0, 300), st.integers(1, 50))
def test_in_place_reduction_sums_in_rank_order(ranks: int, length: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "BLOCK_BYTES", 8 * block)
        views = list(np.random.default_rng(length).normal(size=(ranks, length)))
        serial = views[0].copy()
        for view in views[1:]:
            serial += view
        for rank in range(ranks):
            perform(plan_reduce_in_place(views, rank, 8, arithmetic_of(torch.float64)))
        assert all(view.tobytes() == serial.tobytes() for view in views)
