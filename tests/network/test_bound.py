import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.network import Network, Uneven, bound, shaped, simulate
from unisono.placement import one_rank_per_node, regular
from unisono.schedules import find, names

N, BETA = 1000, 1e-6
COLLECTIVES = ("allreduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


@pytest.mark.parametrize(
    ("collective", "share"),
    [("allreduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 0.75), ("broadcast", 1), ("all_to_all", 0.75)],
)
def test_four_nodes(collective: str, share: float) -> None:
    assert bound(collective, one_rank_per_node(4), Network(0, BETA), N) == pytest.approx(share * N * BETA)


def test_ranks_of_a_node_share_its_link() -> None:
    assert bound("allreduce", regular(1, 4, 8), Network(0, BETA), N) == pytest.approx(1.5 * N * BETA)
    assert bound("all_to_all", regular(1, 2, 4), Network(0, BETA), N) == pytest.approx(4 / 2 * N * BETA)


def test_one_node_has_no_bound() -> None:
    assert bound("allreduce", regular(1, 1, 4), Network(0, BETA), N) == 0


def test_a_narrow_uplink_is_the_bound() -> None:
    narrow = Network(0, BETA, uplink_beta=3 * BETA)
    assert bound("allreduce", regular(2, 4, 1), narrow, N) == pytest.approx(2 * 1 / 2 * N * 3 * BETA)
    assert bound("allreduce", regular(1, 8, 1), narrow, N) == pytest.approx(2 * 7 / 8 * N * BETA)


def test_a_slow_node_sends_its_own_numbers_at_least() -> None:
    slow = Uneven({0: 10.0})
    assert bound("allreduce", one_rank_per_node(4), Network(0, BETA), N, slow) == pytest.approx(10 * N * BETA)
    barely = Uneven({0: 1.2})
    together = 6 * N * BETA / (3 + 1 / 1.2)
    assert bound("allreduce", one_rank_per_node(4), Network(0, BETA), N, barely) == pytest.approx(together)


@given(
    name=st.sampled_from(names()),
    collective=st.sampled_from(COLLECTIVES),
    shape=st.sampled_from([(1, 2, 1), (1, 3, 1), (1, 7, 1), (2, 3, 1), (2, 2, 2), (3, 1, 2)]),
    slow=st.dictionaries(st.integers(0, 1), st.floats(1, 20)),
)
def test_no_schedule_beats_the_bound(
    name: str, collective: str, shape: tuple[int, int, int], slow: dict[int, float]
) -> None:
    placement, network, nbytes = regular(*shape), shaped(10e6, shape[1], 3), 84_000
    algorithm = getattr(find(name, placement), collective)
    if algorithm is None:
        return
    payloads = algorithm(0, placement.ranks).chunks // placement.ranks if collective == "all_to_all" else 1
    chunks = nbytes * payloads
    seconds = simulate(algorithm, placement, network, chunks, chunks, uneven=Uneven(slow)).seconds
    assert seconds >= bound(collective, placement, network, nbytes, Uneven(slow)) * (1 - 1e-6)
