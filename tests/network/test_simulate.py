from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import ScheduleError
from unisono.network import DEFAULT, Network, NetworkError, Uneven, price, shaped, simulate
from unisono.network.simulate import Cause
from unisono.network.traffic import Routes, traffic
from unisono.placement import one_rank_per_node, place, regular
from unisono.schedules import find, names
from unisono.schedules.direct import direct
from unisono.schedules.ring import ring
from unisono.schedules.schedule import Lane, Program, receive, send

ALPHA, BETA, GAMMA = 1e-3, 1e-6, 1e-7
NETWORK = Network(ALPHA, BETA, GAMMA)
BYTES = 80_000


def written(*lanes: Lane) -> Callable[[int, int], Program]:
    """A schedule of one lane and one chunk, written out rank by rank."""
    return lambda rank, _: Program(1, (lanes[rank],))


ONE_MESSAGE = written(((send(1, 0),),), ((receive(0, 0),),))


def test_one_message() -> None:
    result = simulate(ONE_MESSAGE, one_rank_per_node(2), NETWORK, BYTES)
    assert result.seconds == pytest.approx(ALPHA + BYTES * BETA)
    assert result.messages == 1


def test_one_message_within_a_node() -> None:
    network = Network(ALPHA, BETA, within_alpha=ALPHA / 2, within_beta=BETA / 8)
    result = simulate(ONE_MESSAGE, place("aa"), network, BYTES)
    assert result.seconds == pytest.approx(ALPHA / 2 + BYTES * BETA / 8)


def test_nothing_to_do() -> None:
    assert simulate(ring, one_rank_per_node(1), NETWORK, BYTES).seconds == 0
    assert simulate(ring, one_rank_per_node(4), NETWORK, 0).seconds == 0


def test_a_ring_in_one_piece() -> None:
    link = 2 * 3 / 4 * BYTES * BETA
    assert simulate(ring, one_rank_per_node(4), Network(0, BETA), BYTES).seconds == pytest.approx(link)
    sums = 3 / 4 * BYTES * GAMMA
    assert simulate(ring, one_rank_per_node(4), NETWORK, BYTES).seconds == pytest.approx(6 * ALPHA + link + sums)


def test_both_directions_of_a_link_are_free_of_each_other() -> None:
    swap = written(((send(1, 0), receive(1, 0)),), ((send(0, 0), receive(0, 0)),))
    assert simulate(swap, one_rank_per_node(2), NETWORK, BYTES).seconds == pytest.approx(ALPHA + BYTES * BETA)


def test_two_flows_share_an_uplink() -> None:
    over = written(((send(2, 0),),), ((send(3, 0),),), ((receive(0, 0),),), ((receive(1, 0),),))
    narrow = Network(ALPHA, BETA, uplink_beta=BETA)
    result = simulate(over, regular(2, 2, 1), narrow, BYTES)
    assert result.seconds == pytest.approx(ALPHA + 2 * BYTES * BETA)
    wide = Network(ALPHA, BETA, uplink_beta=BETA / 2)
    assert simulate(over, regular(2, 2, 1), wide, BYTES).seconds == pytest.approx(ALPHA + BYTES * BETA)


def test_large_messages_wait_for_the_receiver_and_small_ones_do_not() -> None:
    late = written(((send(1, 0),),), ((receive(2, 0),), (receive(0, 0),)), ((send(1, 0),),))
    waits = simulate(late, one_rank_per_node(3), NETWORK, BYTES, eager=BYTES - 1)
    assert waits.seconds == pytest.approx(2 * (ALPHA + BYTES * BETA))
    goes = simulate(late, one_rank_per_node(3), NETWORK, BYTES, eager=BYTES)
    assert goes.seconds == pytest.approx(ALPHA + 2 * BYTES * BETA)


