import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.network import Network, Uneven, shaped, simulate
from unisono.network.critical_path import Cause
from unisono.placement import one_rank_per_node, place, regular
from unisono.schedules import find, names
from unisono.schedules.ring import ring
from unisono.schedules.schedule import Program, receive, send


def one_message(rank: int, _: int) -> Program:
    return Program(1, (((receive(0, 0) if rank else send(1, 0),),),))


def test_the_worked_example() -> None:
    late = Uneven({}, {0: 5e-3})
    done = simulate(one_message, one_rank_per_node(2), Network(1e-3, 1e-6), 8000, uneven=late)
    assert [(cause, at) for cause, at, _ in done.delays] == [
        (Cause.LINK, "out of node 0"),
        (Cause.LATE, "rank 0"),
        (Cause.LATENCY, ""),
    ]
    assert [seconds for _, _, seconds in done.delays] == pytest.approx([8e-3, 5e-3, 1e-3])


def test_a_message_within_a_node() -> None:
    done = simulate(one_message, place("aa"), Network(1, 1, within_alpha=1e-3, within_beta=1e-6, overhead=1e-4), 8000)
    assert [(cause, at) for cause, at, _ in done.delays] == [(Cause.WITHIN, ""), (Cause.SUMS, "")]


def test_the_slowest_link_is_named() -> None:
    done = simulate(ring, one_rank_per_node(8), shaped(1e9), 1 << 20, uneven=Uneven({5: 4}))
    assert done.delays[0].cause is Cause.LINK
    assert done.delays[0].place in ("out of node 5", "into node 5")


def test_a_narrow_uplink_is_named() -> None:
    placement = regular(2, 4, 1)
    done = simulate(find("halving", placement).allreduce, placement, shaped(1e9, 4, 16), 1 << 20)
    assert done.delays[0].place.endswith(("of supernode 0", "of supernode 1"))


def test_nothing_to_do() -> None:
    assert simulate(ring, one_rank_per_node(1), Network(1e-3, 1e-6), 8000).delays == ()


@settings(max_examples=80)
@given(
    name=st.sampled_from(names()),
    shape=st.sampled_from([(1, 3, 1), (1, 7, 1), (2, 3, 1), (2, 2, 2), (1, 1, 4)]),
    in_flight=st.integers(1, 4),
    eager=st.sampled_from([0, 1 << 11]),
    late=st.dictionaries(st.integers(0, 2), st.floats(0, 0.3)),
    slow=st.dictionaries(st.just(0), st.floats(1, 9)),
)
def test_the_waits_partition_the_time(
    name: str,
    shape: tuple[int, int, int],
    in_flight: int,
    eager: int,
    late: dict[int, float],
    slow: dict[int, float],
) -> None:
    placement, network = regular(*shape), shaped(10e6, shape[1], 3)
    algorithm = find(name, placement).allreduce
    done = simulate(algorithm, placement, network, 50_000, 1 << 12, in_flight, eager, uneven=Uneven(slow, late))
    assert sum(delay.seconds for delay in done.delays) == pytest.approx(done.seconds)
    assert all(delay.seconds > 0 for delay in done.delays)
