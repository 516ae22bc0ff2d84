"""One suite that every wire passes: those of the table, and one with scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.wires.scaled import Scaled

from unisono.wires import WIRES, wire_of
from unisono.wires.wire import Wire

PAYLOADS = {torch.float32: np.float32, torch.float64: np.float64}

EVERY: dict[str, tuple[Wire, type]] = {"scaled": (Scaled(), np.float32)}
for _name in WIRES:
    for _dtype, _numpy in PAYLOADS.items():
        if (_made := wire_of(_name, _dtype)) is not None:
            EVERY[f"{_name} for {_dtype}"] = _made, _numpy


@pytest.mark.parametrize("name", EVERY)
@given(values=st.lists(st.floats(-1e4, 1e4, width=32), max_size=300))
def test_both_ends_hold_equal_values_and_forwarding_is_stable(name: str, values: list[float]) -> None:
    wire, numpy = EVERY[name]
    held = np.array(values, numpy)
    parcel, again = (np.zeros(wire.nbytes(len(values)), np.uint8) for _ in range(2))
    wire.encode(held, parcel)
    taken = np.full_like(held, np.nan)
    wire.decode(parcel, taken)
    assert taken.tobytes() == held.tobytes()
    wire.encode(taken, again)
    assert again.tobytes() == parcel.tobytes()
    assert taken.tobytes() == held.tobytes()


@pytest.mark.parametrize("name", EVERY)
def test_decoded_values_are_near_the_sent_ones(name: str) -> None:
    wire, numpy = EVERY[name]
    sent = np.random.default_rng(0).normal(size=1000).astype(numpy)
    held = sent.copy()
    wire.encode(held, np.zeros(wire.nbytes(1000), np.uint8))
    bound = np.abs(sent).max() / 12 if "int4" in name else 0.05
    assert np.abs(held - sent).max() < bound
    assert wire.nbytes(1000) < sent.nbytes
