"""A backward pass has the transposes of the forward pass's exchanges, in the reverse order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from unisono.tensor_parallel.activations import gathered, summed_own_part
from unisono.tensor_parallel.overlap.flows import Flow, flows_of, summed_in_place
from unisono.tensor_parallel.plan import COLUMN, PART, ROW, WHOLE, Split

CUT = "cut"


def before_and_after(flow: Flow) -> tuple[object, object]:
    """What a flow does before its product, and after it; None where it does nothing."""
    assert not (flow.cut and flow.take)
    return CUT if flow.cut else flow.take, flow.give


# a whole input of a column, and a whole gradient of a row's output, serve partial sums
TRANSPOSED = {
    COLUMN: ({None: summed_in_place, gathered: summed_own_part}, {gathered: CUT, None: None}),
    ROW: ({CUT: gathered, None: None}, {summed_in_place: None, summed_own_part: gathered}),
}


@pytest.mark.parametrize(("how", "takes", "gives"), list(product((COLUMN, ROW), (WHOLE, PART), (WHOLE, PART))))
def test_backward_is_the_transpose_of_forward(how: str, takes: str, gives: str) -> None:
    flows: Sequence[Flow] = flows_of(Split(how, 2, takes, gives))
    (before, after), (before_backward, after_backward) = map(before_and_after, flows)
    of_before, of_after = TRANSPOSED[how]
    assert (before_backward, after_backward) == (of_after[after], of_before[before])
