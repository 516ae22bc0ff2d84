"""Groups of messages, beside messages one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.network import Simulated, Uneven, shaped, simulate
from unisono.network.flows import GroupedFlows
from unisono.network.traffic import Numbers
from unisono.placement import regular
from unisono.schedules import find, names

SHAPES = [(1, 5, 1), (2, 3, 1), (2, 8, 1), (4, 4, 1), (3, 4, 1), (2, 2, 2), (2, 2, 3)]


class OneByOne(GroupedFlows):
    """Messages each in a group of its own."""

    def _kinds(self, messages: Numbers) -> Numbers:
        return np.arange(len(messages))


def simulated(name: str, shape: tuple[int, int, int], nbytes: int, uneven: Uneven, eager: int) -> Simulated:
    placement, network = regular(*shape), shaped(10e6, shape[1], 3)
    return simulate(find(name, placement).allreduce, placement, network, nbytes, 1 << 12, 4, eager, uneven=uneven)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(names()),
    shape=st.sampled_from(SHAPES),
    nbytes=st.sampled_from([60, 20_000, 100_000]),
    slow=st.dictionaries(st.integers(0, 3), st.sampled_from([1.5, 4.0]), max_size=2),
    late=st.dictionaries(st.integers(0, 4), st.sampled_from([0.001, 0.1]), max_size=2),
    eager=st.sampled_from([0, 1 << 11]),
)
def test_groups_end_when_their_messages_do(
    name: str, shape: tuple[int, int, int], nbytes: int, slow: dict[int, float], late: dict[int, float], eager: int
) -> None:
    uneven = Uneven({node: times for node, times in slow.items() if node < shape[0] * shape[1]}, late)
    found = simulated(name, shape, nbytes, uneven, eager)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("unisono.network.play.GroupedFlows", OneByOne)
        expected = simulated(name, shape, nbytes, uneven, eager)
    assert found.ends == pytest.approx(expected.ends, rel=1e-6)
    assert (found.messages, found.node_bytes) == (expected.messages, expected.node_bytes)


def test_a_round_of_equal_ranks_is_a_few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    start = GroupedFlows.start

    def counted(flows: GroupedFlows, messages: Numbers) -> None:
        nonlocal most
        start(flows, messages)
        most = max(most, len(flows.counts))

    monkeypatch.setattr(GroupedFlows, "start", counted)
    simulated("halving", (4, 16, 1), 1 << 16, Uneven(), 0)
    assert most == 4, "64 messages between 4 supernodes and 4 others, or inside 4"
