from unisono.schedules.halving import halving
from unisono.schedules.schedule import Program, add, send
from unisono.schedules.text_diagram import draw


def test_two_ranks() -> None:
    assert draw(halving, 2, "halving").splitlines() == [
        "halving: 2 ranks, 2 chunks",
        "        round 0   round 1",
        "rank 0  1→1 +0←1  0→1 1←1",
        "rank 1  0→0 +1←0  1→0 0←0",
    ]


def test_lanes_are_tables_of_their_own() -> None:
    def two_lanes(rank: int, _: int) -> Program:
        return Program(4, tuple(((send(1 - rank, 2 * lane, 2), add(1 - rank, 2 * lane, 2)),) for lane in range(2)))

    assert draw(two_lanes, 2).splitlines() == [
        "schedule: 2 ranks, 4 chunks",
        "",
        "lane 0",
        "        round 0",
        "rank 0  0-1→1 +0-1←1",
        "rank 1  0-1→0 +0-1←0",
        "",
        "lane 1",
        "        round 0",
        "rank 0  2-3→1 +2-3←1",
        "rank 1  2-3→0 +2-3←0",
    ]


def test_one_rank_has_nothing_to_do() -> None:
    assert draw(halving, 1, "halving").splitlines()[0] == "halving: 1 ranks, 1 chunks"
