import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.call import call_of
from unisono.transports import fused
from unisono.transports.arithmetic import arithmetic_of, perform
from unisono.transports.fused import rows_in_place
from unisono.transports.plan import Plan
from unisono.transports.steps import steps_of


@given(st.integers(2, 6), st.integers(0, 300), st.integers(1, 50))
def test_in_place_reduction_sums_in_rank_order(ranks: int, length: int, block: int) -> None:
    plan = Plan("allreduce", "direct", "windows", length, torch.float64, None, "sum", 0, call_of("a sum"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "BLOCK_BYTES", 8 * block)
        views = list(np.random.default_rng(length).normal(size=(ranks, length)))
        serial = views[0].copy()
        for view in views[1:]:
            serial += view
        starts = [view.ctypes.data for view in views]
        for rank in range(ranks):
            perform(steps_of(rows_in_place(starts, rank, plan), arithmetic_of(torch.float64)))
        assert all(view.tobytes() == serial.tobytes() for view in views)