def test_as_many_pieces_at_once_as_may_be_in_flight() -> None:
    one_by_one = simulate(ONE_MESSAGE, one_rank_per_node(2), NETWORK, BYTES, piece_bytes=BYTES // 4, in_flight=1)
    assert one_by_one.seconds == pytest.approx(4 * ALPHA + BYTES * BETA)
    assert one_by_one.messages == 4
    at_once = simulate(ONE_MESSAGE, one_rank_per_node(2), NETWORK, BYTES, piece_bytes=BYTES // 4, in_flight=4)
    assert at_once.seconds == pytest.approx(ALPHA + BYTES * BETA)


def test_messages_between_two_ranks_are_sequential() -> None:
    relay = written(((send(1, 0),),), ((receive(0, 0),), (send(2, 0),)), ((receive(1, 0),),))
    result = simulate(
        relay, one_rank_per_node(3), Network(0, BETA), BYTES, piece_bytes=BYTES // 4, in_flight=4, eager=0
    )
    assert result.seconds == pytest.approx(5 / 4 * BYTES * BETA)


@pytest.mark.parametrize("name", ["halving", "halving/round-robin"])
def test_equals_price_if_all_ranks_do_the_same(name: str) -> None:
    placement = regular(4, 8, 1)
    network = shaped(10e9, 8, 4)
    algorithm = find(name, placement).allreduce
    result = simulate(algorithm, placement, network, 1 << 22)
    assert result.seconds == pytest.approx(price(algorithm, placement, network, 1 << 22), rel=1e-6)


def test_fewer_elements_than_chunks() -> None:
    result = simulate(ring, one_rank_per_node(4), NETWORK, 4)
    assert result.messages == 6, "one element travels around twice, but for the last and the first step"
    assert result.seconds == pytest.approx(6 * (ALPHA + 4 * BETA) + 3 * 4 * GAMMA)


@given(
    name=st.sampled_from(names()),
    shape=st.sampled_from([(1, 2, 1), (1, 3, 1), (1, 7, 1), (2, 3, 1), (2, 2, 2), (3, 1, 2), (1, 1, 4)]),
    nbytes=st.integers(1, 1 << 16),
    in_flight=st.integers(1, 5),
    eager=st.sampled_from([0, 1 << 11]),
)
def test_no_link_carries_more_than_it_can(
    name: str, shape: tuple[int, int, int], nbytes: int, in_flight: int, eager: int
) -> None:
    placement = regular(*shape)
    network = shaped(10e6, shape[1], 3)
    algorithm = find(name, placement).allreduce
    result = simulate(algorithm, placement, network, nbytes, 1 << 12, in_flight, eager)
    every = traffic(algorithm, placement.ranks, nbytes, 1 << 12)
    assert result.seconds >= Routes(every, placement, network, Uneven()).seconds(every).max() * (1 - 1e-6)
    all_after_another = result.messages * float(network.alpha) + 4 * placement.ranks**2 * nbytes * 3 * 8 / 10e6
    assert result.seconds <= all_after_another


def test_too_many_messages_are_refused_before_they_are_made() -> None:
    with pytest.raises(NetworkError, match=r"134,201,344 messages of 8,192 ranks.*price"):
        simulate(direct, one_rank_per_node(8192), DEFAULT, 1 << 20)


def test_a_schedule_that_waits_forever() -> None:
    nobody_sends_first = written(((receive(1, 0),), (send(1, 0),)), ((receive(0, 0),), (send(0, 0),)))
    with pytest.raises(ScheduleError, match="wait forever"):
        simulate(nobody_sends_first, one_rank_per_node(2), NETWORK, BYTES)


def test_messages_without_receiver() -> None:
    with pytest.raises(ScheduleError, match="verify"):
        simulate(written(((send(1, 0),),), ()), one_rank_per_node(2), NETWORK, BYTES)


def test_ranks_with_other_lanes_are_refused() -> None:
    with pytest.raises(ScheduleError, match="a rank has 2 lanes where rank 0 has 1"):
        simulate(lambda rank, _: Program(1, ((),) * (1 + rank)), one_rank_per_node(2), NETWORK, BYTES)


def test_coarse_time_is_nearly_right() -> None:
    placement = regular(5, 8, 1)
    algorithm = find("halving/round-robin", placement).allreduce
    exact = simulate(algorithm, placement, shaped(10e9, 8, 4), 1 << 24)
    coarse = simulate(algorithm, placement, shaped(10e9, 8, 4), 1 << 24, max_exact_flows=0)
    assert (exact.exact, coarse.exact) == (True, False)
    assert coarse.seconds == pytest.approx(exact.seconds, rel=0.04)
    assert coarse.steps < exact.steps


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


def test_nothing_to_do_has_no_delays() -> None:
    assert simulate(ring, one_rank_per_node(1), Network(1e-3, 1e-6), 8000).delays == ()


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
