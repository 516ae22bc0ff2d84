"""Blocks: the fast search against all sizes of all loops."""

import pytest
from benchmarks.seeds.cache_blocks import CacheBlock, CacheLimits, search, search_all
from benchmarks.seeds.convolution_loops import ConvolutionLoops, cached_bytes_per_flop, unblocked_bytes_per_flop
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError

C5 = ConvolutionLoops(512, 1024, (12, 12), (3, 3))
THREAD = CacheLimits(128 << 10)

sides = st.tuples(st.integers(1, 5), st.integers(1, 5))
kernels = st.tuples(st.integers(1, 3), st.integers(1, 3))
small = st.builds(ConvolutionLoops, st.integers(1, 9), st.integers(1, 13), sides, kernels, st.integers(1, 3))


def test_the_worked_example() -> None:
    block = search(C5, THREAD)
    assert block == CacheBlock(1, 41, 48, 12, 12, 3, 3)
    assert block.nbytes(1) == 130_640
    assert block.bytes_per_flop(1) == pytest.approx(0.0256, abs=5e-5)


@pytest.mark.parametrize("channels", [(64, 128, 112), (128, 256, 56), (256, 512, 28), (512, 512, 14)])
def test_most_layers_need_at_most_004_bytes_per_flop_with_128_kb(channels: tuple[int, int, int]) -> None:
    """PCL-DNN 2.2, for minibatch 1."""
    into, out, side = channels
    loops = ConvolutionLoops(into, out, (side, side), (3, 3))
    assert search(loops, THREAD).bytes_per_flop(1) <= 0.04 < unblocked_bytes_per_flop(loops)


@given(small, st.integers(200, 4000), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_no_block_of_all_is_better(loops: ConvolutionLoops, cache: int, simd: int, samples: int) -> None:
    limits = CacheLimits(cache, simd)
    block = search(loops, limits, samples)
    assert block.nbytes(loops.stride) < cache
    assert block.out_channels % simd == 0
    assert block.bytes_per_flop(loops.stride) == pytest.approx(
        search_all(loops, limits, samples).bytes_per_flop(loops.stride)
    )


def test_a_cache_for_everything_reads_each_number_once() -> None:
    loops = ConvolutionLoops(3, 8, (4, 4), (3, 3))
    assert search(loops, THREAD) == CacheBlock(1, 3, 8, 4, 4, 3, 3)
    assert search(loops, THREAD).bytes_per_flop(1) == cached_bytes_per_flop(loops, 1)


def test_a_cache_that_is_too_small_is_refused() -> None:
    with pytest.raises(UsageError, match="below 40 bytes with vectors of 8; give more cache"):
        search(C5, CacheLimits(40))
