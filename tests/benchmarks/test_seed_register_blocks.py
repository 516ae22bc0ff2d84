import pytest
from benchmarks.seeds.register_blocks import (
    E5_V3,
    CoreIssue,
    forward_efficiency,
    grad_weight_channels,
    grad_weight_efficiency,
)
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError


def cycle_by_cycle(sums: int, kernel: tuple[int, int], core: CoreIssue) -> float:
    """Count the cycles of the inner loops one instruction after another, as the section's equations do."""
    loads = stores = products = 0
    for _ in range(sums):
        loads += 1
        stores += 1
    for _ in range(core.simd_width * kernel[0] * kernel[1]):
        loads += 1
        products += sums
    busy = products / core.products
    return busy / (busy + loads / core.loads + stores / core.stores)


@pytest.mark.parametrize("sums", range(10, 16))
@pytest.mark.parametrize("kernel", [(1, 1), (1, 3), (3, 3), (5, 5), (11, 11)])
def test_forward_is_that_of_the_loops(sums: int, kernel: tuple[int, int]) -> None:
    assert forward_efficiency(sums, kernel) == pytest.approx(cycle_by_cycle(sums, kernel, E5_V3))


def test_figures_of_the_paper() -> None:
    assert forward_efficiency(12, (3, 3)) == pytest.approx(0.88, abs=0.01)
    assert forward_efficiency(12, (1, 3)) == pytest.approx(144 / 174)  # with its loop bounds as printed
    assert (E5_V3.least_sums, E5_V3.most_sums) == (10, 15)


def test_kernels_share_registers_as_the_paper_proposes() -> None:
    """3x3: 4 channels; 5x5 and 7x7: 2; 11x11: 1."""
    assert {columns: grad_weight_channels(columns) for columns in (3, 5, 7, 11)} == {3: 4, 5: 2, 7: 2, 11: 1}


def test_the_worked_example_of_grad_weight() -> None:
    assert grad_weight_efficiency(9, 144) == pytest.approx(0.80, abs=0.005)
    assert grad_weight_efficiency(12, 144) == pytest.approx(0.91, abs=0.005)
    assert grad_weight_efficiency(9, 12) == pytest.approx(0.68, abs=0.005)


@given(st.integers(1, 9), st.integers(1, 500))
def test_fewer_sums_than_the_latency_needs_leave_cycles_empty(sums: int, outputs: int) -> None:
    assert forward_efficiency(sums, (3, 3)) < sums / 10
    assert grad_weight_efficiency(sums, outputs) < sums / 10


def test_sums_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="16 sums in registers; a core with 16 has room for 1 to 15"):
        forward_efficiency(16, (3, 3))
    assert grad_weight_channels(8) == 1  # 2 would need 16
    with pytest.raises(UsageError, match="16 sums"):
        grad_weight_channels(16)
