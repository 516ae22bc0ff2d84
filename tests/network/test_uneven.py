import pytest

from unisono.network import EVEN, NetworkError, Uneven
from unisono.placement import regular


def test_all_others_are_as_the_network() -> None:
    uneven = Uneven({1: 4}, {2: 0.005})
    assert uneven.factors(regular(1, 2, 2)) == [1, 4]
    assert uneven.starts(regular(1, 2, 2)) == [0, 0, 0.005, 0]
    assert EVEN.factors(regular(1, 2, 2)) == [1, 1]
    assert EVEN.starts(regular(1, 1, 2)) == [0, 0]


@pytest.mark.parametrize(
    ("nodes", "ranks", "words"),
    [
        ({0: 0.5}, {}, "node 0: its link is 0.5 times slower; give 1 or more"),
        ({0: float("nan")}, {}, "node 0"),
        ({}, {3: -1.0}, "rank 3 is -1 s late; give 0 or more"),
        ({}, {3: float("inf")}, "rank 3"),
    ],
)
def test_values_that_cannot_be(nodes: dict[int, float], ranks: dict[int, float], words: str) -> None:
    with pytest.raises(NetworkError, match=words):
        Uneven(nodes, ranks)


def test_nodes_and_ranks_that_do_not_exist() -> None:
    with pytest.raises(NetworkError, match="no node 2: nodes are 0 to 1"):
        Uneven({2: 2}).factors(regular(1, 2, 2))
    with pytest.raises(NetworkError, match="no rank 4: ranks are 0 to 3"):
        Uneven({}, {4: 1}).starts(regular(1, 2, 2))
