"""First pieces beside simulations of all pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.network import Uneven, shaped, simulate
from unisono.network.first_piece import simulate_first_piece
from unisono.placement import regular
from unisono.schedules import find

SHAPES = [(1, 2, 1), (1, 7, 1), (2, 8, 1), (4, 8, 1), (3, 4, 1), (5, 8, 1), (8, 8, 1)]
PIECE_BYTES, IN_FLIGHT, EAGER = 1 << 12, 8, 1 << 10


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    variant=st.sampled_from(["", "/round-robin"]),
    pieces=st.sampled_from([0.1, 1, 1.2, 2, 3.5, 8, 13, 40]),
    slow=st.tuples(st.integers(0, 63), st.sampled_from([1.0, 1.5, 4.0, 20.0])),
    oversubscribed=st.sampled_from([0, 1, 4]),
    alpha=st.sampled_from([1e-6, 25e-6]),
)
def test_first_pieces_are_near_simulations(
    shape: tuple[int, int, int],
    variant: str,
    pieces: float,
    slow: tuple[int, float],
    oversubscribed: float,
    alpha: float,
) -> None:
    placement, network = regular(*shape), shaped(10e9, shape[1], oversubscribed, alpha)
    family = find(f"halving{variant}", placement)
    assert family.allreduce_forms is not None
    uneven = Uneven({slow[0] % len(placement.nodes): slow[1]})
    nbytes = int(pieces * family.allreduce(0, placement.ranks).chunks * PIECE_BYTES)
    options = placement, network, nbytes, PIECE_BYTES, IN_FLIGHT, EAGER
    done = simulate_first_piece(family.allreduce, family.allreduce_forms, *options, uneven)
    exact = simulate(family.allreduce, *options, uneven=uneven)
    if pieces <= 1:
        assert done.ends == pytest.approx(exact.ends, rel=1e-6)
    assert 0.7 < done.seconds / exact.seconds < 1.5
    assert max(done.ends) == done.seconds
    assert sum(delay.seconds for delay in done.delays) == pytest.approx(done.seconds)
