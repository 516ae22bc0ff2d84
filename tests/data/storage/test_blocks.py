import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.storage.blocks import (
    BLOCKS_PER_SAMPLE,
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    BlockRun,
    block_of,
    blocks_of,
)


def test_the_example_of_the_docstring() -> None:
    lengths = np.array([6, 3, 9], np.int32)
    sizes = blocks_of(lengths, 4)
    assert sizes.tolist() == [2, 1, 3]
    table = np.frombuffer(b"aaaaaa..bbb.ccccccccc...", np.uint8).reshape(-1, 4)
    blocks = BlockRun(np.array([3, 0]), sizes[[2, 0]]).stretch(0, 2, np.arange(5))
    assert blocks.tolist() == [3, 4, 5, 0, 1]
    assert table.take(blocks, 0).tobytes() == b"ccccccccc...aaaaaa.."


@given(st.data(), st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 9)), max_size=30))
def test_blocks_are_what_ranges_give(data: st.DataObject, samples: list[tuple[int, int]]) -> None:
    begins, sizes = (np.array([sample[each] for sample in samples], np.int64) for each in (0, 1))
    first = data.draw(st.integers(0, len(samples)))
    last = data.draw(st.integers(first, len(samples)))
    wanted = [block for begin, size in samples[first:last] for block in range(begin, begin + size)]
    ramp = np.arange(sizes.sum() + data.draw(st.integers(0, 3)))
    assert BlockRun(begins, sizes).stretch(first, last, ramp).tolist() == wanted


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=50))
def test_a_sample_fits_its_blocks_and_little_is_lost(lengths: list[int]) -> None:
    known = np.array(lengths, np.int32)
    block = block_of(known)
    for length, blocks in zip(lengths, blocks_of(known, block).tolist(), strict=True):
        assert (blocks - 1) * block < length <= blocks * block
    if len({*lengths}) == 1 and lengths[0]:
        assert block == lengths[0]
    else:
        assert block in range(MIN_BLOCK_BYTES, MAX_BLOCK_BYTES + 1, MIN_BLOCK_BYTES)
        assert block == MIN_BLOCK_BYTES or block * BLOCKS_PER_SAMPLE <= sum(lengths) / len(lengths)


@pytest.mark.parametrize(
    ("lengths", "block"), [([], 8), ([0, 0], 8), ([99, 100], 8), ([900, 940], 64), ([100_000, 200_000], 512)]
)
def test_blocks_of_unlike_lengths_are_a_multiple_of_8(lengths: list[int], block: int) -> None:
    assert block_of(np.array(lengths, np.int32)) == block
