"""Block-scaled integers: exact repetition, errors within half a scale, sizes, and numbers that have no scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from unisono.wires.block_scaled import BLOCK, LARGEST_SCALE, SMALLEST_SCALE, STRETCH, BlockScaled

WIRES = [BlockScaled(dtype, bits) for dtype in (torch.float32, torch.float64) for bits in (8, 4)]
FLOATS = {torch.float32: np.float32, torch.float64: np.float64}


def sent(wire: BlockScaled, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What both ends hold, and the parcel."""
    held, parcel = values.copy(), np.full(wire.nbytes(len(values)), 0xA5, np.uint8)
    wire.encode(held, parcel)
    taken = np.full_like(held, 3)
    wire.decode(parcel, taken)
    assert taken.tobytes() == held.tobytes()
    return held, parcel


def largest_of_blocks(values: np.ndarray) -> np.ndarray:
    padded = np.append(np.abs(values), np.zeros(-len(values) % BLOCK, values.dtype))
    return np.repeat(padded.reshape(-1, BLOCK).max(1), BLOCK)[: len(values)]


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: f"{wire.bits} {wire.dtype}")
@given(st.data())
def test_any_bits_are_repeated_exactly(wire: BlockScaled, data: st.DataObject) -> None:
    """Whatever numbers there are, subnormal and infinite ones and NaN too: both ends agree, and so does a forward."""
    dtype = FLOATS[wire.dtype]
    values = data.draw(arrays(dtype, st.integers(0, 2 * BLOCK), elements=st.floats(width=8 * np.dtype(dtype).itemsize)))
    held, parcel = sent(wire, values)
    again, repeated = sent(wire, held)
    assert repeated.tobytes() == parcel.tobytes()
    assert again.tobytes() == held.tobytes()


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: f"{wire.bits} {wire.dtype}")
@given(st.integers(0, 1 << 30), st.integers(1, 500), st.integers(-90, 90))
def test_errors_are_at_most_half_a_scale(wire: BlockScaled, seed: int, length: int, exponent: int) -> None:
    generator = np.random.default_rng(seed)
    values = (generator.normal(size=length) * 2.0**exponent).astype(FLOATS[wire.dtype])
    held, _ = sent(wire, values)
    scales = largest_of_blocks(values) / wire.largest * (1 + 2.0**-8)
    assert (np.abs(held.astype(np.float64) - values) <= scales / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("bits", [8, 4])
@given(st.integers(0, 1 << 30))
def test_every_scale_is_found_again(bits: int, seed: int) -> None:
    """Largest numbers close to one another: each has a scale of its own, near ties between two of them included."""
    wire = BlockScaled(torch.float32, bits)
    values = np.zeros(256 * BLOCK, np.float32)
    values[::BLOCK] = np.random.default_rng(seed).uniform(1, 2, 256)
    held, parcel = sent(wire, values)
    assert sent(wire, held)[1].tobytes() == parcel.tobytes()
    integers = parcel[2 * 256 :].reshape(256, -1)[:, 0] & ((1 << bits) - 1)  # of the largest number of each block
    np.testing.assert_array_equal(integers, wire.largest)


@pytest.mark.parametrize(("bits", "most"), [(8, 8.3), (4, 4.3)])
def test_sizes(bits: int, most: float) -> None:
    wire = BlockScaled(torch.float32, bits)
    assert wire.nbytes(0) == 0
    assert wire.nbytes(1) == 3
    assert wire.nbytes(BLOCK) == 2 + BLOCK * bits // 8
    assert 8 * wire.nbytes(1 << 20) / (1 << 20) <= most


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: f"{wire.bits} {wire.dtype}")
def test_blocks_without_a_scale(wire: BlockScaled) -> None:
    dtype = FLOATS[wire.dtype]
    values = np.ones(8 * BLOCK, dtype)
    values[BLOCK : 2 * BLOCK] = 0
    values[2 * BLOCK + 5], values[3 * BLOCK + 5], values[4 * BLOCK] = np.nan, np.inf, -np.inf
    values[5 * BLOCK] = LARGEST_SCALE * 2 * wire.largest
    values[6 * BLOCK : 7 * BLOCK] = SMALLEST_SCALE * wire.largest / 4
    held, _ = sent(wire, values)
    blocks = held.reshape(-1, BLOCK)
    assert [bool(np.isnan(block).all()) for block in blocks] == [False, False, True, True, True, True, False, False]
    assert not blocks[1].any()
    assert not blocks[6].any()
    np.testing.assert_allclose(blocks[[0, 7]], 1, rtol=2.0**-8)


@pytest.mark.parametrize("length", [STRETCH - 1, STRETCH, STRETCH + 1, 2 * STRETCH + BLOCK + 3])
@pytest.mark.parametrize("bits", [8, 4])
def test_long_payloads_are_their_blocks(bits: int, length: int) -> None:
    wire = BlockScaled(torch.float32, bits)
    values = np.random.default_rng(0).normal(size=length).astype(np.float32)
    held, _ = sent(wire, values)
    for start in range(0, length, 100 * BLOCK):
        part = slice(start, start + 100 * BLOCK)
        np.testing.assert_array_equal(held[part], sent(wire, values[part])[0])
