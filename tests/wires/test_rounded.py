import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import TensorError
from unisono.wires import WIRES, wire_of
from unisono.wires.rounded import Rounded


@given(st.lists(st.floats(width=32), max_size=50), st.sampled_from([torch.float16, torch.bfloat16]))
def test_both_ends_hold_the_sent_values(values: list[float], flight: torch.dtype) -> None:
    wire = Rounded(torch.float32, flight)
    held = np.array(values, np.float32)
    rounded = torch.tensor(values, dtype=torch.float32).to(flight).float()
    parcel, taken = np.empty(wire.nbytes(len(values)), np.uint8), np.empty_like(held)
    wire.encode(held, parcel)
    wire.decode(parcel, taken)
    np.testing.assert_array_equal(held, rounded.numpy())
    np.testing.assert_array_equal(taken, held)
    assert parcel.nbytes == 2 * len(values)


def test_dtypes_that_are_not_wider_are_sent_unencoded() -> None:
    for name in (None, *WIRES):
        for dtype in (torch.float16, torch.bfloat16, torch.int64):
            assert wire_of(name, dtype) is None
    assert wire_of("float32", torch.float32) is None
    narrow = wire_of("float32", torch.float64)
    assert narrow is not None
    assert narrow.nbytes(3) == 12


def test_an_unknown_wire_lists_the_names() -> None:
    with pytest.raises(TensorError, match="'float8'; there are float32, float16, bfloat16"):
        wire_of("float8", torch.float32)
