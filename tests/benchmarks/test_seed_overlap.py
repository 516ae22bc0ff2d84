from fractions import Fraction

import pytest
from benchmarks.seeds.overlap import (
    Layer,
    Machine,
    bubbles,
    least_samples,
    max_nodes,
    summed_bubbles_efficiency,
    worst_bubble_efficiency,
)
from hypothesis import assume, given
from hypothesis import strategies as st

UNIT = Machine(1, 1)

layers = st.lists(st.builds(Layer, st.integers(1, 100), st.integers(0, 100)), min_size=1, max_size=8)
machines = st.builds(Machine, st.integers(1, 50), st.integers(1, 50))


def test_the_worked_example() -> None:
    example = [Layer(3, 1), Layer(3, 1), Layer(3, 1), Layer(3, 4)]
    assert bubbles(example, UNIT) == [0, -2, -4, -3]
    assert worst_bubble_efficiency(example, UNIT) == 1
    assert max_nodes(example, UNIT, 14) == pytest.approx(14 * 10 / 7)


def test_the_first_layer_has_a_third_of_its_own_computing_to_hide_behind() -> None:
    assert bubbles([Layer(12, 5)], UNIT) == [1]
    assert bubbles([Layer(12, 5)], Machine(4, 1)) == [4]
    assert bubbles([Layer(12, 5)], Machine(1, 5)) == [-3]


def test_the_worst_bubble_is_what_counts() -> None:
    """Bubbles 3, 1, -1, -3: 12 of computing in 15, and in 16 where the two are added."""
    example = [Layer(3, 4), Layer(3, 1), Layer(3, 1), Layer(3, 1)]
    assert bubbles(example, UNIT) == [3, 1, -1, -3]
    assert worst_bubble_efficiency(example, UNIT) == 12 / 15
    assert summed_bubbles_efficiency(example, UNIT) == 12 / 16


@given(layers, machines)
def test_bubbles_are_those_of_the_formula(network: list[Layer], machine: Machine) -> None:
    delays = bubbles(network, machine)
    assert len(delays) == len(network)
    for i, bubble in enumerate(delays):
        ocomp = sum(Fraction(layer.computing) for layer in network[:i]) + Fraction(network[i].computing, 3)
        ocomms = sum(Fraction(layer.communication) for layer in network[: i + 1])
        assert bubble == pytest.approx(float(ocomms / machine.communication - ocomp / machine.computing), abs=1e-9)


@given(layers, machines)
def test_efficiency_is_1_without_a_positive_bubble(network: list[Layer], machine: Machine) -> None:
    efficiency = worst_bubble_efficiency(network, machine)
    assert 0 < efficiency <= 1
    assert summed_bubbles_efficiency(network, machine) <= efficiency
    assert (efficiency == 1) == (max(bubbles(network, machine)) <= 1e-12 * efficiency)


@given(layers, machines)
def test_a_faster_network_is_never_less_efficient(network: list[Layer], machine: Machine) -> None:
    twice = machine._replace(communication=2 * machine.communication)
    assert worst_bubble_efficiency(network, twice) >= worst_bubble_efficiency(network, machine)


@given(layers, machines, st.integers(1, 10_000))
def test_the_last_layer_is_hidden_up_to_max_nodes(network: list[Layer], machine: Machine, batch: int) -> None:
    assume(sum(layer.communication for layer in network))

    def last(nodes: float) -> float:
        return bubbles([layer._replace(computing=layer.computing * batch / nodes) for layer in network], machine)[-1]

    most = max_nodes(network, machine, batch)
    assert last(most * (1 - 1e-6)) < 0 < last(most * (1 + 1e-6))


@given(layers, machines, st.integers(1, 10_000))
def test_least_samples_are_those_of_a_node_among_the_most(network: list[Layer], machine: Machine, batch: int) -> None:
    assume(sum(layer.communication for layer in network))
    assert least_samples(network, machine) == pytest.approx(batch / max_nodes(network, machine, batch))


def test_the_rounding_of_table_1() -> None:
    assert least_samples([Layer(3 * 208, 1)], Machine(336, 1)) == pytest.approx(336 / 208)
