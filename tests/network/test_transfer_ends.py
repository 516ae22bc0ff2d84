import numpy as np
import pytest

from unisono.errors import ScheduleError
from unisono.network.transfer_ends import ends_of_forms, ends_of_programs
from unisono.placement import Placement, one_rank_per_node, regular
from unisono.schedules import find, names
from unisono.schedules.schedule import Program

PLACEMENTS = [*map(one_rank_per_node, range(1, 35)), regular(4, 8, 1), regular(2, 3, 1), regular(2, 2, 2)]


@pytest.mark.parametrize("name", names())
def test_forms_are_the_programs_of_all_ranks(name: str) -> None:
    for placement in PLACEMENTS:
        family, ranks = find(name, placement), placement.ranks
        if family.allreduce_forms is None:
            assert not name.startswith("halving")
            return
        compare(placement, name)
        assert sorted(np.concatenate([form.ranks for form in family.allreduce_forms(ranks)])) == list(range(ranks))


def compare(placement: Placement, name: str) -> None:
    family, ranks = find(name, placement), placement.ranks
    assert family.allreduce_forms is not None
    at_once = ends_of_forms(family.allreduce_forms(ranks), ranks)
    one_by_one = ends_of_programs(family.allreduce(rank, ranks) for rank in range(ranks))
    for found, expected in zip(at_once, one_by_one, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_ranks_with_other_lanes_are_refused() -> None:
    with pytest.raises(ScheduleError, match="a rank has 2 lanes where rank 0 has 1"):
        ends_of_programs([Program(1, ((),)), Program(1, ((), ()))])
