"""`verify` refuses what is wrong, and says where."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import ScheduleError
from unisono.placement import one_rank_per_node
from unisono.schedules import find, names
from unisono.schedules.schedule import Algorithm, Lane, Program, add, receive, send
from unisono.schedules.verify import Goal, check_placement, verify


def on_two_ranks(*lanes: Lane, chunks: int = 1) -> Algorithm:
    """A schedule whose two ranks have these one-lane programs."""
    return lambda rank, _: Program(chunks, (lanes[rank],), landing=2)


def refused(algorithm: Algorithm, message: str, ranks: int = 2, goal: Goal = Goal.ALLREDUCE) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(algorithm, ranks, goal)


def test_a_missing_contribution() -> None:
    refused(on_two_ranks(((send(1, 0),),), ((add(0, 0),),)), "rank 0 ends with chunk 0 lacking .* ranks \\[1\\]")


def test_a_contribution_twice() -> None:
    twice = on_two_ranks(((send(1, 0),), (send(1, 0),)), ((add(0, 0),), (add(0, 0),)))
    refused(twice, "rank 1, lane 0, round 1: chunk 0 gets the contributions of \\[0\\] twice")


def test_wrong_steady_flag_is_refused() -> None:
    """Four ranks of which rank 0 hears from three others, or of which one does not say the same."""
    collect = (tuple(add(peer, 0) for peer in (1, 2, 3)),)
    flood = lambda rank, _: Program(1, (collect if rank == 0 else ((send(0, 0),),),), 3, steady=True)  # noqa: E731
    refused(flood, "rank 0 receives from ranks \\[1, 2, 3\\]", ranks=4)
    partly = lambda rank, _: Program(1, (((send(1 - rank, 0), add(1 - rank, 0)),),), steady=rank == 0)  # noqa: E731
    refused(partly, "rank 1 has steady = False; rank 0 has steady = True")


def test_two_ranks_that_wait_for_each_other() -> None:
    refused(on_two_ranks(((receive(1, 0),), (send(1, 0),)), ((receive(0, 0),), (send(0, 0),))), "waits forever")


def test_message_without_receiver() -> None:
    refused(on_two_ranks(((send(1, 0),),), ()), "rank 0, lane 0, round 0 waits forever: send")


def test_it_needs_no_buffers() -> None:
    """Both send first and take later: right only if messages are buffered."""
    refused(on_two_ranks(((send(1, 0),), (add(1, 0),)), ((send(0, 0),), (add(0, 0),))), "waits forever: send")


def test_messages_received_in_another_order() -> None:
    swapped = on_two_ranks(((send(1, 0), send(1, 1)),), ((add(0, 1), add(0, 0)),), chunks=2)
    refused(swapped, "add chunk 1 .* is matched by a message of chunk 0")


@pytest.mark.parametrize(
    ("transfers", "message"),
    [
        ((receive(1, 0), receive(1, 0)), "race"),
        ((send(1, 0), receive(1, 0)), "race"),
        ((add(1, 0, 2), add(1, 1)), "race"),
        ((send(0, 0),), "no such peer"),
        ((send(2, 0),), "no such peer"),
        ((send(1, 2),), "no such chunks"),
        ((send(1, 0, 3),), "no such chunks"),
    ],
)
def test_errors_of_a_single_program(transfers: tuple, message: str) -> None:
    refused(on_two_ranks((transfers,), (), chunks=2), message)


def test_a_chunk_of_two_lanes() -> None:
    refused(lambda rank, _: Program(1, (((send(1 - rank, 0),),), ((add(1 - rank, 0),),))), "belongs to lane 0")


def test_parts_need_a_chunk_for_each_rank() -> None:
    refused(find("flat", one_rank_per_node(4)).allreduce, "needs 4 chunks", ranks=4, goal=Goal.REDUCE_SCATTER)


def test_ranks_that_differ_in_shape() -> None:
    refused(lambda rank, _: Program(1 + rank, ((),)), "rank 1 cuts the payload into 2 chunks, rank 0 into 1")
    refused(lambda rank, _: Program(1, ((),) * (1 + rank)), "rank 1 has lanes = 2; rank 0 has lanes = 1")
    refused(lambda rank, _: Program(1, ((),), 1 + rank), "rank 1 has landing = 2; rank 0 has landing = 1")


def test_lanes_that_do_not_make_columns_and_empty_rounds() -> None:
    refused(lambda rank, _: Program(1, ((),), columns=2), "1 lanes do not make 2 columns")
    refused(on_two_ranks(((),), ((),)), "rank 0, lane 0, round 0 has no transfers")
    with pytest.raises(ScheduleError, match="on 1 rank or more, not on 0"):
        verify(on_two_ranks((), ()), 0)


def test_a_sum_that_is_kept_and_never_sent_has_other_bits_on_a_narrow_wire() -> None:
    """Ranks 0 and 2 both make the whole sum; rank 0 sends its own on to rank 1, which rounds it; rank 2 does not."""

    def both_sum(rank: int, _: int) -> Program:
        lanes = {
            0: ((add(1, 0),), (send(2, 0), add(2, 0)), (send(1, 0),)),
            1: ((send(0, 0),), (receive(0, 0),)),
            2: ((send(0, 0), add(0, 0)),),
        }
        return Program(1, (lanes[rank],))

    refused(both_sum, "rank 2 ends with other bits in chunk 0 than rank 0 on a narrow wire", ranks=3)

    def one_sums(rank: int, _: int) -> Program:
        lanes = {
            0: ((add(1, 0),), (add(2, 0),), (send(1, 0), send(2, 0))),
            1: ((send(0, 0),), (receive(0, 0),)),
            2: ((send(0, 0),), (receive(0, 0),)),
        }
        return Program(1, (lanes[rank],))

    verify(one_sums, 3)


def test_sums_in_another_order_have_other_bits_on_any_wire() -> None:
    """Dissemination: rank 0 sums (0 + 3) + (2 + 1), rank 1 (1 + 0) + (3 + 2). With r XOR 2^k all sum alike."""

    def dissemination(rank: int, ranks: int) -> Program:
        rounds = [(send((rank + step) % ranks, 0), add((rank - step) % ranks, 0)) for step in (1, 2) if step < ranks]
        return Program(1, (tuple(rounds),))

    def doubling(rank: int, ranks: int) -> Program:
        return Program(1, (tuple((send(rank ^ step, 0), add(rank ^ step, 0)) for step in (1, 2) if step < ranks),))

    refused(dissemination, "than rank 0: their terms were summed in another order", ranks=4)
    verify(doubling, 4)


def test_landing_above_the_limit_of_the_program() -> None:
    refused(
        on_two_ranks(((send(1, 0, 3),),), ((add(0, 0, 3),),), chunks=3), "3 chunks are received at once; .* limit is 2"
    )


def test_broadcast_that_sums_with_old_contents() -> None:
    refused(on_two_ranks(((send(1, 0),),), ((add(0, 0),),)), "rank 1 .* with what lay there", goal=Goal.BROADCAST)
    refused(on_two_ranks((), ()), "rank 1 ends with chunk 0 lacking", goal=Goal.BROADCAST)


def test_all_to_all_with_a_wrong_or_missing_chunk() -> None:
    def exchange(sent: int, placed: int) -> Algorithm:
        return lambda rank, _: Program(4, (((send(1 - rank, sent ^ rank), receive(1 - rank, placed ^ rank)),),))

    verify(exchange(1, 3), 2, Goal.ALL_TO_ALL)
    refused(exchange(0, 3), "rank 0 ends with chunk 3 holding \\[3\\], not \\[2\\]", goal=Goal.ALL_TO_ALL)
    refused(exchange(1, 2), "rank 0 ends with chunk 3 holding \\[-1\\], not \\[2\\]", goal=Goal.ALL_TO_ALL)
    refused(lambda rank, _: Program(4, ((),)), "chunk 3 holding", goal=Goal.ALL_TO_ALL)
    refused(lambda rank, _: Program(2, ((),)), "needs 4 chunks, not 2", goal=Goal.ALL_TO_ALL)


def without(algorithm: Algorithm, rank: int, round_number: int, place: int) -> Algorithm:
    """The schedule with one transfer left out."""

    def broken(me: int, ranks: int) -> Program:
        program = algorithm(me, ranks)
        lane, *others = program.lanes
        if me == rank:
            transfers = list(lane[round_number])
            del transfers[place]
            lane = (*lane[:round_number], tuple(transfers), *lane[round_number + 1 :])
        return program._replace(lanes=(lane, *others))

    return broken


@given(st.data())
def test_any_missing_transfer_is_detected(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 9))
    algorithm = find(data.draw(st.sampled_from(names())), one_rank_per_node(ranks)).allreduce
    rank = data.draw(st.integers(0, ranks - 1))
    lane = algorithm(rank, ranks).lanes[0]
    round_number = data.draw(st.integers(0, len(lane) - 1))
    place = data.draw(st.integers(0, len(lane[round_number]) - 1))
    broken: Callable[[int, int], Program] = without(algorithm, rank, round_number, place)
    with pytest.raises(ScheduleError):
        verify(broken, ranks)


def test_remote_landing_or_columns_above_the_limit_of_the_program() -> None:
    from unisono.placement import regular

    def named(columns: int, far: int) -> Algorithm:
        def algorithm(rank: int, _: int) -> Program:
            meets = lambda chunk: ((send(1 - rank, chunk), add(1 - rank, chunk)),)  # noqa: E731
            return Program(2, (meets(0), meets(1)), 1, columns, far)

        return algorithm

    verify(named(1, 1), 2)
    refused(named(2, 1), r"rank 0 adds in the lanes of columns \[0, 1\]; at most one is allowed")
    refused(named(1, 0), "rank 0: 1 chunks are received at once from other nodes; the program's limit is 0")
    verify(named(1, 0), 2, placement=regular(1, 1, 2))


def test_columns_of_no_lane_count_no_additions() -> None:
    """A placement is checked by itself, too: a program of more columns than lanes only sends here."""
    check_placement(0, Program(1, (((send(1, 0),),),), columns=2), one_rank_per_node(2))
